"""Optimizer state: saved, loaded, copied and resumed without losing a bit."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pumice.optim import SinkGD
from tests.numerics.oracle import normal

OPTIONS = {"lr": 0.01, "weight_decay": 0.1, "spectral_target": 1.0, "compile": False}
KINDS = {
    "float32, 32-bit state": (torch.float32, 32),
    "bfloat16, 8-bit state": (torch.bfloat16, 8),
    "float64, 32-bit state": (torch.float64, 32),
}


def network(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 96), nn.Linear(96, 6), nn.Linear(6, 6), nn.LayerNorm(6)).to(dtype)


def run(model: nn.Module, optimizer: SinkGD, steps: range) -> None:
    for step in steps:
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i).to(parameter.dtype)
        optimizer.step()


def assert_same(one: Any, other: Any) -> None:
    """Compare nested dicts and tensors bit for bit, dtypes included."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def trained(request: pytest.FixtureRequest) -> tuple[nn.Module, SinkGD, dict[str, Tensor]]:
    """Return a model and its optimizer after 3 steps, and the weights that 3 more would lead to."""
    dtype, bits = request.param
    model = network(dtype)
    optimizer = SinkGD.from_model(model, state_bits=bits, **OPTIONS)
    run(model, optimizer, range(3))
    twin = network(dtype)
    twins = SinkGD.from_model(twin, state_bits=bits, **OPTIONS)
    run(twin, twins, range(6))
    return model, optimizer, twin.state_dict()


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("way", [through_file, copy.deepcopy, dict], ids=["file", "deepcopy", "as it is"])
def test_resumed_training_is_the_same_bit_for_bit(
    trained: tuple[nn.Module, SinkGD, dict[str, Tensor]], way: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    model, optimizer, uninterrupted = trained
    fresh = copy.deepcopy(model)
    resumed = SinkGD.from_model(fresh, lr=1.0, compile=False)  # options come from the state
    resumed.load_state_dict(way(optimizer.state_dict()))
    assert_same(resumed.state_dict()["state"], optimizer.state_dict()["state"])
    for own, group in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        assert {key: own[key] for key in group if key != "params"} == {
            key: group[key] for key in group if key != "params"
        }
    run(fresh, resumed, range(3, 6))
    assert_same(fresh.state_dict(), uninterrupted)
    run(model, optimizer, range(3, 6))  # which shares nothing with the other
    assert_same(model.state_dict(), uninterrupted)


def test_state_survives_in_its_own_dtype(trained: tuple[nn.Module, SinkGD, dict[str, Tensor]]) -> None:
    model, optimizer, _ = trained
    wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    embedding = optimizer.state[model[0].weight]
    if "exp_avg_scale" in embedding:
        assert embedding["exp_avg"].dtype == embedding["exp_avg_sq"].dtype == torch.uint8
    else:
        assert embedding["exp_avg"].dtype == embedding["exp_avg_sq"].dtype == wide
    assert optimizer.state[model[1].weight]["col_scale"].dtype == wide


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_copies_of_model_and_optimizer_go_the_same_way(
    trained: tuple[nn.Module, SinkGD, dict[str, Tensor]], way: Callable[[Any], Any]
) -> None:
    model, optimizer, uninterrupted = trained
    optimizer.nonfinite, optimizer.skipped = "skip", {"0.weight": 2}
    twin, twins = way((model, optimizer))
    assert (twins.nonfinite, twins.skipped, twins.compile) == ("skip", {"0.weight": 2}, False)
    twins.skipped["1.weight"] = 1
    assert optimizer.skipped == {"0.weight": 2}
    run(twin, twins, range(3, 6))
    assert_same(twin.state_dict(), uninterrupted)


def test_hooks_of_loading_see_and_change_the_state(trained: tuple[nn.Module, SinkGD, dict[str, Tensor]]) -> None:
    model, optimizer, _ = trained
    seen = []

    def double(_: object, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        for state in changed["state"].values():
            state["step"] *= 2
        return changed

    fresh = SinkGD.from_model(copy.deepcopy(model), **OPTIONS)
    fresh.register_load_state_dict_pre_hook(double)
    fresh.register_load_state_dict_post_hook(
        lambda loaded: seen.append([{key: value.dtype for key, value in s.items()} for s in loaded.state.values()])
    )
    fresh.load_state_dict(optimizer.state_dict())
    assert {float(state["step"]) for state in fresh.state.values()} == {6.0}
    assert seen == [[{key: value.dtype for key, value in s.items()} for s in optimizer.state.values()]]
    fresh.load_state_dict(optimizer.state_dict())
    assert len(seen) == 2


def test_state_of_another_model_is_refused(trained: tuple[nn.Module, SinkGD, dict[str, Tensor]]) -> None:
    _, optimizer, _ = trained
    other = SinkGD.from_model(nn.Linear(3, 3), **OPTIONS)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict(optimizer.state_dict())


def test_a_new_process_loads_weights_only(trained: tuple[nn.Module, SinkGD, dict[str, Tensor]], tmp_path: Path) -> None:
    _, optimizer, _ = trained
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    code = "import sys, torch; print(len(torch.load(sys.argv[1], weights_only=True)['state']))"
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "state.pt")], check=True, capture_output=True, text=True
    )
    assert int(output.stdout) == len(optimizer.state)


def test_options_unknown_to_an_old_state_get_their_defaults() -> None:
    model = network(torch.float32)
    optimizer = SinkGD.from_model(model, **OPTIONS)
    run(model, optimizer, range(1))
    old = optimizer.state_dict()
    for group in old["param_groups"]:
        del group["negligible_rows"]
    optimizer.load_state_dict(old)
    run(model, optimizer, range(1, 2))
    assert {group["negligible_rows"] for group in optimizer.param_groups} == {0.0}
