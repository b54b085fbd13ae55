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
_SMALLEST_SCALE = 2.0**-120


def block_size(parameter: Tensor) -> int | None:
    """Return the elements per scale for the moments of ``parameter``, or None if they are kept in 32 bits.

    A block is a part of a row, the largest that divides it, so that storage does not depend on how rows are sharded.
    Tensors of fewer than 4,096 elements or two dimensions, rows without a divisor in 32…256, and tensors that are not
    contiguous are kept in 32 bits.
    """
    if parameter.ndim < 2 or parameter.numel() < _MIN_ELEMENTS or not to_local(parameter).is_contiguous():
        return None
    width, rest = divmod(parameter.shape[-1], part_count(parameter, -1))
    if rest:
        return None
    return next((size for size in range(_MAX_BLOCK, _MIN_BLOCK - 1, -1) if width % size == 0), None)


def zeros(parameter: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of zero moments for a parameter that has a :func:`block_size`, sharded as it is.

    Args:
        parameter: (..., n).
        signed: whether values may be negative.

    Returns:
        uint8 codes (..., n) and float32 scales (..., blocks per row).
    """
    size, parameter = block_size(parameter), parameter.detach()
    assert size is not None
    codes = torch.full_like(parameter, 127 if signed else 0, dtype=torch.uint8)
    local = to_local(parameter)
    scale = torch.zeros(*local.shape[:-1], local.shape[-1] // size, device=local.device)
    if isinstance(parameter, DTensor):
        shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // size))
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = parameter.device_mesh, parameter.placements
        scale = DTensor.from_local(scale, mesh, placements, run_check=False, shape=shape, stride=stride)
    return codes, scale


def blocks(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """View the local part of 8-bit moments as codes (rows, blocks per row, block) and scales (rows, blocks per row)."""
    codes, scale = to_local(codes), to_local(scale)
    rows, per_row = math.prod(scale.shape[:-1]), scale.shape[-1]
    return codes.view(rows, per_row, codes.shape[-1] // per_row), scale.view(rows, per_row)


def decode_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Return float32 values of signed codes (..., block) with scales (...)."""
    x = codes.float() * (1 / 127) - 1
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


def encode_unsigned(values: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Store float32 ``values`` (..., block), none negative, in ``codes`` and ``scale``; a positive one never as zero.

    A second moment stored as zero under a first moment that is not would make an update of m/ε.
    """
    largest = values.amax(-1, keepdim=True).clamp(min=_SMALLEST_SCALE)
    level = ((values / largest).sqrt().sqrt() * 255).round()
    codes.copy_(torch.where(values > 0, level.clamp(min=1.0), 0.0))
    scale.copy_(largest.squeeze(-1))
