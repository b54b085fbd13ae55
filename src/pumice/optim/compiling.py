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


def compiled(kernel: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Return ``kernel`` compiled for arguments of the kind of ``arguments``.

    Sizes of tensors are symbolic, so one compilation serves every matrix shape; a number that changes from step to step
    must be passed in a tensor, since other arguments are constants of the compiled form. torch limits how often one
    code object is compiled, therefore each kind gets a copy of its own; were the limit reached all the same, torch
    raises instead of silently running uncompiled.
    """
    assert isinstance(kernel, FunctionType)
    key = (kernel, *map(_kind, arguments))
    if key not in _compiled:
        code = kernel.__code__.replace(co_name=f"{kernel.__name__}_{len(_compiled)}")
        copy = FunctionType(code, kernel.__globals__, kernel.__name__, kernel.__defaults__, kernel.__closure__)
        _compiled[key] = torch.compile(copy, dynamic=True, fullgraph=True)
    return _compiled[key]
