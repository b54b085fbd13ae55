"""SinkGD: stateless updates from the balanced gradient (arXiv 2502.06742), and AdamW for what is not balanced."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pumice.optim.adamw import AdamW8bitBatch, AdamWBatch, moment
from pumice.optim.base import MatrixOptimizer, check_flag, check_number, check_whole
from pumice.optim.batch import Batch, Calls, Member
from pumice.optim.groups import param_groups
from pumice.optim.rounding import stochastic_round, stream_key, uniforms
from pumice.optim.sharding import axis_sum, global_indices, to_local, vector_like
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
_FIRST_POWER_ITERATIONS = 10  # in the first two updates, as LoRA's A has no gradient in the first; then one from there
_STRAY = 0.01  # share of a random vector in that start: it may be orthogonal to all rows of another gradient
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

    def _rate(self) -> float:
        """Return what multiplies X: lr · lr_scale · sign, and what the options put on it."""
        first, group = self.members[0], self.group
        d_out, d_in = (first.parameter.shape[axis] for axis in first.axes)
        scale = MATCH_RMS_ADAMW if group["lr_scale"] == "match_rms_adamw" else group["lr_scale"]
        rate = float(group["lr"]) * scale * (-1 if group["maximize"] else 1)
        if group["base_width"] is not None:
            rate *= group["base_width"] / d_in
        if group["spectral_target"] is not None:
            rate *= math.sqrt(d_out / d_in) if group["spectral_target"] == "sqrt" else group["spectral_target"]
        return rate

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
        v = self.gather(vectors) + self.gather(stray) * (_STRAY * math.sqrt(12 / max(1, d_in)))
        iterations = _FIRST_POWER_ITERATIONS if first.step <= 2 else 1
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
        rate, decay = self.numbers([self._rate(), 1 - float(self.group["lr"]) * self.group["weight_decay"]]).unbind(0)
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


class SinkGD(MatrixOptimizer):
    r"""SinkGD: matrices move by their balanced gradient and keep no moments; the rest is trained by AdamW.

    For a matrix W (m, n) with gradient G, ``sinkhorn_iters`` iterations of SR-Sinkhorn give X, the gradient with its
    rows brought to L2 norm √n and its columns to √m, so that its entries have RMS 1, and

        W ← (1 − lr · weight_decay) · W − lr · lr_scale · X

    X does not depend on the scale of G: clipping, loss scaling and averaging change nothing for these matrices.

    Args:
        params: parameters, named parameters, or groups of either. A group may set ``rule`` (``"sinkgd"``,
            ``"adamw"``, or ``"auto"``: by number of dimensions) and ``transposed`` (matrices are stored [in, out])
            beside every option below; :func:`pumice.optim.param_groups` makes such groups, and :meth:`from_model` does
            it all. Without groups everything with two or more dimensions is balanced, embeddings included, with a
            warning.
        lr: learning rate, at least 0; a float or a 0-d tensor, on the CPU for speed. Used unscaled for the AdamW part
            and for weight decay.
        lr_scale: factor on lr for balanced matrices (paper: 0.05 with lr 0.02), or ``"match_rms_adamw"``: 0.2, so that
            an update has the RMS that AdamW's usually has and its learning rate can be kept.
        sinkhorn_iters: L, iterations per update, at least 1 (paper: 5, without warm start).
        warm_start: start from the column scales of the previous update instead of ones. Costs n float32 per matrix.
        weight_decay: decoupled, at least 0; not for parameters of fewer than two dimensions.
        betas: of the AdamW part, each in [0, 1).
        eps: of the AdamW part, positive.
        state_bits: 8 or 32: storage of the AdamW part's moments.
        stochastic_rounding: round bfloat16 weights stochastically; see :mod:`pumice.optim.rounding`.
        spectral_target: operator norm of the update before lr and lr_scale: a positive number, or ``"sqrt"`` for
            √(d_out / d_in); None leaves it as it is. Two more passes over the gradient, n float32 of state per matrix.
            The norm is estimated from below, by one power iteration that continues from the update before: the result
            is up to 3 % too large if the leading directions of gradients persist, up to 60 % if gradients are noise.
        negligible_rows: leave rows out of balancing whose norm is below this share of the RMS norm of the rows that
            are not zero, in [0, 1). For embeddings and output heads, most of whose rows belong to tokens that a batch
            hardly concerns; an extra pass over the gradient.
        base_width: multiply the rate of balanced matrices by base_width / d_in; None does not.
        nonfinite: ``"error"`` raises and names the parameter before anything has changed; ``"skip"`` leaves that
            parameter out of the update, warns, and counts it in ``skipped``.
        seed: whole number of at least 0, of stochastic rounding and the start of power iterations.
        maximize: ascend instead of descend.
        compile: use torch.compile. None: if there are at least 8 million parameters and a compiler works.

    Raises:
        ValueError: an option is out of range.
        TypeError: an option has the wrong type, or a parameter is complex.

    Source: arXiv 2502.06742. Weight decay as in torch.optim.Muon.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        lr_scale: float | str = 0.05,
        sinkhorn_iters: int = 1,
        warm_start: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        state_bits: int = 8,
        stochastic_rounding: bool = True,
        spectral_target: float | str | None = None,
        negligible_rows: float = 0.0,
        base_width: int | None = None,
        nonfinite: str = "error",
        seed: int = 0,
        maximize: bool = False,
        compile: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_scale": lr_scale,
            "sinkhorn_iters": sinkhorn_iters,
            "warm_start": warm_start,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "state_bits": state_bits,
            "stochastic_rounding": stochastic_rounding,
            "spectral_target": spectral_target,
            "negligible_rows": negligible_rows,
            "base_width": base_width,
            "seed": seed,
            "maximize": maximize,
            "rule": "auto",
            "transposed": False,
        }
        super().__init__(params, defaults, nonfinite=nonfinite, compile=compile)
        matrices = sum(p.ndim >= 2 for g in self.param_groups if g["rule"] == "auto" for p in g["params"])
        if matrices:
            warnings.warn(
                f"SinkGD balances all {matrices} parameters of two or more dimensions, embeddings and output heads "
                "included; use SinkGD.from_model(model, lr) to leave those to AdamW",
                stacklevel=2,
            )

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.0,
        adamw_lr: float | None = None,
        overrides: Mapping[str, str] | None = None,
        embeddings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Make the optimizer for a model, each parameter under the rule that fits its module.

        Args:
            model: any module; see :mod:`pumice.optim.groups` for what is balanced.
            lr: learning rate.
            weight_decay: see the class.
            adamw_lr: learning rate of the AdamW part, as the lr of its groups; None: ``lr``.
            overrides: regular expressions on parameter names to rules; see :func:`pumice.optim.param_groups`.
            embeddings: options of the class with which to balance embeddings and output heads, which then keep no
                moments either, for example ``{"lr_scale": 0.025, "negligible_rows": 0.1}``; None: AdamW trains them.
            options: further options of the class.
        """
        groups = param_groups(model, weight_decay, overrides, embeddings)
        if adamw_lr is not None:
            check_number("adamw_lr", adamw_lr, 0)
            for group in (group for group in groups if group["rule"] == "adamw"):
                group["lr"] = adamw_lr
        return cls(groups, lr, weight_decay=weight_decay, **options)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if isinstance(group["lr_scale"], str) and group["lr_scale"] != "match_rms_adamw":
            raise ValueError(f"lr_scale must be a number or 'match_rms_adamw', got {group['lr_scale']!r}")
        if group["lr_scale"] != "match_rms_adamw":
            check_number("lr_scale", group["lr_scale"], 0, open_low=True)
        check_whole("sinkhorn_iters", group["sinkhorn_iters"], 1)
        target = group["spectral_target"]
        if isinstance(target, str) and target != "sqrt":
            raise ValueError(f"spectral_target must be a positive number, 'sqrt' or None, got {target!r}")
        if target is not None and target != "sqrt":
            check_number("spectral_target", target, 0, open_low=True)
        check_number("negligible_rows", group["negligible_rows"], 0, 1)
        if group["base_width"] is not None:
            check_number("base_width", group["base_width"], 0, open_low=True)
        for name in ("warm_start", "transposed"):
            check_flag(name, group[name])
        if group["rule"] not in ("auto", "sinkgd", "adamw"):
            raise ValueError(f"rule must be 'sinkgd', 'adamw' or 'auto', got {group['rule']!r}")

    def _check_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        super()._check_parameter(parameter, group)
        if group["rule"] == "sinkgd" and parameter.ndim < 2:
            raise ValueError(f"rule 'sinkgd' needs two dimensions, got a parameter of shape {tuple(parameter.shape)}")

    @staticmethod
    def _balances(parameter: Tensor, group: dict[str, Any]) -> bool:
        return group["rule"] == "sinkgd" or (group["rule"] == "auto" and parameter.ndim >= 2)

    def _prepare(self, member: Member) -> type[Batch]:
        state, group, parameter = member.state, member.group, member.parameter
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        if not self._balances(parameter, group):
            member.transposed = False  # AdamW knows no rows and columns
            for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                if key not in state:
                    state.update(moment(parameter, key, group["state_bits"], signed))
            return AdamW8bitBatch if "exp_avg_scale" in state else AdamWBatch
        if group["warm_start"] and "col_scale" not in state:
            state["col_scale"] = vector_like(self._row_of_ones(member), parameter, member.axes[1])
        if group["spectral_target"] is not None and "right_vector" not in state:
            v = random_vectors(*random_key(member)).to(accumulation_dtype(member.weight))
            v *= math.sqrt(12 / max(1, parameter.shape[member.axes[1]]))  # length about 1
            state["right_vector"] = vector_like(v, parameter, member.axes[1])
        return BalancedBatch

    @staticmethod
    def _row_of_ones(member: Member) -> Tensor:
        weight = member.weight
        return torch.ones(*weight.shape[:-2], weight.shape[-1], dtype=accumulation_dtype(weight), device=weight.device)
