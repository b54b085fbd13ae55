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

_LARGE = 1 << 16  # elements
_WIDE = 64  # columns
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
        warnings.warn(f"torch.compile fails on {device}, so updates run uncompiled: {_cause(error)}", stacklevel=2)
        return False
    return True


def _cause(error: BaseException) -> str:
    """Return the first line that a C++ compiler printed, or of the last cause, and a hint if a path has a space."""
    _, _, printed = str(error).partition("\nOutput:\n")
    while not printed and (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    lines = (printed or str(error)).split("\n")
    line = next((line.strip() for line in lines if line.strip()), type(error).__name__)
    hint = "; the path of the environment has a space, which torch does not quote everywhere"
    return line + hint * (" " in torch.__file__)


def _kind(argument: Any) -> Any:
    """What torch.compile specialises on even with dynamic shapes, and sizes that call for other loops.

    Those are dtype, device, sizes of 1 and the order of strides. Whether loops are vectorised and run in parallel
    follows from the sizes of the first call, so code made for a small tensor is several times slower on a large one.
    """
    if not isinstance(argument, Tensor):
        return argument
    ones = tuple(size == 1 for size in argument.shape)
    order = None if argument.is_contiguous() else tuple(sorted(range(argument.ndim), key=argument.stride))
    large = argument.numel() >= _LARGE
    return argument.dtype, argument.device, ones, order, large, large and argument.shape[-1] >= _WIDE


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

    All are of the kind of the first. They enter compiled code together: entering it takes longer than the work on a
    small matrix.
    """
    if len(calls) == 1:
        return [compiled(kernel, *calls[0])(*calls[0])]

    def each(calls: list[tuple[Any, ...]]) -> list[Any]:
        return [kernel(*arguments) for arguments in calls]

    results: list[Any] = _compile(each, (kernel, len(calls), *map(_kind, calls[0])))(calls)
    return results
