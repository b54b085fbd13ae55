"""What every optimizer here shares: parameters with their gradients, gathered into batches that are updated together.

An update has two halves. ``measure`` computes from the gradients whatever the update needs and flags the members whose
gradient looks unfit, ``apply`` changes weights and state. Between them the optimizer looks at all flags at once, so
that a non-finite gradient is known before any weight has changed, at the price of one synchronisation with the device.

Both halves are generators that yield the compiled calls they need and are sent the results, so that the calls of
several batches can be made at once.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from pumice.optim.compiling import call_compiled
from pumice.optim.rounding import stream_key, uniforms
from pumice.optim.sharding import align_gradient, global_indices, to_local
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.sharding import local_slots

STACK_BYTES = 1 << 20  # equal tensors smaller than this share one call
COMPILED_STACK_BYTES = 1 << 16  # likewise if it is compiled: a larger one is faster where it lies, in the cache
_STACK_LIMIT = 32 << 20  # bytes of one stack
_JOINT_CALLS = 4  # more save little, and compile for longer
_JOINT_ELEMENTS = 1 << 20  # beyond, entering compiled code is a small part of a call, and scratch of four is not

DENSITY_EXPONENTS = {"sqrt": -0.5, "linear": -1.0, "none": 0.0}


@dataclass
class Member:
    """One parameter in one update."""

    parameter: Tensor  # as it stands in the parameter group: a DTensor if it is sharded
    group: dict[str, Any]
    state: dict[str, Any]
    name: str  # for messages
    number: int  # position in the optimizer
    transposed: bool = False  # stored [in, out]: rows and columns change places
    layer: BlockSparseLinear | None = None  # whose packed values it is: a row of the matrix is a slot

    def matrix(self, like_parameter: Tensor) -> Tensor:
        """View the local part of a tensor of the parameter's shape as a matrix (..., m, n), rows being outputs."""
        local = to_local(like_parameter)
        if self.packed:
            return local.flatten(1)
        matrix = local if local.ndim >= 2 else local.view(1, -1)
        return matrix.mT if self.transposed else matrix

    @cached_property
    def weight(self) -> Tensor:
        """The parameter as :meth:`matrix`."""
        return self.matrix(self.parameter.detach())

    @cached_property
    def gradient(self) -> Tensor:
        """The gradient as :meth:`matrix`, placed as the parameter is."""
        assert self.parameter.grad is not None
        local = align_gradient(self.parameter.grad, self.parameter)
        return self.matrix(local if local.ndim >= 2 else local.contiguous())

    @property
    def axes(self) -> tuple[int, int]:
        """Output and input axis of the stored parameter."""
        return (-1, -2) if self.transposed else (-2, -1)

    @property
    def packed(self) -> bool:
        """Whether the parameter is (slots, block rows, block cols)."""
        return self.layer is not None

    @property
    def ages(self) -> Tensor:
        """Updates that the block of each local slot has seen, the coming one included: float32 (slots,)."""
        assert self.layer is not None
        birth = self.layer.birth[local_slots(self.parameter)]
        ages = self.step + int(self.state["lag"]) - birth
        return torch.where(birth > 0, ages, self.step).clamp(1, self.step).float()  # no older than its state

    @property
    def ramp(self) -> Tensor:
        """Factors min(1, age / W) on the rates of local slots, 1 if W = 0: float32 (slots,)."""
        warmup: int = self.group["warmup_steps"]
        if not warmup:
            return torch.ones((), device=self.weight.device).expand(len(self.weight))
        return (self.ages / warmup).clamp(max=1.0)

    @property
    def density_factor(self) -> float:
        """Factor on the learning rate for the density of the layer."""
        assert self.layer is not None
        return float(self.layer.density ** DENSITY_EXPONENTS[self.group["density_scaling"]])

    @property
    def width(self) -> int:
        """Elements of a stored row of the whole parameter, or of a slot."""
        return math.prod(self.parameter.shape[1:]) if self.packed else self.parameter.shape[-1]

    @property
    def step(self) -> int:
        """Number of the update, from 1."""
        return int(self.state["step"]) + 1

    @property
    def rounds(self) -> bool:
        """Whether the weight is rounded stochastically."""
        return bool(self.group["stochastic_rounding"]) and self.parameter.dtype == torch.bfloat16

    def matrix_numbers(self) -> Tensor:
        """Return the position of each local matrix in the leading axes of the whole parameter, int64."""
        numbers = torch.zeros((), dtype=torch.int64, device=self.weight.device)
        for axis in range(self.parameter.ndim - 2):
            numbers = numbers.unsqueeze(-1) * self.parameter.shape[axis] + global_indices(self.parameter, axis)
        return numbers

    def rounding_indices(self) -> tuple[Tensor, Tensor]:
        """Return global row numbers (..., m), leading axes counted in, and column numbers (n,)."""
        if self.packed:
            slots = global_indices(self.parameter, 0)
            return slots, torch.arange(self.width, device=slots.device)
        if self.parameter.ndim < 2:
            row = torch.zeros(1, dtype=torch.int64, device=self.weight.device)
            return row, global_indices(self.parameter, 0) if self.parameter.ndim else row
        out_axis, in_axis = self.axes
        first_rows = self.matrix_numbers().unsqueeze(-1) * self.parameter.shape[out_axis]
        return first_rows + global_indices(self.parameter, out_axis), global_indices(self.parameter, in_axis)


Result = TypeVar("Result")
Calls = Generator[tuple[Callable[..., Any], tuple[Any, ...]], Any, Result]  # yields kernels with their arguments


class Batch(ABC):
    """Parameters of one group and, if several, of one shape, that go through an update together."""

    stackable = True  # whether equal small members may share one update
    joint: bool = True  # whether the compiled calls of equal members may be made together

    def __init__(self, members: list[Member], compile: bool) -> None:
        self.members = members
        self.group = members[0].group
        self.compile = compile

    @abstractmethod
    def measure(self) -> Calls[Tensor]:
        """Prepare the update; return one flag per member: its gradient is not finite, or needs ``remeasure``."""

    @abstractmethod
    def remeasure(self) -> Calls[Tensor]:
        """Prepare the update of a gradient that was flagged; return one flag per member: it is not finite."""

    @abstractmethod
    def apply(self) -> Calls[None]:
        """Change weights and state."""

    def split(self) -> list["Batch"]:
        """Return one batch per member."""
        return [type(self)([member], self.compile) for member in self.members]

    def _rounding_indices(self) -> tuple[Tensor, Tensor]:
        return self.members[0].rounding_indices()

    @property
    def company(self) -> Any:
        """What batches have in common whose calls may be made together; a stack or a large matrix has no company."""
        (first, *others) = self.members
        alone = not self.joint or others or first.weight.numel() > _JOINT_ELEMENTS
        if alone:
            return id(self)
        tensors = [(t.shape, t.dtype, t.device, t.stride()) for t in (first.weight, first.gradient)]
        return type(self), id(self.group), first.step <= 2, *tensors

    def run(self, kernel: Callable[..., Any], *arguments: Any) -> Calls[Any]:
        """Call a kernel, compiled if this batch compiles."""
        if self.compile:
            return (yield kernel, arguments)
        return kernel(*arguments)

    def gather(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the members' tensors as one: the tensor itself, or a stack along a new first axis."""
        parts = list(tensors)
        return parts[0] if len(parts) == 1 else torch.stack(parts)

    def scatter(self, values: Tensor, targets: Iterable[Tensor]) -> None:
        """Copy what ``gather`` made back to the members' tensors."""
        into = list(targets)
        if len(into) > 1:
            torch._foreach_copy_(into, list(values.unbind(0)))
        elif values is not into[0]:
            into[0].copy_(values)

    def numbers(self, values: list[float]) -> Tensor:
        """Return numbers that differ from step to step as a tensor, in the dtype of the update."""
        weight = self.members[0].weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.tensor(values, dtype=dtype).to(weight.device, non_blocking=True)

    @property
    def draws(self) -> bool:
        """Whether the update rounds something stochastically."""
        return self.members[0].rounds

    def uniforms(self) -> Calls[tuple[Tensor, Tensor] | tuple[None, None]]:
        """Return random numbers for rounding, (..., m) and (..., n) with the weight's leading axes, or None twice."""
        if not self.draws:
            return None, None
        keys = torch.tensor([stream_key(member.group["seed"], member.step, member.number) for member in self.members])
        rows, cols = self._rounding_indices()
        keys = keys.view(-1, *[1] * rows.ndim) if len(self.members) > 1 else keys
        row_random, col_random = yield from self.run(uniforms, rows, cols, keys.to(rows.device, non_blocking=True))
        return row_random, col_random.expand(*row_random.shape[:-1], cols.shape[-1])


def batches(members: Iterable[tuple[type[Batch], Member]], compile: bool) -> Iterator[Batch]:
    """Sort members into batches: small equal ones together, the others alone."""
    limit = COMPILED_STACK_BYTES if compile else STACK_BYTES
    alike: dict[Any, list[Member]] = {}
    for kind, member in members:
        weight, gradient = member.weight, member.gradient
        size = weight.numel() * weight.element_size()
        key: Any = (kind, member.number)
        if kind.stackable and size < limit and to_local(member.parameter) is member.parameter:
            key = (
                kind,
                id(member.group),
                member.parameter.shape,
                weight.dtype,
                gradient.dtype,
                weight.device,
                member.step,
            )
        alike.setdefault(key, []).append(member)
    for (kind, *_), group in alike.items():
        size = group[0].weight.numel() * max(4, group[0].weight.element_size())
        run = max(1, _STACK_LIMIT // max(1, size))
        for start in range(0, len(group), run):
            yield kind(group[start : start + run], compile)


def measure_all(work: Sequence[Batch]) -> list[Tensor]:
    """Measure all batches; return the flags of each."""
    return _jointly(work, lambda batch: batch.measure())


def remeasure_all(work: Sequence[Batch]) -> list[Tensor]:
    """Measure flagged batches again, one after the other; return the flags of each."""
    return [flags for batch in work for flags in _in_step([batch.remeasure()])]


def apply_all(work: Sequence[Batch]) -> None:
    """Change weights and state."""
    _jointly(work, lambda batch: batch.apply())


def _jointly(work: Sequence[Batch], half: Callable[[Batch], Calls[Result]]) -> list[Result]:
    """Do a half of the update of all batches, making the calls of batches of one company together."""
    companies: dict[Any, list[int]] = {}
    for number, batch in enumerate(work):
        companies.setdefault(batch.company, []).append(number)
    results: dict[int, Result] = {}
    for company in companies.values():
        joint = len(company) - len(company) % _JOINT_CALLS  # every other number of calls would be compiled for itself
        runs = [company[start : start + _JOINT_CALLS] for start in range(0, joint, _JOINT_CALLS)]
        for run in [*runs, *([number] for number in company[joint:])]:
            results.update(zip(run, _in_step([half(work[number]) for number in run]), strict=True))
    return [results[number] for number in range(len(work))]


def _in_step(generators: list[Calls[Result]]) -> list[Result]:
    """Advance generators that yield the same kernels in the same order."""
    answers: list[Any] = [None] * len(generators)
    while True:
        calls, finished = [], []
        for generator, answer in zip(generators, answers, strict=True):
            try:
                calls.append(generator.send(answer))
            except StopIteration as stop:
                finished.append(stop.value)
        if not calls:
            return finished
        answers = call_compiled(calls[0][0], [arguments for _, arguments in calls])
