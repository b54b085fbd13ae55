"""What an update allocates: little if compiled, chunks if not, stacks of small equal matrices (torch's profiler)."""

from typing import Any

import pytest
import torch
from torch import nn

from pumice.optim import SinkGD
from tests.numerics.oracle import normal

DTYPES = [torch.float32, torch.bfloat16]
GROUPS: dict[str, dict[str, Any]] = {
    "sinkgd": {"rule": "sinkgd"},
    "options": {"rule": "sinkgd", "spectral_target": "sqrt", "negligible_rows": 0.1},
    "adamw": {"rule": "adamw", "state_bits": 32},
    "adamw in 8 bits": {"rule": "adamw", "state_bits": 8},
}


def allocations(optimizer: SinkGD) -> list[int]:
    """Return the bytes of each allocation in one step, negative when they are freed, in order of time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def large(group: str, dtype: torch.dtype, compile: bool, scale: float = 1.0) -> SinkGD:
    """Return an optimizer of a parameter of 12 MiB in float32, whose state and kernels exist."""
    parameter = nn.Parameter(torch.zeros(3072, 1024, dtype=dtype))
    parameter.grad = normal(3072, 1024).to(dtype) * scale
    optimizer = SinkGD([{"params": [parameter], **GROUPS[group]}], 0.01, compile=compile)
    for _ in range(3):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_balancing_allocates_an_eighth_of_the_matrix(dtype: torch.dtype) -> None:
    """Two sums of each block of 16 rows, in float32; everything else is vectors."""
    sizes = sorted(allocations(large("sinkgd", dtype, compile=True)))
    assert sizes[-2:] == [3072 // 16 * 1024 * 4] * 2
    assert sizes[-3] <= 8 * 3072  # a vector in 64 bits


def test_compiled_adamw_allocates_vectors_only() -> None:
    sizes = allocations(large("adamw", torch.float32, compile=True))
    assert sizes
    assert max(sizes) <= 8 * 3072


def assert_chunks(optimizer: SinkGD) -> None:
    sizes = allocations(optimizer)
    assert max(sizes) <= 4 << 20
    assert int(torch.tensor(sizes).cumsum(0).max()) <= 16 << 20


@pytest.mark.parametrize("scale", [1.0, 1e-30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_uncompiled_updates_use_chunks(group: str, dtype: torch.dtype, scale: float) -> None:
    assert_chunks(large(group, dtype, False, scale))


@pytest.mark.parametrize(
    ("group", "dtype"),
    [("options", torch.float32), ("adamw", torch.bfloat16), ("adamw in 8 bits", torch.bfloat16)],
    ids=str,
)
def test_compiled_updates_that_need_scratch_use_chunks(group: str, dtype: torch.dtype) -> None:
    assert_chunks(large(group, dtype, True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_looking_for_the_unfit_uses_chunks(dtype: torch.dtype) -> None:
    for group in ("sinkgd", "adamw"):
        optimizer = large(group, dtype, compile=False)
        optimizer.nonfinite = "skip"
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad[3000, 1000] = float("nan")
        with pytest.warns(UserWarning, match="is not finite"):
            sizes = allocations(optimizer)
        assert max(sizes) <= 4 << 20


def test_small_matrices_are_stacked_and_large_ones_are_not() -> None:
    small, large_ones = [[nn.Parameter(torch.zeros(rows, 512)) for _ in range(4)] for rows in (64, 512)]
    optimizer = SinkGD([{"params": small + large_ones, "rule": "sinkgd"}], compile=False)
    for parameter in small + large_ones:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sizes = allocations(optimizer)
    assert sizes.count(4 * 64 * 512 * 4) >= 2  # a stack of weights and one of gradients
    assert 4 * 512 * 512 * 4 not in sizes
