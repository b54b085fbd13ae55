"""Compiled forms of pure tensor kernels, one per kind of input, never recompiled for a new size or learning rate."""

import shutil
import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


@cache
def compiler_works(device: torch.device) -> bool:
    """Tell whether torch.compile works for ``device``; warn if the tools are there and fail."""
    if device.type == "cpu" and not any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl")):
        return False
    if device.type != "cpu" and find_spec("triton") is None:
        return False
    try:
        torch.compile(torch.neg, fullgraph=True)(torch.ones(8, device=device))
    except RuntimeError as error:
        warnings.warn(f"torch.compile fails on {device}, so updates run uncompiled: {error}", stacklevel=2)
        return False
    return True


def _kind(argument: Any) -> Any:
    """What torch.compile specialises on even with dynamic shapes: dtype, device, sizes of 1, order of strides."""
    if not isinstance(argument, Tensor):
        return argument
    ones = tuple(size == 1 for size in argument.shape)
    order = None if argument.is_contiguous() else sorted(range(argument.ndim), key=argument.stride)
    return argument.dtype, argument.device, ones, order and tuple(order)


def _compile(function: Callable[..., Any], key: tuple[Any, ...]) -> Callable[..., Any]:
    if key not in _compiled:
        assert isinstance(function, FunctionType)
        code = function.__code__.replace(co_name=f"{function.__name__}_{len(_compiled)}")
        copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
        _compiled[key] = torch.compile(copy, dynamic=True, fullgraph=True)
    return _compiled[key]


def compiled(kernel: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return ``kernel`` compiled for arguments of the kind of ``arguments``.

    Sizes of tensors are symbolic, so one compilation serves every matrix shape; a number that changes from step to step
    must be passed in a tensor, since other arguments are constants of the compiled form. torch limits how often one
    code object is compiled, therefore each kind gets a copy of its own; were the limit reached all the same, torch
    raises instead of silently running uncompiled.
    """
    return _compile(kernel, (kernel, *map(_kind, arguments)))


def call_compiled(kernel: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """Call ``kernel`` :func:`compiled`, once for each tuple of arguments, and return the results.

    Calls of one kind enter compiled code together: entering it takes longer than the work on a small matrix.
    """
    kinds = {tuple(map(_kind, arguments)) for arguments in calls}
    if len(calls) == 1 or len(kinds) > 1:
        return [compiled(kernel, *arguments)(*arguments) for arguments in calls]

    def each(calls: list[tuple[Any, ...]]) -> list[Any]:
        return [kernel(*arguments) for arguments in calls]

    results: list[Any] = _compile(each, (kernel, len(calls), *kinds.pop()))(calls)
    return results
