"""Stochastic rounding: unbiased, to neighbours only, with bits that depend on seed, step, parameter and index."""

import itertools

import pytest
import torch
from torch import Tensor

from pumice.optim import SinkGD
from pumice.optim.rounding import stochastic_round, stream_key, uniforms

DRAWS = 4096
ROWS, COLS = torch.arange(24), torch.arange(20)


def keys(count: int, seed: int = 0) -> Tensor:
    return torch.tensor([stream_key(seed, step, 0) for step in range(1, count + 1)]).unsqueeze(-1)


def draws(count: int = DRAWS) -> Tensor:
    """Return (count, m, n) random numbers of as many updates."""
    rows, cols = uniforms(ROWS, COLS, keys(count))
    return (rows.unsqueeze(-1) + cols.unsqueeze(-2)) % 1


def neighbours(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest bfloat16 that is no greater than ``values``, and the least that is no less."""
    towards_zero = (values.view(torch.int32) & -65536).view(torch.float32)
    away = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    away = torch.where(towards_zero == values, values, away)
    return torch.minimum(towards_zero, away), torch.maximum(towards_zero, away)


def values(exponents: tuple[int, int] = (-30, 30)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randn(len(ROWS), len(COLS), generator=generator)
    return mantissas * torch.randint(*exponents, mantissas.shape, generator=generator).float().exp2()


def test_random_numbers_are_uniform() -> None:
    # 4096 draws of each of 480 elements in 64 bins; the standard deviation of chi² with 63 degrees is √126
    counts = torch.stack([torch.histc(u, 64, 0, 1) for u in draws().reshape(DRAWS, -1).unbind(1)])
    expected = DRAWS / 64
    chi2 = ((counts - expected).square() / expected).sum(1)
    assert abs(float(chi2.mean()) - 63) < 5 * (126 / len(chi2)) ** 0.5
    assert float(chi2.max()) < 63 + 6 * 126**0.5


def test_random_numbers_of_any_two_elements_are_uncorrelated() -> None:
    u = draws().reshape(DRAWS, -1)
    correlations = torch.corrcoef(torch.cat([u[1:], u[:-1]], 1).T)  # of elements in one update and in successive ones
    correlations.fill_diagonal_(0)
    assert float(correlations.abs().max()) < 6 / DRAWS**0.5


def test_rounding_is_unbiased() -> None:
    x = values()
    low, high = neighbours(x)
    share = (x - low) / (high - low)
    rounded = stochastic_round(x.expand(DRAWS, -1, -1), *uniforms(ROWS, COLS, keys(DRAWS)))
    ups = (rounded == high).double().mean(0)
    z = (ups - share) / (share * (1 - share) / DRAWS).sqrt().clamp(min=1 / DRAWS)
    assert float(z.abs().max()) < 5
    assert abs(float(z.mean())) < 5 / z.numel() ** 0.5
    assert 0.8 < float(z.square().mean()) < 1.2


@pytest.mark.parametrize("exponents", [(-120, -100), (-1, 1), (80, 97)])
def test_rounding_goes_to_neighbours_only(exponents: tuple[int, int]) -> None:
    x = values(exponents)
    x[0] = torch.tensor([2.0 ** exponents[0]]).nextafter(torch.tensor(0.0))  # between two binades
    x[1] = -x[0]
    low, high = neighbours(x)
    rounded = stochastic_round(x.expand(64, -1, -1), *uniforms(ROWS, COLS, keys(64)))
    assert bool(((rounded == low) | (rounded == high)).all())
    assert torch.equal(stochastic_round(low, *uniforms(ROWS, COLS, keys(1)[0])), low)


def test_extreme_values_are_rounded_as_usual() -> None:
    x = torch.tensor(
        [[float("inf"), -float("inf"), float("nan"), 3.4e38, -3.4e38, 1e-40, -1e-40, 0.0, 2.0**112, 3e-39]]
    )
    rounded = stochastic_round(x, *uniforms(torch.arange(1), torch.arange(10), keys(1)[0])).bfloat16()
    assert torch.equal(rounded.view(torch.int16), x.bfloat16().view(torch.int16))


def test_bits_differ_between_seeds_steps_and_parameters() -> None:
    streams = [stream_key(*words) for words in itertools.product((0, 1, 2**40), (1, 2, 10**6), (0, 1, 700))]
    assert len(set(streams)) == 27
    rows, cols = uniforms(ROWS, COLS, torch.tensor(streams).unsqueeze(-1))
    numbers = (rows.unsqueeze(-1) + cols.unsqueeze(-2)).flatten(1) % 1
    same = (numbers.unsqueeze(0) == numbers.unsqueeze(1)).float().mean(-1).fill_diagonal_(0)
    assert float(same.max()) < 0.01


def test_an_index_draws_the_same_wherever_it_lies() -> None:
    key = keys(1)[0]
    rows, cols = uniforms(ROWS, COLS, key)
    some_rows, some_cols = uniforms(ROWS[5:9], COLS[3:], key)
    assert torch.equal(some_rows, rows[5:9])
    assert torch.equal(some_cols, cols[3:])


@pytest.mark.parametrize("rule", ["sinkgd", "adamw"])
def test_off_means_rounding_to_nearest(rule: str) -> None:
    weight, gradient = torch.randn(24, 20).bfloat16(), torch.randn(24, 20).bfloat16()
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        parameter = torch.nn.Parameter(weight.to(dtype))
        parameter.grad = gradient.to(dtype)
        group = {"params": [parameter], "rule": rule}
        SinkGD([group], lr=1e-2, weight_decay=0.1, stochastic_rounding=False, compile=False).step()
        results[dtype] = parameter.detach()
    assert torch.equal(results[torch.bfloat16], results[torch.float32].bfloat16())


def test_the_expected_weight_is_exact() -> None:
    """Without it, an update of 2^-10 of the weight is lost; with it the mean over many parameters follows."""
    weight, step = 1.0, 2.0**-10
    moved = {}
    for stochastic in (False, True):
        parameter = torch.nn.Parameter(torch.full((200, 200), weight, dtype=torch.bfloat16))
        optimizer = SinkGD([{"params": [parameter], "rule": "sinkgd"}], lr=step, lr_scale=1.0,
                           stochastic_rounding=stochastic, compile=False)  # fmt: skip
        for _ in range(40):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[stochastic] = float(weight - parameter.detach().double().mean())
    assert moved[False] == 0
    # a rounding error has a standard deviation of at most 2^-9 below 1; 40 of them, 40,000 elements
    assert moved[True] == pytest.approx(40 * step, abs=5 * 2.0**-9 * (40 / 40_000) ** 0.5)
