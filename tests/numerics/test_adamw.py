"""The AdamW part against torch.optim.AdamW and against the decay that its equations promise."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pumice.optim import SinkGD
from pumice.optim.quantised import blocks, decode_unsigned
from tests.numerics.oracle import Adam, normal

SHAPES = [(), (7,), (64, 96), (3, 5, 4)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(normal(*shape, seed=i).to(dtype)) for i, shape in enumerate(SHAPES)]


def adamw(params: list[nn.Parameter], **options: object) -> SinkGD:
    defaults = {"state_bits": 32, "compile": False, "stochastic_rounding": False}
    return SinkGD([{"params": params, "rule": "adamw"}], **{**defaults, **options})


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_equals_torch(dtype: torch.dtype, maximize: bool, scale: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    options = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-8}
    optimizer = adamw(ours, weight_decay=0.1, maximize=maximize, **options)
    groups = [{"params": theirs[:2], "weight_decay": 0.0}, {"params": theirs[2:], "weight_decay": 0.1}]
    reference = torch.optim.AdamW(groups, maximize=maximize, foreach=False, **options)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for step in range(30):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            a.grad = scale * normal(*a.shape, seed=100 * step + i).to(dtype)
            b.grad = a.grad.clone()
        optimizer.step()
        reference.step()
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m: f"step {step}: {m}")  # noqa: B023
            assert optimizer.state[a]["exp_avg"].dtype == dtype


def test_eight_bits_stay_near_the_exact_update() -> None:
    parameter = nn.Parameter(normal(32, 256))
    start = parameter.detach().double()
    exact = Adam(start, (0.9, 0.99), 1e-8)
    optimizer = adamw([parameter], lr=1e-2, betas=(0.9, 0.99), state_bits=8)
    size = normal(32, 1, seed=1).exp()
    for step in range(100):
        parameter.grad = size * (0.3 + normal(32, 256, seed=step))
        optimizer.step()
        exact.step(parameter.grad, 1e-2, 0.0)
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.uint8
    moved, error = exact.weight - start, parameter.detach() - exact.weight
    assert float(error.norm() / moved.norm()) < 0.02


def second_moments(optimizer: SinkGD, parameter: nn.Parameter) -> Tensor:
    """Return v in float64, decoded if it is stored in 8 bits."""
    state = optimizer.state[parameter]
    if "exp_avg_sq_scale" in state:
        return decode_unsigned(*blocks(state["exp_avg_sq"], state["exp_avg_sq_scale"])).view_as(parameter).double()
    return state["exp_avg_sq"].double()


@pytest.mark.parametrize(("shape", "bits"), [((16, 256), 32), ((16, 256), 8), ((24,), 8), ((4, 8), 8)])
def test_second_moments_decay_in_a_bfloat16_model(shape: tuple[int, ...], bits: int) -> None:
    parameter = nn.Parameter(normal(*shape).bfloat16())
    optimizer = adamw([parameter], lr=1e-4, state_bits=bits)
    parameter.grad = normal(*shape, seed=1).bfloat16()
    optimizer.step()
    start = second_moments(optimizer, parameter)
    parameter.grad = torch.zeros_like(parameter)
    for _ in range(2000):
        optimizer.step()
    exact, v = start * 0.999**2000, second_moments(optimizer, parameter)
    assert float(exact.max()) > 0
    quantised = bits == 8 and start.numel() >= 4096
    if quantised:  # a code is at most 4/255 of the value's fourth root away from the next
        step = (exact / exact.amax(-1, keepdim=True)) ** 0.75 * exact.amax(-1, keepdim=True) * 4 / 255
        assert bool(((v - exact).abs() <= step + exact * 1e-4).all())
    else:
        torch.testing.assert_close(v, exact, rtol=2e-5, atol=0)
    assert bool(parameter.isfinite().all())


def test_a_positive_second_moment_is_never_stored_as_zero() -> None:
    parameter = nn.Parameter(torch.zeros(16, 256))
    optimizer = adamw([parameter], lr=1e-2, state_bits=8)
    gradient = torch.full((16, 256), 1e-6)
    gradient[:, ::64] = 1.0
    for _ in range(3):
        parameter.grad = gradient
        optimizer.step()
    assert float(second_moments(optimizer, parameter).min()) > 0
    assert float(parameter.detach().abs().max()) < 3.1e-2  # a step of AdamW is at most lr, or m/ε were v zero


def test_moments_are_float32_in_a_bfloat16_model() -> None:
    params = parameters(torch.bfloat16)
    optimizer = adamw(params)
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {optimizer.state[p][key].dtype for p in params for key in ("exp_avg", "exp_avg_sq")} == {torch.float32}


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize(
    "gradient",
    [torch.zeros_like, lambda p: torch.full_like(p, 3e38), lambda p: torch.full_like(p, 1e-40)],
    ids=["zero", "huge", "subnormal"],
)
def test_extreme_gradients_leave_weights_finite(gradient: Callable[[Tensor], Tensor], bits: int) -> None:
    parameter = nn.Parameter(normal(16, 256))
    optimizer = adamw([parameter], lr=1e-2, state_bits=bits)
    before = parameter.detach().clone()
    for make in (gradient, gradient, torch.ones_like):
        parameter.grad = make(parameter)
        optimizer.step()
        assert float((parameter.detach() - before).abs().max()) < 0.1


def test_vectors_do_not_decay_and_matrices_do() -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((), (8,), (1, 8), (2, 1, 4))]
    for parameter in params:
        parameter.grad = torch.zeros_like(parameter)
    adamw(params, lr=0.1, weight_decay=0.5).step()
    assert [float(p.detach().mean()) for p in params] == pytest.approx([1, 1, 0.95, 0.95])
