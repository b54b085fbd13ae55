from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pumice.optim import SinkGD
from pumice.train.meter import Meter, state_bytes
from pumice.train.summary import adamw_state_bytes


def batches() -> list[Tensor]:
    return [torch.arange(6).reshape(2, 3), torch.arange(6, 12).reshape(2, 3)]


def seen(order: list[Tensor]) -> str:
    meter = Meter()
    for batch in order:
        meter.see(batch, world_size=1)
    return meter.batches


def test_hash_tells_order_and_content() -> None:
    one, two = batches()
    assert seen([one, two]) == seen([one.int(), two.clone()])
    assert len({seen([one, two]), seen([two, one]), seen([one]), seen([one, two + 1])}) == 4


def test_counts_on_after_a_resumption() -> None:
    one, two = batches()
    first = Meter()
    first.see(one, world_size=3)
    first.seconds, first.peak_memory = 2.0, 1 << 60
    second = Meter()
    second.restore(SimpleNamespace(stateful_callbacks={"Meter": first.state()}))
    second.see(two, world_size=3)
    assert second.tokens == 36
    assert second.batches == seen([one, two])
    assert second.tokens_per_second == 18.0
    second.measure()
    assert second.peak_memory == 1 << 60


def test_speed_is_since_the_last_log(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 5.0, 7.0, 7.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    meter, nothing = Meter(), SimpleNamespace(stateful_callbacks={})
    arguments: tuple[Any, ...] = (None, nothing, None)
    meter.on_train_begin(*arguments, optimizer=None)
    meter.see(torch.zeros(10), 1)
    meter.on_step_end(*arguments)  # one second
    assert meter.complete({"loss": 1.0}) == {"loss": 1.0, "tokens": 10, "tokens_per_second": 10.0}
    meter.on_evaluate(*arguments)  # four seconds that do not count
    meter.see(torch.zeros(10), 1)
    meter.on_step_end(*arguments)  # two seconds
    assert meter.complete({"eval_loss": 1.0}) == {"eval_loss": 1.0, "tokens": 20}
    assert meter.complete({"loss": 1.0})["tokens_per_second"] == 5.0


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(64, 128), nn.Linear(128, 128))
    model[1].bias.requires_grad_(False)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    model(torch.arange(64)).square().sum().backward()
    optimizer.step()
    return state_bytes(optimizer)


def test_bytes_of_adamw(model: nn.Module) -> None:
    weights = 64 * 128 + 128 * 128
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert step(model, torch.optim.AdamW(trained)) == adamw_state_bytes(model) == 8 * weights + 2 * 4


def test_bytes_of_quantised_state_are_those_stored(model: nn.Module) -> None:
    """Two moments of one byte a weight, and a share of scales; as float32 they would be eight bytes."""
    embedding = 64 * 128
    used = step(model, SinkGD.from_model(model, 1e-3, state_bits=8))
    assert 2 * embedding < used < 3 * embedding
