"""AdamW for the parameters that are not balanced, with moments stored in 32 or 8 bits (arXiv 1711.05101, 2110.02861).

One function does the arithmetic in float32, whatever the weights and the stored moments are:

    w ← (1 − lr·wd) w
    m ← β1 m + (1−β1) g        v ← β2 v + (1−β2) g²
    w ← w − lr · m / (1−β1^t) / (√(v / (1−β2^t)) + ε)

8-bit moments are torchao's ``OptimState8bit``: a code per element, a float32 scale per block of 256.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from pumice.optim.batch import Batch
from pumice.optim.rounding import stochastic_round
from pumice.optim.sharding import to_local
from pumice.optim.sinkhorn import cols_of, row_slices, rows_of

QUANTISATION_BLOCK = 256
_MIN_QUANTISED = 4096  # elements: smaller tensors save nothing worth the error
_SMALLEST_SCALE = 2.0**-120


def adamw(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    numbers: Tensor,
    row_uniforms: Tensor | None,
    col_uniforms: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new weight, m and v; see the module's equations.

    Args:
        weight: (..., m, n), any floating dtype.
        gradient: as ``weight``, any floating dtype.
        m: first moment, float32.
        v: second moment, float32.
        numbers: lr / (1−β1^t), 1 − lr·wd, 1−β1, 1−β2, 1 / √(1−β2^t), ε and the sign of the gradient.
        row_uniforms: (..., m) if the weight is rounded stochastically.
        col_uniforms: (..., n) if the weight is rounded stochastically.
    """
    step_size, decay, keep_m, keep_v, correction, eps, sign = numbers.unbind(0)
    g = gradient.to(m.dtype) * sign
    m = m + keep_m * (g - m)
    v = v + keep_v * (g * g - v)
    new = weight.to(m.dtype) * decay - step_size * m / (v.sqrt() * correction + eps)
    if row_uniforms is not None and col_uniforms is not None:
        new = stochastic_round(new, row_uniforms, col_uniforms)
    return new, m, v


def adamw_32bit(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    numbers: Tensor,
    row_uniforms: Tensor | None,
    col_uniforms: Tensor | None,
) -> None:
    """Update weight, m and v in place."""
    new, new_m, new_v = adamw(weight, gradient, m, v, numbers, row_uniforms, col_uniforms)
    weight.copy_(new)
    m.copy_(new_m)
    v.copy_(new_v)


def adamw_8bit(
    weight: Tensor,
    gradient: Tensor,
    m_codes: Tensor,
    v_codes: Tensor,
    m_scale: Tensor,
    v_scale: Tensor,
    m_map: Tensor,
    v_map: Tensor,
    numbers: Tensor,
    row_uniforms: Tensor | None,
    col_uniforms: Tensor | None,
) -> None:
    """Update weight, m and v in place; a moment is codes, a scale per block, and the values of the codes."""
    m, v = dequantise(m_codes, m_scale, m_map), dequantise(v_codes, v_scale, v_map)
    new, new_m, new_v = adamw(weight, gradient, m, v, numbers, row_uniforms, col_uniforms)
    weight.copy_(new)
    quantise(new_m, m_codes, m_scale, m_map)
    quantise(new_v, v_codes, v_scale, v_map)


def dequantise(codes: Tensor, scale: Tensor, code_map: Tensor) -> Tensor:
    """Return the float32 values of 8-bit storage in the shape of ``codes``."""
    values = code_map[codes.reshape(-1, QUANTISATION_BLOCK).int()] * scale.unsqueeze(-1)
    return values.view(codes.shape)


def quantise(values: Tensor, codes: Tensor, scale: Tensor, code_map: Tensor) -> None:
    """Store float32 ``values`` as codes and scales, each value as the nearest code but positive ones never as zero.

    A second moment stored as zero under a first moment that is not would make an update of m/ε.
    """
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    blocks = values.reshape(-1, QUANTISATION_BLOCK)
    new_scale = blocks.abs().amax(-1).clamp(min=_SMALLEST_SCALE)
    nearest = quantize_8bit_with_qmap(blocks / new_scale.unsqueeze(-1), code_map)
    zero = (code_map == 0).int().argmax()
    nearest = torch.where((nearest == zero) & (blocks > 0), nearest + 1, nearest)
    codes.copy_(nearest.view(codes.shape))
    scale.copy_(new_scale)


def moment(parameter: Tensor, bits: int, signed: bool) -> Tensor:
    """Return a zero moment for ``parameter``, sharded as it is.

    Args:
        parameter: any shape; a DTensor if it is sharded.
        bits: 8 or 32. With 8, tensors of fewer than 4,096 elements, and those whose parts on each rank do not consist
            of whole blocks of 256, are kept in 32 bits all the same.
        signed: whether values may be negative.

    Returns:
        float32 tensor, or torchao's ``OptimState8bit``, or a DTensor of either.
    """
    local = to_local(parameter.detach())
    if bits == 32 or not _quantisable(parameter):
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    from torchao.optim.subclass_8bit import OptimState8bit

    state: Tensor = OptimState8bit.zeros(
        local.shape, signed, QUANTISATION_BLOCK, device=local.device, dtype=torch.float32
    )
    if not isinstance(parameter, DTensor):
        return state
    return DTensor.from_local(
        state,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _quantisable(parameter: Tensor) -> bool:
    unit = parameter.numel()
    if isinstance(parameter, DTensor):
        # The same answer on every rank: parts begin and end at whole rows of the first axis or not at all.
        if any(isinstance(placement, Shard) and placement.dim != 0 for placement in parameter.placements):
            return False
        if any(isinstance(placement, Shard) for placement in parameter.placements):
            unit = math.prod(parameter.shape[1:])
    return parameter.numel() >= _MIN_QUANTISED and unit % QUANTISATION_BLOCK == 0


class AdamWBatch(Batch):
    """An AdamW update with moments in 32 bits."""

    def measure(self) -> Tensor:
        """Flag gradients whose sum is not finite."""
        return (
            torch.stack([member.gradient.sum(dtype=torch.float32) for member in self.members]).isfinite().logical_not()
        )

    def remeasure(self) -> Tensor:
        """Flag gradients with an entry that is not finite."""
        return torch.stack([member.gradient.isfinite().all() for member in self.members]).logical_not()

    def apply(self) -> None:
        """Update weights and moments."""
        first, group = self.members[0], self.group
        lr, (beta1, beta2), t = float(group["lr"]), group["betas"], first.step
        decay = 1 - lr * group["weight_decay"] if first.parameter.ndim >= 2 else 1.0
        correction = (1 - beta2**t) ** -0.5
        sign = -1.0 if group["maximize"] else 1.0
        numbers = self.numbers([lr / (1 - beta1**t), decay, 1 - beta1, 1 - beta2, correction, group["eps"], sign])
        self._update(numbers)
        for member in self.members:
            member.state["step"] += 1

    def _update(self, numbers: Tensor) -> None:
        columns = [[member.weight for member in self.members]]
        columns += [[member.matrix(member.state[key]) for member in self.members] for key in ("exp_avg", "exp_avg_sq")]
        weight, m, v = map(self.gather, columns)
        gradient = self.gather(member.gradient for member in self.members)
        row_random, col_random = self.uniforms()
        if self.compile:
            self.run(adamw_32bit, weight, gradient, m, v, numbers, row_random, col_random)
        else:
            for index in row_slices(weight):
                adamw_32bit(
                    rows_of(weight, index),
                    rows_of(gradient, index),
                    rows_of(m, index),
                    rows_of(v, index),
                    numbers,
                    row_random if row_random is None else row_random[index],
                    col_random if col_random is None else cols_of(col_random, index),
                )
        for values, targets in zip((weight, m, v), columns, strict=True):
            self.scatter(values, targets)


class AdamW8bitBatch(AdamWBatch):
    """An AdamW update with moments in torchao's 8-bit storage."""

    stackable = False

    def _update(self, numbers: Tensor) -> None:
        (member,) = self.members
        width = member.weight.shape[-1]
        m, v = (cast(Any, to_local(member.state[key])) for key in ("exp_avg", "exp_avg_sq"))
        by_row = [t.reshape(-1, width) for t in (member.weight, member.gradient, m.codes, v.codes)]
        row_random, col_random = self.uniforms()
        if row_random is not None and col_random is not None:
            row_random, col_random = row_random.flatten(), col_random.reshape(-1, width)[0]
        if self.compile:
            self.run(adamw_8bit, *by_row, m.scale, v.scale, m.qmap, v.qmap, numbers, row_random, col_random)
            return
        for index in row_slices(by_row[0], multiple=QUANTISATION_BLOCK // math.gcd(width, QUANTISATION_BLOCK)):
            rows = range(len(by_row[0]))[index[0]] if index[0] is not ... else range(len(by_row[0]))
            blocks = slice(rows.start * width // QUANTISATION_BLOCK, rows.stop * width // QUANTISATION_BLOCK)
            random = None if row_random is None else row_random[index]
            weight, gradient, m_codes, v_codes = (rows_of(tensor, index) for tensor in by_row)
            scales = m.scale[blocks], v.scale[blocks]
            adamw_8bit(weight, gradient, m_codes, v_codes, *scales, m.qmap, v.qmap, numbers, random, col_random)
