"""The factored form against the row and column loop on a matrix."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pumice.optim import sinkhorn
from pumice.optim.sinkhorn import (
    balance,
    blocked_col_pass,
    blocked_col_product,
    col_pass,
    power_iteration,
    scale_vectors,
)
from tests.numerics.oracle import balanced, normal, relative_error

SHAPES = [(1, 7), (7, 1), (1, 1), (16, 16), (5, 40), (40, 5), (3, 6, 9), (2, 2, 8, 4)]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float64: 1e-14}


def changed(change: Callable[[Tensor], object]) -> Tensor:
    gradient = normal(9, 6)
    change(gradient)
    return gradient


AWKWARD = {
    "zero row": changed(lambda g: g[3].zero_()),
    "zero column": changed(lambda g: g[:, 2].zero_()),
    "zero rows and columns": changed(lambda g: (g[[0, 8]].zero_(), g[:, [1, 5]].zero_())),
    "zero": torch.zeros(9, 6),
    "one entry": changed(lambda g: (g.zero_(), g[4, 3].fill_(-2.5))),
    "tiny": normal(9, 6) * 1e-30,
    "huge": normal(9, 6) * 1e30,
    "tiny row": changed(lambda g: g[3].mul_(1e-20)),
    "tiny column": changed(lambda g: g[:, 2].mul_(1e-20)),
    "huge row": changed(lambda g: g[3].mul_(1e20)),
    "huge column": changed(lambda g: g[:, 2].mul_(1e20)),
    "tiny row, column, huge row": changed(lambda g: (g[3].mul_(1e-18), g[:, 2].mul_(1e-18), g[7].mul_(1e18))),
    "subnormal": changed(lambda g: g.sign_().mul_(1e-42)),
    "largest": changed(lambda g: g.sign_().mul_(3e38)),
    "one-sided block": changed(lambda g: g[3:, 2:].zero_()),  # no total support: r and c drift apart
}


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_loop(shape: tuple[int, ...], dtype: torch.dtype, iterations: int) -> None:
    gradient = normal(*shape).to(dtype)
    exact, factors = balanced(gradient, iterations)
    assert relative_error(balance(gradient, iterations), exact) < TOLERANCE[dtype]
    r, c = scale_vectors(gradient, iterations)
    assert r.dtype == c.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_error(r.unsqueeze(-1) * gradient * c.unsqueeze(-2), exact) < TOLERANCE[dtype]
    torch.testing.assert_close(c.double(), factors, rtol=TOLERANCE[dtype], atol=0)


@pytest.mark.parametrize("iterations", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_gradient_then_an_ordinary_one_from_its_scales(kind: str, dtype: torch.dtype, iterations: int) -> None:
    first, second = AWKWARD[kind].to(dtype), normal(9, 6, seed=1).to(dtype)
    exact, factors = balanced(first, iterations)
    assert relative_error(balance(first, iterations), exact) < TOLERANCE[dtype]
    _, c = scale_vectors(first, iterations)
    assert bool((c > 0).all())
    assert bool(c.isfinite().all())
    exact, _ = balanced(second, iterations, factors.clamp(2.0**-40, 2.0**40))  # the range of a start
    assert relative_error(balance(second, iterations, c), exact) < 2 * TOLERANCE[dtype]


def test_matrices_of_a_batch_do_not_mix() -> None:
    kinds = [gradient for gradient in AWKWARD.values() if gradient.shape == (9, 6)]
    together = balance(torch.stack(kinds), 2)
    assert torch.equal(together, torch.stack([balance(gradient, 2) for gradient in kinds]))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_many_chunks(transpose: bool, dtype: torch.dtype, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = (normal(3, 37, 11) * scale).to(dtype)
    gradient = gradient.mT if transpose else gradient
    monkeypatch.setattr(sinkhorn, "CHUNK_BYTES", 200)
    exact, _ = balanced(gradient, 2)
    assert relative_error(balance(gradient, 2), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("unit", [None, torch.tensor([1.0, 4, 0.5, 2, 1, 8])])
@pytest.mark.parametrize("rows", [3, 16, 40])
def test_blocks_of_rows(rows: int, unit: Tensor | None) -> None:
    gradient, r = normal(2, rows, 6).bfloat16(), normal(2, rows, seed=1).exp()
    gradient[1, :, 4] = 0
    gradient[0, 1:, 2], gradient[0, 0, 2] = 0, 1e-38  # its square underflows, but the column is not one of zeros
    expected = (gradient.double() * r.double().unsqueeze(-1) * (1 if unit is None else unit)).square().sum(-2)
    for sums in (blocked_col_pass(gradient, r, unit), col_pass(gradient, r, unit)):
        torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-37)
        assert torch.equal(sums > 0, gradient.any(-2))
    torch.testing.assert_close(blocked_col_product(gradient, r), (gradient.float().mT @ r.unsqueeze(-1)).squeeze(-1))


@settings(max_examples=60, deadline=None)
@example(1, 5, 0, 1, 62, torch.float32)  # the sum of squares fits in float32, its inverse does not
@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(0, 9), st.integers(1, 3),
    st.integers(-100, 100), st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_invariances(rows: int, cols: int, seed: int, iterations: int, exponent: int, dtype: torch.dtype) -> None:
    gradient = normal(rows, cols, seed=seed).to(dtype)
    gradient[normal(rows, cols, seed=seed + 100) > 1] = 0
    x = balance(gradient, iterations)
    assert torch.equal(balance(gradient * 2.0**exponent, iterations), x)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(balance(gradient.float() * 3.7, iterations), x, **close)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(balance(gradient[order], iterations), x[order], **close)
    order = torch.randperm(cols, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(balance(gradient[:, order], iterations), x[:, order], **close)
    alive = gradient.any(0)
    torch.testing.assert_close(x.norm(dim=0), alive * rows**0.5, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.square().mean(), alive.float().mean(), rtol=1e-5, atol=0)


def test_iterations_bring_rows_nearer_to_their_norm() -> None:
    gradient = normal(40, 30) * torch.logspace(-3, 3, 40).unsqueeze(-1) * torch.logspace(2, -2, 30)
    errors = [float((balance(gradient, i).norm(dim=1) / 30**0.5 - 1).abs().max()) for i in (1, 2, 5, 20)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-4


def test_warm_scales_do_not_drift_into_their_bound() -> None:
    """c and 1/r would grow together, by 2^40 in a few hundred updates, and the bound would make all c equal."""
    c, start = None, None
    for step in range(400):
        gradient = normal(6, 5, seed=step) * normal(6, 1, seed=step + 1000).exp() * normal(5, seed=step + 2000).exp()
        exact, start = balanced(gradient, 1, start)
        assert relative_error(balance(gradient, 1, c), exact) < 1e-5
        _, c = scale_vectors(gradient, 1, c)
        assert abs(float(c.log2().mean())) < 12


def test_rows_left_out_cause_no_second_pass() -> None:
    """Rows that are left out are the very ones whose squares underflow."""
    gradient = normal(6, 5)
    gradient[2] *= 1e-25
    keep = torch.arange(6) != 2
    _, _, flag = sinkhorn.iterate(gradient, torch.ones(5), torch.tensor([5.0]), 5, 1, keep=keep)
    assert not flag
    _, _, flag = sinkhorn.iterate(gradient, torch.ones(5), 6, 5, 1)
    assert flag


def test_scales_stay_bounded_without_support() -> None:
    gradient = torch.tensor([[1.0, 1, 1], [1, 0, 0], [1, 0, 0]])  # no nonzero permutation: scales run away
    c = None
    for _ in range(1000):
        r, c = scale_vectors(gradient, 1, c)
        assert bool((r.isfinite() & c.isfinite() & (r > 0) & (c > 0)).all())
    torch.testing.assert_close((r[:, None] * gradient * c).norm(dim=0), torch.full((3,), 3**0.5))


def test_power_iteration_finds_the_operator_norm() -> None:
    gradient = normal(2, 12, 7)
    r, c = scale_vectors(gradient)
    x = r.unsqueeze(-1) * gradient * c.unsqueeze(-2)
    sigma, v = power_iteration(gradient, r, c, normal(2, 7, seed=1), 300)
    _, s, vh = torch.linalg.svd(x)
    torch.testing.assert_close(sigma, s[:, 0], rtol=1e-4, atol=0)
    torch.testing.assert_close((v * vh[:, 0]).sum(-1).abs(), torch.ones(2), rtol=1e-3, atol=0)
    half, _ = power_iteration(gradient.bfloat16(), r, c, normal(2, 7, seed=1), 300)
    torch.testing.assert_close(half, s[:, 0], rtol=1e-2, atol=0)


def test_power_iteration_of_zero_keeps_its_vector() -> None:
    start = normal(7)
    sigma, v = power_iteration(torch.zeros(12, 7), torch.ones(12), torch.ones(7), start, 3)
    assert float(sigma) == 0
    assert torch.equal(v, start)


@pytest.mark.parametrize(
    ("gradient", "iterations", "message"),
    [
        (torch.ones(4), 1, r"at least two axes, got shape \(4,\)"),
        (torch.ones(4, 4), 0, "iterations must be at least 1, got 0"),
        (torch.full((4, 4), float("nan")), 1, "must be finite"),
        (torch.tensor([[1.0, float("inf")], [1, 1]]), 1, "must be finite"),
    ],
)
def test_refusals(gradient: Tensor, iterations: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_vectors(gradient, iterations)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 3)])
def test_empty(shape: tuple[int, ...]) -> None:
    assert balance(torch.empty(shape)).shape == shape
