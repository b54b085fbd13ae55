"""SinkGD: stateless updates from the balanced gradient (arXiv 2502.06742), and AdamW for what is not balanced."""

import math
import warnings
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from pumice.optim.adamw import AdamW8bitBatch, AdamWBatch, moment
from pumice.optim.balanced import BalancedBatch, random_key, random_vectors, start_vector
from pumice.optim.base import MatrixOptimizer, check_flag, check_number, check_whole
from pumice.optim.batch import Batch, Member
from pumice.optim.groups import param_groups
from pumice.optim.packed import PackedBalancedBatch
from pumice.optim.sharding import vector_like
from pumice.optim.sinkhorn import accumulation_dtype
from pumice.sparse.linear import BlockSparseLinear


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
        warmup_steps: for packed values, updates over which the rate of a block rises from its birth, at least 0.
        density_scaling: for packed values, a factor on the rate: density^(-1/2) (``"sqrt"``), 1/density
            (``"linear"``) or ``"none"``.
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
        warmup_steps: int = 0,
        density_scaling: str = "none",
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
            "warmup_steps": warmup_steps,
            "density_scaling": density_scaling,
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
        if not self._balances(parameter, group):
            member.transposed = False  # AdamW knows no rows and columns
            for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                if key not in state:
                    state.update(moment(parameter, key, group["state_bits"], signed))
            return AdamW8bitBatch if "exp_avg_scale" in state else AdamWBatch
        if member.packed:
            return self._prepare_packed(member)
        if group["warm_start"] and "col_scale" not in state:
            state["col_scale"] = vector_like(self._row_of_ones(member), parameter, member.axes[1])
        if group["spectral_target"] is not None and "right_vector" not in state:
            v = random_vectors(*random_key(member)).to(accumulation_dtype(member.weight))
            v *= math.sqrt(12 / max(1, parameter.shape[member.axes[1]]))  # length about 1
            state["right_vector"] = vector_like(v, parameter, member.axes[1])
        return BalancedBatch

    @staticmethod
    def _prepare_packed(member: Member) -> type[Batch]:
        state, group, layer = member.state, member.group, member.layer
        assert layer is not None
        cols = layer.grid.grid_cols * layer.grid.block_cols
        dtype, device = accumulation_dtype(member.weight), member.weight.device
        if group["warm_start"] and "col_scale" not in state:
            state["col_scale"] = torch.ones(cols, dtype=dtype, device=device)
        if group["spectral_target"] is not None and "right_vector" not in state:
            state["right_vector"] = start_vector(member, cols).to(dtype)
        return PackedBalancedBatch

    def _check_layers(self, group: dict[str, Any], layers: list[BlockSparseLinear]) -> None:
        super()._check_layers(group, layers)
        if layers and group["rule"] != "sinkgd":
            raise ValueError(f"a group that names layers is for rule 'sinkgd', got rule '{group['rule']}'")
        if layers and group["negligible_rows"]:
            raise ValueError("negligible_rows is not for packed values, whose rows are sparse anyway; leave it at 0")

    @staticmethod
    def _row_of_ones(member: Member) -> Tensor:
        weight = member.weight
        return torch.ones(*weight.shape[:-2], weight.shape[-1], dtype=accumulation_dtype(weight), device=weight.device)
