"""Moments in 8 bits: a code per element and a float32 scale per block, as two ordinary tensors.

(torchao's ``OptimState8bit`` holds the same in one, but cannot be copied, compared or empty, and ``torch.load`` with
``weights_only=True`` knows it only after torchao has been imported.)

A code stands for the fourth power of an equally spaced number. Signed values are s · x³·|x| with x = c/127 − 1 for
codes c in 0…254; values that are not negative are s · (c/255)⁴ for c in 0…255. s is the largest magnitude of the block.
Errors are those of the dynamic map of arXiv 2110.02861 or smaller (``benchmarks/moment_codes.py``), and two square
roots find the code of a value, where the dynamic map takes a search in a table per element.
"""

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pumice.optim.sharding import part_count, to_local

_MIN_ELEMENTS = 4096  # smaller tensors save nothing worth the error
_MAX_BLOCK, _MIN_BLOCK = 256, 32
_MIN_PACKED_BLOCK = 16  # a slot of 16 elements takes 10 bits each, scale included
_SMALLEST_SCALE = 2.0**-120
_NEGLIGIBLE = 2.0**-12  # chance of another code


def block_size(parameter: Tensor, packed: bool = False) -> int | None:
    """Return the elements per scale for the moments of ``parameter``, or None if they are kept in 32 bits.

    A block is a part of a row, the largest that divides it, so that storage does not depend on how rows are sharded;
    a row of ``packed`` values (slots, block rows, block cols) is a slot. Tensors of fewer than 4,096 elements or two
    dimensions, rows without a divisor in 32…256 (slots: 16…256), and tensors that are not contiguous are kept in 32
    bits.
    """
    if parameter.ndim < 2 or parameter.numel() < _MIN_ELEMENTS or not to_local(parameter).is_contiguous():
        return None
    if packed:
        width, rest, least = parameter[0].numel(), 0, _MIN_PACKED_BLOCK
    else:
        (width, rest), least = divmod(parameter.shape[-1], part_count(parameter, -1)), _MIN_BLOCK
    if rest:
        return None
    return next((size for size in range(_MAX_BLOCK, least - 1, -1) if width % size == 0), None)


def zeros(parameter: Tensor, signed: bool, packed: bool = False) -> tuple[Tensor, Tensor]:
    """Return codes and scales of zero moments for a parameter that has a :func:`block_size`, sharded as it is.

    Args:
        parameter: (..., n), or (slots, block rows, block cols) if ``packed``.
        signed: whether values may be negative.
        packed: whether a row is a slot.

    Returns:
        uint8 codes of the parameter's shape and float32 scales (..., blocks per row).
    """
    size, parameter = block_size(parameter, packed), parameter.detach()
    assert size is not None
    codes = torch.full_like(parameter, zero_code(signed), dtype=torch.uint8)

    def scales_of(shape: torch.Size) -> torch.Size:
        rows = shape[:1] if packed else shape[:-1]
        return torch.Size((*rows, math.prod(shape[len(rows) :]) // size))

    local = to_local(parameter)
    scale = torch.zeros(scales_of(local.shape), device=local.device)
    if isinstance(parameter, DTensor):
        shape = scales_of(parameter.shape)
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = parameter.device_mesh, parameter.placements
        scale = DTensor.from_local(scale, mesh, placements, run_check=False, shape=shape, stride=stride)
    return codes, scale


def blocks(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """View the local part of 8-bit moments as codes (rows, blocks per row, block) and scales (rows, blocks per row)."""
    codes, scale = to_local(codes), to_local(scale)
    rows, per_row = math.prod(scale.shape[:-1]), scale.shape[-1]
    size = math.prod(codes.shape[scale.ndim - 1 :]) // per_row
    return codes.view(rows, per_row, size), scale.view(rows, per_row)


def zero_code(signed: bool) -> int:
    """Return the code of zero."""
    return 127 if signed else 0


def decode_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Return float32 values of signed codes (..., block) with scales (...)."""
    x = (codes.float() - 127) * (1 / 127)  # exactly zero for the code of zero, also where a × b + c is fused
    return x * x * x * x.abs() * scale.unsqueeze(-1)


def decode_unsigned(codes: Tensor, scale: Tensor) -> Tensor:
    """Return float32 values of unsigned codes (..., block) with scales (...)."""
    square = (codes.float() * (1 / 255)).square()
    return square.square() * scale.unsqueeze(-1)


def encode_signed(values: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Store float32 ``values`` (..., block) in ``codes`` and ``scale``."""
    size = values.abs()
    largest = size.amax(-1, keepdim=True).clamp(min=_SMALLEST_SCALE)
    level = (size / largest).sqrt().sqrt() * 127
    codes.copy_((torch.where(values < 0, -level, level) + 127).round())
    scale.copy_(largest.squeeze(-1))


def encode_unsigned(values: Tensor, codes: Tensor, scale: Tensor, uniform: Tensor) -> None:
    """Store float32 ``values`` (..., block), none negative, in ``codes`` and ``scale``; a positive one never as zero.

    A second moment changes by a thousandth in an update and a code stands for a step of 4/255 or more, so to nearest
    it would hardly ever move. It goes to the code below or above at random, such that its expectation is exact.
    A second moment stored as zero under a first moment that is not would make an update of m/ε.

    Args:
        values: (..., block).
        codes: uint8, (..., block).
        scale: float32, (...).
        uniform: random numbers in [0, 1), (..., block).
    """
    largest = values.amax(-1, keepdim=True).clamp(min=_SMALLEST_SCALE)
    share = values / largest
    below = (share.sqrt().sqrt() * 255).floor().clamp(max=254.0)
    low, high = (below * (1 / 255)).square().square(), ((below + 1) * (1 / 255)).square().square()
    # A value that is a code but for rounding errors keeps that code.
    uniform = uniform.clamp(_NEGLIGIBLE, 1 - _NEGLIGIBLE)
    level = torch.where(uniform * (high - low) < share - low, below + 1, below)
    codes.copy_(torch.where(values > 0, level.clamp(min=1.0), 0.0))
    scale.copy_(largest.squeeze(-1))
