"""SinkGD's arguments: what each does, and that each is checked with a sentence that names it."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pumice.optim import SinkGD
from tests.numerics.oracle import balanced, normal

NAN, INF = float("nan"), float("inf")


def sinkgd(parameter: nn.Parameter, **options: Any) -> SinkGD:
    group = {
        "params": [parameter],
        "rule": options.pop("rule", "sinkgd"),
        "transposed": options.pop("transposed", False),
    }
    return SinkGD([group], **{"compile": False, **options})


def moved(shape: tuple[int, ...] = (6, 4), **options: Any) -> Tensor:
    """Return by what one update lowers a weight of zeros."""
    parameter = nn.Parameter(torch.zeros(shape))
    parameter.grad = normal(*shape)
    sinkgd(parameter, **options).step()
    return -parameter.detach()


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"lr": 0.3, "lr_scale": 0.5}, 0.15),
        ({"lr": torch.tensor(0.3), "lr_scale": 0.5}, 0.15),
        ({"lr": 0.3, "lr_scale": "match_rms_adamw"}, 0.06),
        ({"lr": 0.3}, 0.015),
        ({"lr": 1.0, "lr_scale": 1.0, "base_width": 12}, 12 / 4),
        ({"lr": 1.0, "lr_scale": 1.0, "base_width": 12, "transposed": True}, 12 / 6),
        ({"lr": 1.0, "lr_scale": 1.0, "maximize": True}, -1.0),
    ],
    ids=str,
)
def test_rate(options: dict[str, Any], factor: float) -> None:
    gradient = normal(6, 4)
    exact = balanced(gradient.T, 1)[0].T if options.get("transposed") else balanced(gradient, 1)[0]
    torch.testing.assert_close(moved(**options).double(), factor * exact, rtol=1e-6, atol=1e-7)
    assert moved(**options).square().mean().sqrt() == pytest.approx(abs(factor), rel=1e-5)


@pytest.mark.parametrize("iterations", [1, 3])
def test_sinkhorn_iters(iterations: int) -> None:
    exact, _ = balanced(normal(6, 4), iterations)
    update = moved(lr=1.0, lr_scale=1.0, sinkhorn_iters=iterations)
    torch.testing.assert_close(update.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("maximize", [False, True])
def test_weight_decay_uses_the_learning_rate_unscaled(maximize: bool) -> None:
    parameter = nn.Parameter(torch.full((6, 4), 2.0))
    parameter.grad = torch.zeros(6, 4)
    sinkgd(parameter, lr=0.1, lr_scale=0.001, weight_decay=0.5, maximize=maximize).step()
    torch.testing.assert_close(parameter.detach(), torch.full((6, 4), 2.0 * 0.95))


def test_state_is_a_vector_per_matrix_or_nothing() -> None:
    for options, sizes in (
        ({"warm_start": False}, {"step": ()}),
        ({}, {"step": (), "col_scale": (2, 4)}),
        ({"spectral_target": 1}, {"step": (), "col_scale": (2, 4), "right_vector": (2, 4)}),
    ):
        parameter = nn.Parameter(torch.zeros(2, 6, 4, dtype=torch.bfloat16))
        parameter.grad = torch.ones_like(parameter)
        optimizer = sinkgd(parameter, **options)
        optimizer.step()
        state = optimizer.state[parameter]
        assert {key: tuple(value.shape) for key, value in state.items()} == sizes
        assert {value.dtype for value in state.values()} == {torch.float32}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 6), nn.LayerNorm(6))


def test_from_model_routes_and_passes_options_on() -> None:
    optimizer = SinkGD.from_model(model(), 0.1, weight_decay=0.2, adamw_lr=0.03, sinkhorn_iters=2, compile=False)
    rows = {
        name: (group["rule"], group["lr"], group["weight_decay"], group["sinkhorn_iters"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert rows["1.weight"] == ("sinkgd", 0.1, 0.2, 2)
    assert rows["0.weight"] == ("adamw", 0.03, 0.2, 2)
    assert {rows[name][:2] for name in ("1.bias", "2.weight", "2.bias")} == {("adamw", 0.03)}
    assert len(rows) == 5


def test_adamw_lr_moves_the_adamw_part_alone() -> None:
    trained = model()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    SinkGD.from_model(trained, 0.1, lr_scale=1.0, adamw_lr=0.01, compile=False).step()
    sizes = [float((p - q).detach().abs().mean()) for p, q in zip(trained.parameters(), before, strict=True)]
    assert sizes == pytest.approx([0.01, 0.1, 0.01, 0.01, 0.01], rel=1e-4)


def test_bare_parameters_are_balanced_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"all 2 parameters of two or more dimensions.*SinkGD\.from_model"):
        optimizer = SinkGD(model().parameters(), compile=False)
    assert [group["rule"] for group in optimizer.param_groups] == ["auto"]


@pytest.mark.filterwarnings("error")
def test_groups_with_rules_do_not_warn() -> None:
    SinkGD.from_model(model(), 0.1)
    SinkGD([nn.Parameter(torch.zeros(4))])


BAD = {
    "lr": [-1e-3, NAN, INF, "0.1", None, True, torch.ones(2)],
    "lr_scale": [0, -0.1, NAN, INF, "rms", None],
    "sinkhorn_iters": [0, -1, 1.5, True, "5"],
    "warm_start": [1, "yes", None],
    "weight_decay": [-0.1, NAN, None],
    "betas": [(0.9,), 0.9, (1.0, 0.9), (0.9, -0.1), (0.9, NAN), ("a", 0.9)],
    "eps": [0, -1e-8, NAN],
    "state_bits": [4, 16, None, "8"],
    "stochastic_rounding": [1, "on"],
    "spectral_target": [0, -1, NAN, INF, "square", [1]],
    "negligible_rows": [-0.1, 1.0, NAN, None],
    "base_width": [0, -1, NAN, "wide"],
    "nonfinite": ["ignore", None, True],
    "seed": [-1, 1.5, "a", None],
    "maximize": [0, "yes"],
    "rule": ["muon", None],
    "transposed": [1, None],
    "compile": [1, "yes"],
}


@pytest.mark.parametrize(("name", "value"), [(name, x) for name, values in BAD.items() for x in values], ids=str)
def test_an_argument_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"^{name}(\[\d\])? must be .+, got ") as caught:
        sinkgd(nn.Parameter(torch.zeros(4, 4)), **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("adamw_lr", [-1.0, NAN, "x"])
def test_adamw_lr_is_refused_by_name(adamw_lr: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^adamw_lr must be .+, got "):
        SinkGD.from_model(model(), 0.1, adamw_lr=adamw_lr)


@pytest.mark.parametrize(
    ("tensor", "options", "message"),
    [
        (torch.zeros(4), {"rule": "sinkgd"}, "rule 'sinkgd' needs two dimensions, got a parameter of shape (4,)"),
        (torch.zeros(4, 4, dtype=torch.complex64), {}, "trains real parameters only"),
        (torch.zeros(4, 4), {"lr": -1}, "lr must be in [0, inf), got -1.0"),
    ],
    ids=["vector", "complex", "lr"],
)
def test_a_refused_group_leaves_no_trace(tensor: Tensor, options: dict[str, Any], message: str) -> None:
    optimizer = sinkgd(nn.Parameter(torch.zeros(4, 4)))
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        optimizer.add_param_group({"params": [nn.Parameter(tensor)], **options})
    assert len(optimizer.param_groups) == 1
