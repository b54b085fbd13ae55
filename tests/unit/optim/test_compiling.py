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


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[nn.Parameter]:
    """Return random weights; a negative first size stands for a matrix that is transposed in memory."""
    plain = [normal(*(abs(size) for size in shape), seed=i).to(dtype) for i, shape in enumerate(shapes)]
    strided = [shape[:1] < (0,) for shape in shapes]
    return [nn.Parameter(t.mT.contiguous().mT if turn else t) for t, turn in zip(plain, strided, strict=True)]


def gradients(params: list[nn.Parameter], step: int) -> Iterator[Tensor]:
    """Yield gradients laid out as the weights; in step 2 that of the first is so small that squares underflow."""
    for i, parameter in enumerate(params):
        gradient = normal(*parameter.shape, seed=1000 * step + i).to(parameter.dtype)
        gradient = gradient * 1e-30 if step == 2 and i == 0 else gradient
        yield gradient if parameter.is_contiguous() else gradient.mT.contiguous().mT


def run(
    compile: bool, dtype: torch.dtype, group: dict[str, Any], shapes: list[Any], factor: float = 1.0
) -> list[Tensor]:
    params = parameters(shapes, dtype)
    optimizer = SinkGD([{"params": params, **group}], 0.01, weight_decay=0.1, compile=compile)
    for step in range(3):
        for parameter, gradient in zip(params, gradients(params, step), strict=True):
            parameter.grad = gradient * factor
        optimizer.step()
    return [parameter.detach() for parameter in params]


# Each kind of argument takes seconds to compile, so each is met once.
SINKGD = {"rule": "sinkgd", "lr_scale": 1.0}
OPTIONS = {"sinkhorn_iters": 2, "warm_start": False, "negligible_rows": 0.5, "spectral_target": 2}
CASES = {
    "matrices and stacks": (torch.float32, SINKGD, [(24, 24), (16, 40), (16, 40), (3, 16, 24)]),
    "one row, strides, rounding": (torch.bfloat16, SINKGD, [(24, 40), (1, 24), (-16, 24)]),
    "options": (torch.float32, {**SINKGD, **OPTIONS}, [(24, 24)]),
    "blocks of rows": (torch.float32, {**SINKGD, "spectral_target": 1.0}, [(300, 256)]),
    "adamw": (torch.float32, {"rule": "adamw"}, [(24,), (32, 128)]),
    "adamw, rounding": (torch.bfloat16, {"rule": "adamw"}, [(24,), (32, 128)]),
}


@pytest.mark.parametrize(("dtype", "group", "shapes"), CASES.values(), ids=CASES)
def test_equals_the_uncompiled_update(dtype: torch.dtype, group: dict[str, Any], shapes: list[Any]) -> None:
    for eager, fast in zip(run(False, dtype, group, shapes), run(True, dtype, group, shapes), strict=True):
        if dtype == torch.float32:
            quantised = group["rule"] == "adamw" and eager.numel() >= 4096  # a code that tips over moves by 4/255
            tolerance = 2e-4 if quantised else 1e-6
            torch.testing.assert_close(fast, eager, rtol=tolerance, atol=tolerance)
        else:  # the same random bits: only a value that differs in the last bit of float32 can round differently
            torch.testing.assert_close(fast, eager, rtol=2.0**-7, atol=1e-6)
            assert int((fast != eager).sum()) <= 2


def test_scale_of_the_gradient_does_not_matter_to_the_bit() -> None:
    dtype, group, shapes = CASES["matrices and stacks"]
    plain = run(True, dtype, group, shapes)
    for factor in (2.0**-12, 2.0**20):
        scaled = run(True, dtype, group, shapes, factor)
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


def test_each_kind_of_argument_has_a_compiled_form_of_its_own() -> None:
    """What torch.compile would specialise on must not use up the number of times it compiles one function."""

    def kernel(x: Tensor) -> Tensor:
        return x + 1

    plain = torch.ones(3, 4, 5)
    large = torch.ones(2, 256, 128)  # vectorised and in parallel, unlike what is compiled for a small tensor
    others = [plain[:1], plain[:, :1], plain.mT, plain.permute(2, 1, 0), plain.bfloat16(), plain[0]]
    others += [large, large.view(2, 4096, 8)]
    forms = {compiled(kernel, argument) for argument in (plain, *others)}
    assert len(forms) == 1 + len(others)
    assert {compiled(kernel, torch.ones(size, 7, 2)) for size in (2, 9)} == {compiled(kernel, plain)}


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


COMMAND = "C++ compile error\n\nCommand:\ng++ -O3 kernel.cpp\n\n"
FAILURES = {
    "compiler": (COMMAND + "Output:\n\nld: cannot find -lc10\ncollect2: error", "ld: cannot find -lc10"),
    "other": ("no such header\nand many lines\n", "no such header"),
}


@pytest.mark.usefixtures("fresh_answers")
@pytest.mark.parametrize("space", [False, True])
@pytest.mark.parametrize(("text", "line"), FAILURES.values(), ids=FAILURES)
def test_a_compiler_that_fails_is_reported_once_in_a_line(
    text: str, line: str, space: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            raise RuntimeError(text if "Output" in text else "in the backend") from error

    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(torch, "__file__", "/my env/torch.py" if space else "/env/torch.py")
    with pytest.warns(UserWarning, match="torch.compile fails on cpu") as caught:
        answers = [compiler_works(torch.device("cpu")) for _ in range(2)]
    assert answers == [False, False]
    (warning,) = caught
    message = f"torch.compile fails on cpu, so updates run uncompiled: {line}"
    hint = "; the path of the environment has a space, which torch does not quote everywhere"
    assert str(warning.message) == message + (hint if space else "")


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
