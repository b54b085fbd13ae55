"""AdamW for the parameters that are not balanced, with moments stored in 32 or 8 bits (arXiv 1711.05101, 2110.02861).

One function does the arithmetic in float32, whatever the weights and the stored moments are:

    w ← (1 − lr·wd) w
    m ← β1 m + (1−β1) g        v ← β2 v + (1−β2) g²
    w ← w − lr · m / (1−β1^t) / (√(v / (1−β2^t)) + ε)

Gradients beyond ±2^62 count as that, since their squares would not be finite.

How moments are stored in 8 bits: :mod:`pumice.optim.quantised`.
"""

import sys

import torch
from torch import Tensor

from pumice.optim.batch import Batch, Calls
from pumice.optim.quantised import (
    block_size,
    blocks,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
    zeros,
)
from pumice.optim.rounding import stochastic_round
from pumice.optim.sinkhorn import CHUNK_BYTES, cols_of, row_slices, rows_of

_CPU_SCRATCH, _GPU_SCRATCH = 4 << 20, 64 << 20  # bytes of each float32 temporary in a compiled update that needs some
_LARGEST_GRADIENT = 2.0**62


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
    g = gradient.to(m.dtype).clamp(-_LARGEST_GRADIENT, _LARGEST_GRADIENT) * sign
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
    numbers: Tensor,
    row_uniforms: Tensor | None,
    col_uniforms: Tensor | None,
) -> None:
    """Update weight, m and v in place, all (rows, blocks, block) but the scales (rows, blocks)."""
    m, v = decode_signed(m_codes, m_scale), decode_unsigned(v_codes, v_scale)
    new, new_m, new_v = adamw(weight, gradient, m, v, numbers, row_uniforms, col_uniforms)
    weight.copy_(new)
    encode_signed(new_m, m_codes, m_scale)
    encode_unsigned(new_v, v_codes, v_scale)


def moment(parameter: Tensor, name: str, bits: int, signed: bool) -> dict[str, Tensor]:
    """Return the state for a zero moment of ``parameter``, sharded as it is.

    Args:
        parameter: any shape; a DTensor if it is sharded.
        name: key of the state.
        bits: 8 or 32; for what stays in 32 bits all the same see :func:`pumice.optim.quantised.block_size`.
        signed: whether values may be negative.

    Returns:
        ``name``: a tensor of at least float32; or uint8 codes and, as ``name`` + ``_scale``, their scales.
    """
    if bits == 8 and block_size(parameter) is not None:
        codes, scale = zeros(parameter, signed)
        return {name: codes, f"{name}_scale": scale}
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return {name: torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)}


class AdamWBatch(Batch):
    """An AdamW update with moments in 32 bits."""

    joint = False  # eight of these kernels in one take minutes to compile

    def measure(self) -> Calls[Tensor]:
        """Flag gradients whose sum is not finite, in their own dtype: a cast would copy them."""
        yield from ()
        return torch.stack([member.gradient.sum() for member in self.members]).isfinite().logical_not()

    def remeasure(self) -> Calls[Tensor]:
        """Flag gradients with an entry that is not finite."""
        yield from ()
        (gradient,) = (member.gradient for member in self.members)
        finite = [rows_of(gradient, index).isfinite().all() for index in row_slices(gradient)]
        return torch.stack(finite).all().logical_not().unsqueeze(0)

    def apply(self) -> Calls[None]:
        """Update weights and moments."""
        first, group = self.members[0], self.group
        lr, (beta1, beta2), t = float(group["lr"]), group["betas"], first.step
        decay = 1 - lr * group["weight_decay"] if first.parameter.ndim >= 2 else 1.0
        correction = (1 - beta2**t) ** -0.5
        sign = -1.0 if group["maximize"] else 1.0
        numbers = self.numbers([lr / (1 - beta1**t), decay, 1 - beta1, 1 - beta2, correction, group["eps"], sign])
        yield from self._update(numbers)
        for member in self.members:
            member.state["step"] += 1

    def _update(self, numbers: Tensor) -> Calls[None]:
        columns = [[member.weight for member in self.members]]
        columns += [[member.matrix(member.state[key]) for member in self.members] for key in ("exp_avg", "exp_avg_sq")]
        weight, m, v = map(self.gather, columns)
        gradient = self.gather(member.gradient for member in self.members)
        row_random, col_random = yield from self.uniforms()
        # A compiled kernel needs no temporaries unless it rounds: then it stores new weights on the way.
        limit = sys.maxsize if self.compile and row_random is None else self._scratch
        for index in row_slices(weight, limit=limit):
            yield from self.run(
                adamw_32bit,
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

    @property
    def _scratch(self) -> int:
        """Bytes of a float32 temporary."""
        if not self.compile:
            return CHUNK_BYTES
        return _CPU_SCRATCH if self.members[0].weight.device.type == "cpu" else _GPU_SCRATCH


class AdamW8bitBatch(AdamWBatch):
    """An AdamW update with moments in 8 bits."""

    stackable = False

    def _update(self, numbers: Tensor) -> Calls[None]:
        (member,) = self.members
        m_codes, m_scale = blocks(member.state["exp_avg"], member.state["exp_avg_scale"])
        v_codes, v_scale = blocks(member.state["exp_avg_sq"], member.state["exp_avg_sq_scale"])
        weight, gradient = (t.reshape(m_codes.shape) for t in (member.weight, member.gradient))
        row_random, col_random = yield from self.uniforms()
        # The new moments are read twice, for the scale and for the codes, so even a compiled kernel stores them.
        size = 4 * weight.numel()
        rows = max(1, -(-len(weight) // -(-size // self._scratch))) if size else 1
        for index in (slice(start, start + rows) for start in range(0, len(weight), rows)):
            yield from self.run(
                adamw_8bit,
                weight[index],
                gradient[index],
                m_codes[index],
                v_codes[index],
                m_scale[index],
                v_scale[index],
                numbers,
                row_random if row_random is None else row_random[index],
                col_random if col_random is None else col_random[index],
            )

    def _rounding_indices(self) -> tuple[Tensor, Tensor]:
        """Number the blocks (rows, blocks) and the places in a block (block,)."""
        (member,) = self.members
        rows, cols = member.rounding_indices()
        size = cols.numel() // member.state["exp_avg_scale"].shape[-1]
        return rows.reshape(-1, 1) * member.parameter.shape[-1] + cols[::size], cols[:size] - cols[0]
