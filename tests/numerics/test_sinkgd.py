"""Whole runs of SinkGD against the same runs in float64, and the properties that its update promises."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from pumice.optim import SinkGD
from tests.numerics.oracle import Adam, Matrix, balanced, normal

STEPS, LR, LR_SCALE, DECAY = 100, 0.02, 0.5, 0.1
ITERATIONS = {"cold, L=5": (5, False), "warm, L=1": (1, True)}


def schedule(step: int) -> float:
    return min(1.0, (step + 1) / 10) * (1 - step / STEPS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a batch of step ``step`` in a regression that a network of this size can learn."""
    dtype = next(model.parameters()).dtype
    x = normal(32, 10, seed=step)
    y = torch.sin(x @ normal(10, 4, seed=12345))
    return mse_loss(model(x.to(dtype)).to(torch.float64), y.double())


def oracle_run(model: nn.Module, iterations: int, warm: bool) -> list[Tensor]:
    parameters = list(model.parameters())
    rules = [
        Matrix(p.detach(), iterations, warm) if p.ndim == 2 else Adam(p.detach(), (0.9, 0.999), 1e-8)
        for p in parameters
    ]
    for step in range(STEPS):
        lr = LR * schedule(step)
        for parameter, gradient, rule in zip(
            parameters, torch.autograd.grad(loss_of(model, step), parameters), rules, strict=True
        ):
            if isinstance(rule, Matrix):
                rule.step(gradient, lr, LR_SCALE, DECAY)
            else:
                rule.step(gradient, lr, 0.0)
            parameter.data = rule.weight
    return [parameter.detach() for parameter in parameters]


def our_run(model: nn.Module, iterations: int, warm: bool, **options: object) -> list[Tensor]:
    optimizer = SinkGD.from_model(
        model, LR, lr_scale=LR_SCALE, weight_decay=DECAY, sinkhorn_iters=iterations, warm_start=warm,
        overrides={".*weight": "sinkgd"}, compile=False, **options,
    )  # fmt: skip
    scheduler = LambdaLR(optimizer, schedule)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()]


def distances(ours: list[Tensor], exact: list[Tensor]) -> Iterator[float]:
    """Yield by how much each parameter is off, relative to how far it has moved."""
    for a, b, start in zip(ours, exact, network().parameters(), strict=True):
        yield float((a.double() - b).norm() / (b - start.detach().double()).norm())


@pytest.fixture(scope="module", params=ITERATIONS.values(), ids=ITERATIONS)
def run(request: pytest.FixtureRequest) -> tuple[int, bool, list[Tensor]]:
    return *request.param, oracle_run(network().double(), *request.param)


def test_float32_run(run: tuple[int, bool, list[Tensor]]) -> None:
    iterations, warm, exact = run
    assert max(distances(our_run(network(), iterations, warm, state_bits=32), exact)) < 1e-5


@pytest.mark.parametrize("stochastic", [False, True])
def test_bfloat16_run(run: tuple[int, bool, list[Tensor]], stochastic: bool) -> None:
    """Weights of 8 bits feel their own rounding in every gradient; they follow the path, not its digits."""
    iterations, warm, exact = run
    assert max(distances(our_run(network().bfloat16(), iterations, warm, stochastic_rounding=stochastic), exact)) < 0.12


def stream(parameter: nn.Parameter, optimizer: SinkGD, gradients: list[Tensor]) -> Tensor:
    """Return the parameter after updates by given gradients."""
    for gradient in gradients:
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return parameter.detach()


def sinkgd(parameter: nn.Parameter, **options: object) -> SinkGD:
    return SinkGD([{"params": [parameter], "rule": "sinkgd"}], **{"compile": False, **options})


@pytest.mark.parametrize("rule", ["sinkgd", "adamw"])
def test_stochastic_rounding_is_exact_in_expectation(rule: str) -> None:
    """If gradients do not depend on the weights, the mean of many runs is the float64 run, to its standard error."""
    start, gradients = normal(20, 30).bfloat16(), [normal(20, 30, seed=i).bfloat16() for i in range(1, STEPS + 1)]
    exact: Matrix | Adam = Matrix(start.double(), 1, True)
    if rule == "adamw":
        exact = Adam(start.double(), (0.9, 0.999), 1e-8)
    for gradient in gradients:
        exact.step(gradient.double(), *((1e-3, 1.0, 0.1) if rule == "sinkgd" else (1e-3, 0.1)))
    parameter = nn.Parameter(start.repeat(64, 1, 1))  # a batch of equal matrices, which are rounded independently
    group = {"params": [parameter], "rule": rule}
    optimizer = SinkGD([group], 1e-3, lr_scale=1.0, weight_decay=0.1, state_bits=32, compile=False)
    errors = stream(parameter, optimizer, [gradient.expand(64, -1, -1) for gradient in gradients]) - exact.weight
    z = errors.mean(0) / (errors.std(0) / 8)
    assert float(z.abs().max()) < 5
    assert float(z.square().mean()) == pytest.approx(1, abs=0.25)
    assert float(errors.std()) < 2.0**-8 * STEPS**0.5  # one error has a standard deviation of 2^-8 below |w| = 4


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("iterations", [1, 5])
def test_awkward_gradients_in_a_row(iterations: int, warm: bool) -> None:
    """Zero, zero rows, zero columns, extreme sizes: each is followed by an ordinary one, and all equal the loop."""
    gradients = [normal(9, 6, seed=i) for i in range(12)]
    gradients[0].zero_()
    gradients[2][3].zero_()
    gradients[4][:, 2].zero_()
    gradients[6].zero_()
    gradients[8] *= 1e-30
    gradients[10] *= 1e30
    parameter = nn.Parameter(normal(9, 6, seed=99))
    exact = Matrix(parameter.detach().double(), iterations, warm)
    optimizer = sinkgd(parameter, lr=0.1, lr_scale=1.0, sinkhorn_iters=iterations, warm_start=warm)
    for gradient in gradients:
        before = parameter.detach().clone()
        stream(parameter, optimizer, [gradient])
        exact.step(gradient, 0.1, 1.0, 0.0)
        torch.testing.assert_close(parameter.detach().double(), exact.weight, rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter.detach(), before) == (not gradient.any())


def test_scale_of_the_gradient_does_not_matter() -> None:
    gradients = [normal(3, 9, 6, seed=i) for i in range(5)]
    results = []
    for factor in (1.0, 2.0**-70, 2.0**60, 3.7):
        parameter = nn.Parameter(normal(3, 9, 6, seed=99))
        results.append(stream(parameter, sinkgd(parameter, lr=0.1, lr_scale=1.0), [g * factor for g in gradients]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    torch.testing.assert_close(results[0], results[3], rtol=1e-5, atol=1e-6)


def update(gradients: list[Tensor], **options: object) -> Tensor:
    """Return what the last gradient adds to a weight, for lr and lr_scale 1."""
    parameter = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = sinkgd(parameter, lr=1.0, lr_scale=1.0, **options)
    before = stream(parameter, optimizer, gradients[:-1]).clone()
    return before - stream(parameter, optimizer, gradients[-1:])


def heavy(seed: int, rows: int = 24, cols: int = 40) -> Tensor:
    """Return a gradient with a few strong directions that persist, and noise, as gradients of networks have."""
    return normal(rows, 3, seed=7) @ normal(3, cols, seed=8) + 0.5 * normal(rows, cols, seed=seed)


@pytest.mark.parametrize(("kind", "most"), [("strong", 1.03), ("noise", 1.6)])
@pytest.mark.parametrize(("target", "norm"), [("sqrt", (24 / 40) ** 0.5), (1.0, 1.0), (7, 7.0)])
def test_spectral_target(target: float | str, norm: float, kind: str, most: float) -> None:
    """σ is estimated from below: well if the leading direction persists, and too small for noise, which has none."""
    for steps in (1, 2, 8, 20):
        gradients = [heavy(seed) if kind == "strong" else normal(24, 40, seed=seed) for seed in range(steps)]
        size = torch.linalg.matrix_norm(update(gradients, spectral_target=target), 2)
        assert 0.999 * norm < float(size) < most * norm


def test_spectral_target_after_zero_gradients_and_a_turn() -> None:
    """A zero gradient must not spoil the vector, nor one whose rows are orthogonal to all before."""
    zero, left, right = torch.zeros(24, 40), heavy(0), heavy(0)
    left[:, 20:], right[:, :20] = 0, 0
    for gradients, most in (
        ([zero, heavy(1)], 1.01),
        ([zero, zero, heavy(1)], 1.4),  # one iteration from a random vector
        ([heavy(1), zero, heavy(2)], 1.03),
        ([left, left, right], 1.4),
    ):
        assert 0.999 < float(torch.linalg.matrix_norm(update(gradients, spectral_target=1.0), 2)) < most
    assert not update([heavy(0), zero], spectral_target=1.0).any()


def test_spectral_target_on_low_rank_adapters() -> None:
    """While B is zero A has no gradient; weights must not jump when it gets one."""
    torch.manual_seed(0)
    a, b, x = nn.Parameter(torch.randn(4, 32) / 32**0.5), nn.Parameter(torch.zeros(16, 4)), torch.randn(64, 32)
    y = x @ torch.randn(32, 16)
    optimizer = SinkGD([{"params": [a, b], "rule": "sinkgd"}], 1e-2, lr_scale=1.0, spectral_target=1.0, compile=False)
    losses, start = [], a.detach().norm()
    for _ in range(30):
        before = [a.detach().clone(), b.detach().clone()]
        optimizer.zero_grad()
        loss = mse_loss(x @ a.T @ b.T, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for parameter, old in zip((a, b), before, strict=True):
            assert float(torch.linalg.matrix_norm(parameter.detach() - old, 2)) < 1.1e-2
    assert losses[-1] < losses[0]
    assert float(a.detach().norm()) < 1.5 * float(start)


@pytest.mark.parametrize(
    "options", [{}, {"spectral_target": "sqrt"}, {"base_width": 20}, {"negligible_rows": 0.5}], ids=str
)
@pytest.mark.parametrize("shape", [(12, 7), (3, 12, 7)], ids=str)
def test_transposed_storage(shape: tuple[int, ...], options: dict[str, object]) -> None:
    """A matrix stored [in, out] moves as its transpose does."""
    results = []
    for transposed in (False, True):
        weight = normal(*shape, seed=9)
        parameter = nn.Parameter(weight.mT.contiguous() if transposed else weight)
        group = {"params": [parameter], "rule": "sinkgd", "transposed": transposed}
        optimizer = SinkGD([group], 0.1, lr_scale=1.0, weight_decay=0.1, compile=False, **copy.deepcopy(options))
        gradients = [heavy(i, *shape[-2:]) + normal(*shape, seed=i) for i in range(3)]
        result = stream(parameter, optimizer, [g.mT if transposed else g for g in gradients])
        results.append(result.mT if transposed else result)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_negligible_rows_stay_where_they_are(scale: float) -> None:
    gradient = normal(8, 6)
    gradient[[1, 5]] *= 1e-3
    gradient[3] = 0
    left = [0, 2, 4, 6, 7]
    moved = update([scale * gradient], negligible_rows=0.1)
    exact, _ = balanced(gradient[left], 1)
    torch.testing.assert_close(moved[left].double(), exact, rtol=1e-5, atol=1e-6)
    assert not moved[[1, 3, 5]].any()
    size = torch.linalg.matrix_norm(update([scale * gradient], negligible_rows=0.1, spectral_target=2.0), 2)
    assert float(size) == pytest.approx(2, abs=0.05)


def test_spectral_target_when_few_rows_are_left() -> None:
    """The floor of σ is the norm of a column of the rows that are left, not of the whole."""
    gradient = normal(8, 6)
    gradient[1:] *= 1e-3
    size = torch.linalg.matrix_norm(update([gradient], negligible_rows=0.1, spectral_target=2.0), 2)
    assert float(size) == pytest.approx(2, abs=0.05)
