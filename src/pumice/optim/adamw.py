"""AdamW with moments stored in 32 or 8 bits (arXiv 1711.05101, 2110.02861), for dense and for packed parameters.

One function does the arithmetic in float32, whatever the weights and the stored moments are:

    w ← (1 − lr·wd) w
    m ← β1 m + (1−β1) g        v ← β2 v + (1−β2) g²
    w ← w − lr · m / (1−β1^t) / (√(v / (1−β2^t)) + ε)

Gradients beyond ±2^62 count as that, since their squares would not be finite. In packed parameters every slot has its
own age t, and lr its own factor: :mod:`pumice.optim.smet`.

How moments are stored in 8 bits: :mod:`pumice.optim.quantised`.
"""

import sys
from typing import NamedTuple

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
from pumice.optim.rounding import element_uniforms, stochastic_round
from pumice.optim.sinkhorn import CHUNK_BYTES, cols_of, row_slices, rows_of

_CPU_SCRATCH, _GPU_SCRATCH = 4 << 20, 64 << 20  # bytes of each float32 temporary in a compiled update that needs some
_LARGEST_GRADIENT = 2.0**62


class Uniforms(NamedTuple):
    """Random numbers of rows (..., m) and columns (..., n), if something is rounded stochastically."""

    rows: Tensor | None
    cols: Tensor | None
    weights: bool  # whether weights are


def adamw(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    numbers: Tensor,
    ages: Tensor | None,
    uniforms: Uniforms,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the new weight, m and v; see the module's equations.

    Args:
        weight: (..., m, n), any floating dtype.
        gradient: as ``weight``, any floating dtype.
        m: first moment, float32.
        v: second moment, float32.
        numbers: 1 − lr·wd, 1−β1, 1−β2, ε, the sign of the gradient, and then either lr / (1−β1^t) and 1 / √(1−β2^t),
            or, where ages are given, lr with the factor of the density, log β1, log β2 and 1/W (infinite if W = 0).
        ages: t of each row as float32, (m,) or (m, 1) for a weight of three axes; None where one t holds for all.
        uniforms: for rounding.
    """
    decay, keep_m, keep_v, eps, sign = numbers[:5].unbind(0)
    if ages is None:
        step_size, correction = numbers[5:].unbind(0)
    else:
        step_size, correction = (factor.unsqueeze(-1) for factor in age_factors(ages, numbers[5:]))
    g = gradient.to(m.dtype).clamp(-_LARGEST_GRADIENT, _LARGEST_GRADIENT) * sign
    m = m + keep_m * (g - m)
    v = v + keep_v * (g * g - v)
    new = weight.to(m.dtype) * decay - step_size * m / (v.sqrt() * correction + eps)
    if uniforms.weights and uniforms.rows is not None and uniforms.cols is not None:
        new = stochastic_round(new, uniforms.rows, uniforms.cols)
    return new, m, v


def age_factors(ages: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return lr · ramp / (1−β1^t) and 1 / √(1−β2^t) for ages t, float32; ``numbers`` are the last of :func:`adamw`."""
    lr, log_beta1, log_beta2, per_warmup = numbers.unbind(0)
    ramp = (ages * per_warmup).clamp(max=1.0)
    # expm1 keeps the digits that 1 − β^t would lose in float32 while t is small.
    return lr * ramp / -torch.expm1(ages * log_beta1), torch.rsqrt(-torch.expm1(ages * log_beta2))


def adamw_32bit(
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    numbers: Tensor,
    ages: Tensor | None,
    row_uniforms: Tensor | None,
    col_uniforms: Tensor | None,
) -> None:
    """Update weight, m and v in place."""
    uniforms = Uniforms(row_uniforms, col_uniforms, weights=True)
    new, new_m, new_v = adamw(weight, gradient, m, v, numbers, ages, uniforms)
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
    ages: Tensor | None,
    row_uniforms: Tensor,
    col_uniforms: Tensor,
    round_weights: bool,
) -> None:
    """Update weight, m and v in place, all (rows, blocks, block) but the scales (rows, blocks)."""
    m, v = decode_signed(m_codes, m_scale), decode_unsigned(v_codes, v_scale)
    uniforms = Uniforms(row_uniforms, col_uniforms, round_weights)
    new, new_m, new_v = adamw(weight, gradient, m, v, numbers, ages, uniforms)
    weight.copy_(new)
    encode_signed(new_m, m_codes, m_scale)
    encode_unsigned(new_v, v_codes, v_scale, element_uniforms(row_uniforms, col_uniforms))


def moment(parameter: Tensor, name: str, bits: int, signed: bool, packed: bool = False) -> dict[str, Tensor]:
    """Return the state for a zero moment of ``parameter``, sharded as it is.

    Args:
        parameter: any shape; a DTensor if it is sharded.
        name: key of the state.
        bits: 8 or 32; for what stays in 32 bits all the same see :func:`pumice.optim.quantised.block_size`.
        signed: whether values may be negative.
        packed: whether ``parameter`` is (slots, block rows, block cols).

    Returns:
        ``name``: a tensor of at least float32; or uint8 codes and, as ``name`` + ``_scale``, their scales.
    """
    if bits == 8 and block_size(parameter, packed) is not None:
        codes, scale = zeros(parameter, signed, packed)
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
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        decay = 1 - lr * group["weight_decay"] if first.parameter.ndim >= 2 else 1.0
        sign = -1.0 if group["maximize"] else 1.0
        numbers = self.numbers([decay, 1 - beta1, 1 - beta2, group["eps"], sign, *self._rates(lr, beta1, beta2)])
        yield from self._update(numbers, self._ages())
        for member in self.members:
            member.state["step"] += 1

    def _rates(self, lr: float, beta1: float, beta2: float) -> list[float]:
        """Return the last of the numbers of :func:`adamw`."""
        t = self.members[0].step
        return [lr / (1 - beta1**t), (1 - beta2**t) ** -0.5]

    def _ages(self) -> Tensor | None:
        """Return the ages of rows, if each has its own."""
        return None

    def _update(self, numbers: Tensor, ages: Tensor | None) -> Calls[None]:
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
                ages if ages is None else ages[index],
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

    @property
    def draws(self) -> bool:
        """Second moments are rounded stochastically, whatever the weights are."""
        return True

    def _update(self, numbers: Tensor, ages: Tensor | None) -> Calls[None]:
        (member,) = self.members
        m_codes, m_scale = blocks(member.state["exp_avg"], member.state["exp_avg_scale"])
        v_codes, v_scale = blocks(member.state["exp_avg_sq"], member.state["exp_avg_sq_scale"])
        weight, gradient = (t.reshape(m_codes.shape) for t in (member.weight, member.gradient))
        row_random, col_random = yield from self.uniforms()
        assert row_random is not None
        assert col_random is not None
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
                ages if ages is None else ages[index].unsqueeze(-1),
                row_random[index],
                col_random[index],
                member.rounds,
            )

    def _rounding_indices(self) -> tuple[Tensor, Tensor]:
        """Number the blocks (rows, blocks) and the places in a block (block,)."""
        (member,) = self.members
        rows, cols = member.rounding_indices()
        size = cols.numel() // member.state["exp_avg_scale"].shape[-1]
        return rows.reshape(-1, 1) * member.width + cols[::size], cols[:size] - cols[0]
