import pytest
import torch
from torch import nn

from pumice.memory import measure
from pumice.optim import GradientRelease, SinkGD


def test_peak_of_an_adamw_step_by_category() -> None:
    """Two moments and the weights throughout; in the step, all gradients and a temporary of one matrix."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    matrix = 64 * 64 * 4
    x = torch.ones(1, 64)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with measure(model, optimizer) as found:
        step()
    assert found.breakdown_bytes["weights"] == 2 * matrix
    assert found.breakdown_bytes["gradients"] == 2 * matrix
    assert found.breakdown_bytes["optimizer_state"] == 4 * matrix + 2 * 4
    assert matrix <= found.breakdown_bytes["transient"] <= 3 * matrix + 2048
    assert found.peak_bytes == sum(found.breakdown_bytes.values())


def test_activations_count_until_they_are_used() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid())
    x = torch.ones(1024, 8)
    with measure(model) as found:
        model(x).sum().backward()
    assert found.peak_bytes >= (2 * 1024 * 8 + 1024 * 8) * 4  # two outputs of sigmoid, and the gradient of one
    assert found.breakdown_bytes["weights"] == 2 * (64 + 8) * 4


def test_state_made_in_the_context_becomes_state() -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    with measure(model, optimizer) as found:
        for _ in range(2):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
    assert found.breakdown_bytes["optimizer_state"] == 2 * 64 * 64 * 4 + 4


@pytest.mark.parametrize("compiled", [False, True])
def test_released_gradients(compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
    peaks = []
    for release in (False, True):
        optimizer = SinkGD.from_model(model, 0.01, compile=compiled)
        if release:
            GradientRelease(optimizer)
        for _ in range(2):
            with measure(model, optimizer) as found:
                model(torch.ones(2, 96)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        peaks.append(found.peak_bytes)
    assert peaks[0] - peaks[1] > 6 * 96 * 96 * 4


def test_the_optimizer_is_as_before() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ZeroDivisionError), measure(model, optimizer):
        raise ZeroDivisionError
    assert not optimizer._optimizer_step_pre_hooks
    assert not model.weight._post_accumulate_grad_hooks
