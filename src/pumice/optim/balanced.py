"""One SinkGD update of a matrix, or of several equal ones: balance the gradient, then descend (arXiv 2502.06742)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pumice.optim.batch import Batch, Calls, Member
from pumice.optim.rounding import stochastic_round, stream_key, uniforms
from pumice.optim.sharding import axis_sum, global_indices, to_local
from pumice.optim.sinkhorn import (
    accumulation_dtype,
    blocked_col_pass,
    blocked_col_product,
    bounded,
    chunked_col_pass,
    chunked_col_product,
    chunked_row_pass,
    chunked_row_product,
    col_pass,
    col_product,
    cols_of,
    iterate,
    power_iteration,
    row_pass,
    row_product,
    row_slices,
    rows_of,
    units,
)

_BLOCKED_FROM = 256  # rows
FIRST_POWER_ITERATIONS = 10  # in the first two updates, as LoRA's A has no gradient in the first; then one from there
STRAY = 0.01  # share of a random vector in that start: it may be orthogonal to all rows of another gradient
MATCH_RMS_ADAMW = 0.2  # RMS of an AdamW update in steady state (arXiv 2502.16982, section 2.2)


def balance_whole(
    gradient: Tensor,
    c: Tensor,
    row_unit: Tensor | None,
    col_unit: Tensor | None,
    keep: Tensor | None,
    kept: Tensor | None,
    blocked: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do one iteration of :func:`pumice.optim.sinkhorn.iterate` on matrices that are not sharded, to be compiled."""
    rows, cols = gradient.shape[-2:]
    passes = row_pass, blocked_col_pass if blocked else col_pass
    return iterate(gradient, c, rows if kept is None else kept, cols, 1, row_unit, col_unit, keep, *passes)


def power_step(gradient: Tensor, r: Tensor, c: Tensor, v: Tensor, blocked: bool) -> tuple[Tensor, Tensor]:
    """Do one :func:`pumice.optim.sinkhorn.power_iteration` on matrices that are not sharded, to be compiled."""
    return power_iteration(gradient, r, c, v, 1, row_product, blocked_col_product if blocked else col_product)


def descend(
    weight: Tensor,
    gradient: Tensor,
    r: Tensor,
    c: Tensor,
    rate: Tensor,
    decay: Tensor,
    row_uniforms: Tensor | None,
    col_uniforms: Tensor | None,
) -> None:
    """W ← decay · W − diag(r) · G · diag(rate · c), in place; rate is (..., 1), or the same for all matrices."""
    # The rate goes with c rather than r, which is 1e-30 for gradients of 1e30.
    step = gradient.to(c.dtype) * r.unsqueeze(-1) * (c * rate).unsqueeze(-2)
    new = weight.to(c.dtype) * decay - step
    if row_uniforms is not None and col_uniforms is not None:
        new = stochastic_round(new, row_uniforms, col_uniforms)
    weight.copy_(new)


def random_vectors(matrices: Tensor, cols: Tensor, key: Tensor) -> Tensor:
    """Return vectors (..., n) of entries in (-1/2, 1/2), none zero, from the numbers of matrices (...) and columns."""
    of_matrix, of_cols = uniforms(matrices, cols, key)
    values = of_matrix.unsqueeze(-1) + of_cols
    return values - values.floor() - 0.5 + 2.0**-20  # which makes none zero


def random_key(member: Member) -> tuple[Tensor, Tensor, Tensor]:
    """Return arguments of :func:`random_vectors`: other vectors for each update, the same on all ranks."""
    cols = global_indices(member.parameter, member.axes[1])
    key = torch.tensor(stream_key(member.group["seed"], member.step, member.number), device=cols.device)
    return member.matrix_numbers(), cols, key


def start_vector(member: Member, cols: int) -> Tensor:
    """Return a random vector (cols,) of length about 1 for the power iteration of packed values; the same on all ranks.

    It is another for each update.
    """
    device = member.weight.device
    key = torch.tensor(stream_key(member.group["seed"], member.step, member.number), device=device)
    numbers = torch.zeros((), dtype=torch.int64, device=device), torch.arange(cols, device=device)
    return random_vectors(*numbers, key) * math.sqrt(12 / cols)


def rate_of(group: Mapping[str, Any], d_out: int, d_in: int) -> float:
    """Return what multiplies X: lr · lr_scale · sign, and what the options put on it."""
    scale = MATCH_RMS_ADAMW if group["lr_scale"] == "match_rms_adamw" else group["lr_scale"]
    rate = float(group["lr"]) * scale * (-1 if group["maximize"] else 1)
    if group["base_width"] is not None:
        rate *= group["base_width"] / d_in
    if group["spectral_target"] is not None:
        rate *= math.sqrt(d_out / d_in) if group["spectral_target"] == "sqrt" else group["spectral_target"]
    return float(rate)


class BalancedBatch(Batch):
    """A SinkGD update."""

    def measure(self) -> Calls[Tensor]:
        """Balance the gradient."""
        return (yield from self._balance(rescale=False))

    def remeasure(self) -> Calls[Tensor]:
        """Balance the gradient with rows and columns first brought near 1, so that no square under- or overflows."""
        return (yield from self._balance(rescale=True))

    @property
    def _whole(self) -> bool:
        """Whether kernels that know nothing of shards do the passes."""
        return self.compile and not isinstance(self.members[0].parameter, DTensor)

    @property
    def _blocked(self) -> bool:
        """Whether a compiled pass over columns goes by blocks of rows."""
        return self.members[0].weight.shape[-2] >= _BLOCKED_FROM

    def _sums(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Return what completes sums over columns and sums over rows."""
        first = self.members[0]
        out_axis, in_axis = first.axes
        return axis_sum(first.parameter, in_axis), axis_sum(first.parameter, out_axis)

    def _balance(self, rescale: bool) -> Calls[Tensor]:
        first, iterations = self.members[0], self.group["sinkhorn_iters"]
        sum_over_cols, sum_over_rows = self._sums()
        gradient = self.gather(member.gradient for member in self.members)
        if self.group["warm_start"]:
            c = self.gather(to_local(member.state["col_scale"]) for member in self.members)
        else:
            dtype = accumulation_dtype(gradient)
            c = torch.ones(*gradient.shape[:-2], gradient.shape[-1], dtype=dtype, device=gradient.device)
        row_unit = col_unit = keep = kept = None
        if rescale:
            row_unit = units(gradient, c, sum_over_cols)
            col_unit = units(gradient.mT, row_unit, sum_over_rows)
        if self.group["negligible_rows"]:
            keep, kept = self._rows_to_keep(gradient)
        rows, cols = (first.parameter.shape[axis] for axis in first.axes)
        self.column_norm = math.sqrt(rows) if kept is None else kept.sqrt()
        flags: Tensor
        if self._whole:
            self.c, flags = c, torch.zeros((), dtype=torch.bool, device=c.device)
            for _ in range(iterations):  # one at a time: a compiled loop would hold the scratch of all
                self.r, self.c, unfit = yield from self.run(
                    balance_whole, gradient, self.c, row_unit, col_unit, keep, kept, self._blocked
                )
                flags = flags | unfit
        else:
            self.r, self.c, flags = iterate(
                gradient,
                c,
                rows if kept is None else kept,
                cols,
                iterations,
                row_unit,
                col_unit,
                keep,
                chunked_row_pass,
                chunked_col_pass,
                sum_over_cols,
                sum_over_rows,
            )
        return flags.view(1) if flags.ndim == 0 else flags.reshape(len(self.members), -1).any(-1)

    def _rows_to_keep(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return which rows are not negligible (..., m), and how many of them are not zero either (..., 1)."""
        sum_over_cols, sum_over_rows = self._sums()
        squares = torch.empty(gradient.shape[:-1], dtype=torch.float64, device=gradient.device)
        for index in row_slices(gradient):
            squares[index] = rows_of(gradient, index).to(torch.float64).square().sum(-1)
        squares = sum_over_cols(squares)
        total, occupied = (
            sum_over_rows(part.sum(-1, keepdim=True, dtype=torch.float64)) for part in (squares, squares > 0)
        )
        keep = squares >= self.group["negligible_rows"] ** 2 * total / occupied.clamp(min=1)
        kept = sum_over_rows((keep & (squares > 0)).sum(-1, keepdim=True, dtype=torch.float64)).clamp(min=1)
        return keep, kept.to(accumulation_dtype(gradient))

    def _update_norm(self, gradient: Tensor) -> Calls[Tensor | None]:
        """Return the operator norms (..., 1) of X, by which it is divided; None if they are left as they are."""
        if self.group["spectral_target"] is None:
            return None
        first = self.members[0]
        d_in = first.parameter.shape[first.axes[1]]
        vectors = [to_local(member.state["right_vector"]) for member in self.members]
        stray = []
        for member in self.members:
            stray.append((yield from self.run(random_vectors, *random_key(member))))
        v = self.gather(vectors) + self.gather(stray) * (STRAY * math.sqrt(12 / max(1, d_in)))
        iterations = FIRST_POWER_ITERATIONS if first.step <= 2 else 1
        sigma: Tensor
        if self._whole:
            for _ in range(iterations):
                sigma, v = yield from self.run(power_step, gradient, self.r, self.c, v, self._blocked)
        else:
            sums = self._sums()
            sigma, v = power_iteration(
                gradient, self.r, self.c, v, iterations, chunked_row_product, chunked_col_product, *sums
            )
        self.scatter(v, vectors)
        # Balanced columns have norm √m, so σ is at least that, however far the power iteration is from its limit.
        return sigma.unsqueeze(-1).clamp(min=self.column_norm)

    def apply(self) -> Calls[None]:
        """Update weights and the state for the next balancing."""
        gradient = self.gather(member.gradient for member in self.members)
        weights = [member.weight for member in self.members]
        weight = self.gather(weights)
        size = yield from self._update_norm(gradient)
        first = self.members[0]
        d_out, d_in = (first.parameter.shape[axis] for axis in first.axes)
        factor = rate_of(self.group, d_out, d_in)
        rate, decay = self.numbers([factor, 1 - float(self.group["lr"]) * self.group["weight_decay"]]).unbind(0)
        rate = rate if size is None else rate / size
        row_random, col_random = yield from self.uniforms()
        if self.compile:
            yield from self.run(descend, weight, gradient, self.r, self.c, rate, decay, row_random, col_random)
        else:
            for index in row_slices(weight):
                descend(
                    rows_of(weight, index),
                    rows_of(gradient, index),
                    self.r[index],
                    cols_of(self.c, index),
                    rate if size is None else cols_of(rate, index),
                    decay,
                    row_random if row_random is None else row_random[index],
                    col_random if col_random is None else cols_of(col_random, index),
                )
        self.scatter(weight, weights)
        if self.group["warm_start"]:
            self.scatter(bounded(self.c), (to_local(member.state["col_scale"]) for member in self.members))
        for member in self.members:
            member.state["step"] += 1
