"""Bytes of training while it runs, by category, on any device.

The ledger costs some microseconds an operator: measure a step or a few, not a run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pumice.memory.ledger import CATEGORIES, Event, Ledger


@dataclass
class Measurement:
    """What :func:`measure` found.

    Attributes:
        peak_bytes: Most bytes of tensors at a time: the model, the optimizer's state, and what operators have made.
        breakdown_bytes: The same moment by category. What the forward pass makes, logits included, is activations, and
            what the backward pass and the optimizer make and free is transient.
        allocated_bytes: On a GPU, the most that torch's allocator gave out at a time, with what operators use inside.
    """

    peak_bytes: int = 0
    breakdown_bytes: dict[str, int] = field(default_factory=dict)
    allocated_bytes: int | None = None


@contextmanager
def measure(model: nn.Module, optimizer: Optimizer | None = None) -> Iterator[Measurement]:
    """Measure the memory of what runs in the context.

    >>> with measure(model, optimizer) as measurement:
    ...     train_a_step()
    >>> measurement.breakdown_bytes

    What torch.compile has compiled is seen by its results; memory inside it is not.

    Args:
        model: Its parameters, buffers and gradients are counted from the start.
        optimizer: Its state is, too.

    Yields:
        The measurement, complete when the context ends.
    """
    found = Measurement()
    now = dict.fromkeys(CATEGORIES, 0)

    def tell(event: Event) -> None:
        if event.becomes is not None:
            now[event.category] -= event.size
            now[event.becomes] += event.size
            return
        now[event.category] += event.size
        if event.size > 0 and (total := sum(now.values())) >= found.peak_bytes:
            found.peak_bytes, found.breakdown_bytes = total, dict(now)

    stepping = False

    def category() -> str:
        return "transient" if stepping or torch._C._current_graph_task_id() >= 0 else "activations"

    ledger = Ledger(tell, category)

    def begin(*_: Any) -> None:
        nonlocal stepping
        stepping = True

    def end(*_: Any) -> None:
        nonlocal stepping
        stepping = False
        for tensor in _state(optimizer):
            ledger.move(tensor, "optimizer_state")

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:  # not released
            ledger.move(parameter.grad, "gradients")

    for tensor in (*model.parameters(), *model.buffers()):
        ledger.see(tensor, "weights")
    for tensor in _state(optimizer):
        ledger.see(tensor, "optimizer_state")
    hooks: list[Any] = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            ledger.see(parameter.grad, "gradients")
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
    if optimizer is not None:
        hooks += [optimizer.register_step_pre_hook(begin), optimizer.register_step_post_hook(end)]
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    try:
        with ledger:
            yield found
    finally:
        for hook in hooks:
            hook.remove()
        if on_gpu:
            found.allocated_bytes = torch.cuda.max_memory_allocated()


def _state(optimizer: Optimizer | None) -> Iterator[Tensor]:
    for state in optimizer.state.values() if optimizer is not None else ():
        yield from (value for value in state.values() if isinstance(value, Tensor))
