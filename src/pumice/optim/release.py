"""Gradient release: every parameter is updated in the backward pass, as soon as its gradient is whole, which is freed.

The memory of all gradients shrinks to that of the largest (LOMO, arXiv 2306.09782; PyTorch's optimizer-in-backward).

>>> release = GradientRelease(optimizer)
>>> for batch in batches:
...     model(**batch).loss.backward()  # updates
...     optimizer.step()  # ends the step: hooks and learning-rate schedulers go on as ever
...     optimizer.zero_grad()

autograd adds up all contributions to a parameter (tied weights, shared modules) before it hands on the gradient, and by
then nothing in the backward pass needs the old weight any more. Where that does not hold, because there are several
backward passes in a step, a second gradient is refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from pumice.optim.base import MatrixOptimizer, check_number


class GradientRelease:
    """Lets an optimizer update its parameters in the backward pass.

    What is updated, and to what, is what ``optimizer.step()`` would do, with the options that the groups have at that
    moment: to the bit, or to rounding where that stacks small matrices (SinkGD: those under 1 MiB, compiled 64 KiB) and
    adds up a stack in another order. A parameter without a gradient is left alone. ``optimizer.step()`` ends the step:
    it runs the step's hooks and updates what did not come through a hook here, like parameters that did not train when
    this object was made.

    What differs from the ordinary path:

    - There is one backward pass to a step: no gradient accumulation, and no closures.
    - Gradients are gone after the backward pass, so they cannot be clipped by their common norm: see ``clip``.
    - If a gradient is not finite, parameters whose gradients came before it have been updated already.
    - A float16 loss scaler finds no gradients; it raises.

    Args:
        optimizer: any whose update of a parameter depends on that parameter alone, as all of torch.optim but LBFGS.
            Made for the parameters that really train: after any sharding, on one process.
        clip: largest L2 norm of the gradient of each single parameter, positive; None does not clip. Parameters that
            SinkGD balances are not clipped, since their update ignores the gradient's scale.
        norm: whether to measure :attr:`grad_norm`, one more pass over each gradient.

    Raises:
        ValueError: the optimizer has such an object already, is LBFGS, or trains sharded or replicated parameters; or
            ``clip`` is not positive.
        RuntimeError: later, in the backward pass: a parameter gets a second gradient before ``optimizer.step()``, or
            parameters of the optimizer were replaced.
    """

    def __init__(self, optimizer: Optimizer, *, clip: float | None = None, norm: bool = False) -> None:
        _check(optimizer)
        if clip is not None:
            check_number("clip", clip, 0, open_low=True)
        self.optimizer = optimizer
        self.clip = clip
        self._norm = norm
        self._squares: list[Tensor] = []
        self._finished: Tensor | None = None
        self._updated: set[tuple[int, int]] = set()
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._refuse_closure),
            optimizer.register_step_post_hook(self._end_step),
        ]
        for group, options in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(options["params"]):
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(group, index)))
        optimizer.gradient_release = self  # type: ignore[attr-defined]

    @property
    def grad_norm(self) -> float | None:
        """L2 norm of all gradients of the last finished step, before clipping; None if it is not measured."""
        return None if self._finished is None else float(self._finished)

    def remove(self) -> None:
        """Give the optimizer its ordinary ways back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if of(self.optimizer) is self:
            del self.optimizer.gradient_release  # type: ignore[attr-defined]

    def _hook(self, group: int, index: int) -> Any:
        return lambda parameter: self._update(parameter, group, index)

    @torch.no_grad()
    def _update(self, parameter: Tensor, group: int, index: int) -> None:
        options = self.optimizer.param_groups[group]
        if options["params"][index] is not parameter:
            raise RuntimeError(
                "the optimizer's parameters were replaced after gradient release was set up: set it up later"
            )
        if (group, index) in self._updated:
            raise RuntimeError(
                f"{_name(options, group, index)} got a second gradient before optimizer.step(), but with gradient "
                "release its first one has been used and freed: add up the losses and call backward once a step; "
                "instead of accumulating gradients, use larger micro-batches or more steps; with gradient "
                "checkpointing of shared parameters, use use_reentrant=False"
            )
        self._updated.add((group, index))
        assert parameter.grad is not None
        if self._norm or self.clip is not None:
            self._clip(parameter, parameter.grad, options)
        if isinstance(self.optimizer, MatrixOptimizer):
            self.optimizer.step_parameter(group, index)
        else:
            step_alone(self.optimizer, options, index)
        parameter.grad = None

    def _clip(self, parameter: Tensor, gradient: Tensor, options: dict[str, Any]) -> None:
        balanced = isinstance(self.optimizer, MatrixOptimizer) and self.optimizer.ignores_scale(parameter, options)
        if balanced and not self._norm:
            return
        norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        if self._norm:
            self._squares.append(norm.square())
        if self.clip is not None and not balanced:
            gradient.mul_((self.clip / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))

    def _refuse_closure(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):  # the first is the optimizer
            raise ValueError(
                "with gradient release optimizer.step() takes no closure: call backward first, then step()"
            )

    def _end_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._updated.clear()
        if self._norm:
            first = self._squares[0].device if self._squares else None
            self._finished = torch.stack([s.to(first) for s in self._squares] or [torch.zeros(())]).sum().sqrt()
            self._squares.clear()


def of(optimizer: Optimizer) -> GradientRelease | None:
    """Return the gradient release of an optimizer, if it has one."""
    found: GradientRelease | None = getattr(optimizer, "gradient_release", None)
    return found


def _check(optimizer: Optimizer) -> None:
    if of(optimizer) is not None:
        raise ValueError("gradients of this optimizer are released already")
    if isinstance(optimizer, LBFGS):
        raise ValueError("LBFGS updates all parameters together, so their gradients cannot be released")
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if several or any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "gradient release works on one process: with several, shard the parameters and leave release off"
        )


def _name(options: dict[str, Any], group: int, index: int) -> str:
    names = options.get("param_names")
    return str(names[index]) if names else f"parameter {index} of group {group}"


def step_alone(optimizer: Optimizer, options: dict[str, Any], index: int) -> None:
    """Call the step of an optimizer without its hooks, as if it had one parameter: that of a group at an index."""
    groups, parameters, names = optimizer.param_groups, options["params"], options.get("param_names")
    before = dict(options)
    options["params"] = [parameters[index]]
    if names:
        options["param_names"] = [names[index]]
    optimizer.param_groups = [options]
    try:
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    finally:
        optimizer.param_groups, options["params"] = groups, parameters
        if names:
            options["param_names"] = names
    if changed := [key for key, value in options.items() if before.get(key) is not value]:
        raise RuntimeError(
            f"{type(optimizer).__name__} keeps {', '.join(changed)} for a whole group, so it cannot update one "
            "parameter at a time: use it without gradient release"
        )
