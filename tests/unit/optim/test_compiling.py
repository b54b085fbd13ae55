"""Compiled updates: equal to the others, and compiled once for all sizes and learning rates."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported
from torch._dynamo.utils import counters
from torch.optim.lr_scheduler import LambdaLR

from pumice.optim import SinkGD, base, compiling
from pumice.optim.compiling import compiled, compiler_works
from pumice.optim.rounding import stochastic_round, stream_key, uniforms
from tests.numerics.oracle import normal

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(24, 24), (16, 40), (16, 40), (1, 24), (3, 16, 24), (32, 128)]  # two make a stack; the last is quantised
MORE = {"sinkgd": (), "adamw": ((24,), ())}


def parameters(dtype: torch.dtype, rule: str) -> list[nn.Parameter]:
    """Return tensors of each kind, the last transposed in memory."""
    plain = [normal(*shape, seed=i) for i, shape in enumerate((*SHAPES, *MORE[rule]))]
    return [nn.Parameter(tensor.to(dtype)) for tensor in (*plain, normal(24, 16).mT)]


def gradients(params: list[nn.Parameter], step: int) -> Iterator[Tensor]:
    for i, parameter in enumerate(params):
        gradient = normal(*parameter.shape, seed=1000 * step + i).to(parameter.dtype)
        if parameter.shape == (24, 24) and step == 2:
            gradient = gradient * 1e-30
        yield gradient if parameter.is_contiguous() else gradient.mT.contiguous().mT


def run(compile: bool, dtype: torch.dtype, rule: str, factor: float = 1.0, **options: Any) -> list[Tensor]:
    params = parameters(dtype, rule)
    optimizer = SinkGD([{"params": params, "rule": rule}], 0.01, weight_decay=0.1, compile=compile, **options)
    for step in range(3):
        for parameter, gradient in zip(params, gradients(params, step), strict=True):
            parameter.grad = gradient * factor
        optimizer.step()
    return [parameter.detach() for parameter in params]


CASES = {
    "sinkgd": ("sinkgd", {"lr_scale": 1.0}),
    "options": ("sinkgd", {"sinkhorn_iters": 2, "warm_start": False, "negligible_rows": 0.5, "spectral_target": 2}),
    "adamw": ("adamw", {"state_bits": 8}),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rule", "options"), CASES.values(), ids=CASES)
def test_equals_the_uncompiled_update(rule: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    for eager, fast in zip(run(False, dtype, rule, **options), run(True, dtype, rule, **options), strict=True):
        if dtype == torch.float32:
            quantised = rule == "adamw" and eager.numel() >= 4096  # a code that tips over moves by 4/255
            tolerance = 2e-4 if quantised else 1e-6
            torch.testing.assert_close(fast, eager, rtol=tolerance, atol=tolerance)
        else:  # the same random bits: only a value that differs in the last bit of float32 can round differently
            torch.testing.assert_close(fast, eager, rtol=2.0**-7, atol=1e-6)
            assert int((fast != eager).sum()) <= 2


def test_scale_of_the_gradient_does_not_matter_to_the_bit() -> None:
    plain = run(True, torch.float32, "sinkgd", lr_scale=1.0)
    for factor in (2.0**-12, 2.0**20):
        scaled = run(True, torch.float32, "sinkgd", factor, lr_scale=1.0)
        assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_random_bits_are_the_same() -> None:
    rows, cols, keys = torch.arange(48), torch.arange(32), torch.tensor([stream_key(0, 5, 3)])
    bits = uniforms(rows, cols, keys)
    fast_bits = compiled(uniforms, rows, cols, keys)(rows, cols, keys)
    assert all(torch.equal(a, b) for a, b in zip(bits, fast_bits, strict=True))
    values = normal(48, 32) * torch.linspace(-60, 60, 32).exp2()
    fast = compiled(stochastic_round, values, *bits)(values, *bits)
    assert torch.equal(fast, stochastic_round(values, *bits))


def test_forty_shapes_and_a_schedule_do_not_recompile() -> None:
    shapes = [(8 + 3 * i, 11 + 5 * ((7 * i) % 40)) for i in range(38)] + [(3, 8, 12), (2, 12, 8)]
    assert len(set(shapes)) == 40
    params = [nn.Parameter(normal(*shape).to(dtype)) for shape in shapes for dtype in DTYPES]
    vectors = [nn.Parameter(torch.ones(i).to(dtype)) for i in range(2, 22) for dtype in DTYPES]
    groups = [{"params": params, "rule": "sinkgd"}, {"params": vectors, "rule": "adamw"}]
    optimizer = SinkGD(groups, 0.01, weight_decay=0.1, compile=True)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    counts = []
    before = counters["stats"]["unique_graphs"]
    for step in range(5):
        for i, parameter in enumerate(params + vectors):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i).to(parameter.dtype)
        optimizer.step()
        scheduler.step()
        for group in optimizer.param_groups:
            group["weight_decay"] *= 0.5
            group["betas"] = (0.8 + step / 100, 0.9)
        counts.append(counters["stats"]["unique_graphs"] - before)
    assert counts[0] <= 32  # balance, descend, uniforms, AdamW; for each dtype, matrices and batches, squares apart
    assert counts[1:] == [counts[0]] * 4
    assert len(compiling._compiled) >= 8


def test_a_kernel_that_cannot_be_compiled_whole_raises() -> None:
    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    x = torch.ones(5)
    with pytest.raises(Unsupported):
        compiled(breaks, x)(x)


def test_a_kernel_that_is_compiled_too_often_raises() -> None:
    def adds(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    kernel = compiled(adds, torch.ones(5, 7), torch.ones(5, 7))
    kernel(torch.ones(5, 7), torch.ones(5, 7))
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        kernel(torch.ones(1, 7), torch.ones(1, 7))


@pytest.fixture
def fresh_answers() -> Iterator[None]:
    compiler_works.cache_clear()
    yield
    compiler_works.cache_clear()


@pytest.mark.usefixtures("fresh_answers")
def test_without_a_compiler_updates_run_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "COMPILE_FROM", 0)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.ones(4, 4)
    SinkGD([{"params": [parameter], "rule": "sinkgd"}]).step()
    assert bool(parameter.detach().any())


@pytest.mark.usefixtures("fresh_answers")
def test_a_compiler_that_fails_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no such header")

    monkeypatch.setattr(torch, "compile", fails)
    message = "torch.compile fails on cpu, so updates run uncompiled: no such header"
    with pytest.warns(UserWarning, match=message) as caught:
        answers = [compiler_works(torch.device("cpu")) for _ in range(2)]
    assert answers == [False, False]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("compile", "size", "expected"), [(None, 4, False), (None, 5, True), (True, 4, True), (False, 5, False)]
)
def test_size_decides_by_default(
    compile: bool | None, size: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "COMPILE_FROM", 25)
    monkeypatch.setattr(base, "compiler_works", lambda device: True)
    used = []
    monkeypatch.setattr(base, "batches", lambda members, compile: used.append(compile) or [])
    parameter = nn.Parameter(torch.zeros(5, size))
    parameter.grad = torch.ones(5, size)
    SinkGD([{"params": [parameter], "rule": "sinkgd"}], compile=compile).step()
    assert used == [expected]
