r"""SMET: AdamW in which every block of a block-sparse layer has its own age (arXiv 2606.00888).

With W warm-up steps and density d of the layer, an update of a block of age t is

    w ← (1 − lr·wd) w
    t ← t + 1        m ← β1 m + (1−β1) g        v ← β2 v + (1−β2) g²
    w ← w − lr · ramp · d^x · m / (1−β1^t) / (√(v / (1−β2^t)) + ε)        ramp = min(1, t/W), 1 if W = 0

A block that grows starts from w = m = v = 0 and t = 0. Bias correction thus starts afresh, which is an implicit
warm-up: with AdamW's global count of updates the first one would be (1−β1)/√(1−β2) times too large, 3.16 for the usual
betas. The ramp is an explicit warm-up; it multiplies the learning rate and is not folded into m. x is −1/2, −1 or 0.

The age is read from the ``birth`` of the layer's slots, in which the topology notes its clock. A parameter's own count
of updates may differ from that clock (a layer without gradient does not count, and a topology may be newer or older
than the optimizer), so the difference, as it was when blocks last grew, is part of the parameter's state as ``lag``. No
block is older than the parameter's moments.
"""

import math
import warnings
from typing import Any, Self

from torch import Tensor, nn

from pumice.optim.adamw import AdamW8bitBatch, AdamWBatch, moment
from pumice.optim.base import MatrixOptimizer
from pumice.optim.batch import Batch, Member
from pumice.optim.quantised import zero_code
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.sharding import fill_slots


class PackedBatch(AdamWBatch):
    """An update of packed values with moments in 32 bits."""

    stackable = False

    def _rates(self, lr: float, beta1: float, beta2: float) -> list[float]:
        (member,) = self.members
        warmup = self.group["warmup_steps"]
        logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
        return [lr * member.density_factor, *logs, 1 / warmup if warmup else math.inf]

    def _ages(self) -> Tensor:
        (member,) = self.members
        return member.ages


class Packed8bitBatch(PackedBatch, AdamW8bitBatch):
    """An update of packed values with moments in 8 bits."""


class SMET(MatrixOptimizer):
    r"""AdamW for block-sparse models: each block of a packed parameter warms up from its own birth.

    Equations: :mod:`pumice.optim.smet`. With d = 1 and W = 0 it is torch.optim.AdamW. Parameters that are not packed
    are trained by AdamW as such.

    Args:
        params: parameters, named parameters, or groups of either. A group of ``values`` of block-sparse layers names
            the layers, in the same order, as ``layers``: :meth:`from_model` makes such groups. Without them, all blocks
            of a parameter have the age of the parameter.
        lr: learning rate, at least 0; a float or a 0-d tensor, on the CPU for speed.
        warmup_steps: W, updates over which the learning rate of a block rises to its full value, at least 0; also for
            the blocks that are there at the start.
        density_scaling: x of the factor d^x on the learning rate of packed parameters: ``"sqrt"`` (the paper's) is
            −1/2, ``"linear"`` −1 and ``"none"`` 0.
        weight_decay: decoupled, at least 0, by lr without any factor; not for parameters of fewer than two dimensions.
        betas: each in [0, 1).
        eps: positive.
        state_bits: 8 or 32: storage of the moments. Slots of fewer than 16 entries keep 32.
        stochastic_rounding: round bfloat16 weights stochastically; see :mod:`pumice.optim.rounding`.
        nonfinite: ``"error"`` raises and names the parameter before anything has changed; ``"skip"`` leaves that
            parameter out of the update, warns, and counts it in ``skipped``.
        seed: whole number of at least 0, of stochastic rounding.
        maximize: ascend instead of descend.
        compile: use torch.compile. None: if there are at least 8 million parameters and a compiler works.

    Raises:
        ValueError: an option is out of range.
        TypeError: an option has the wrong type, or a parameter is complex.

    Source: arXiv 2606.00888.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        *,
        warmup_steps: int = 50,
        density_scaling: str = "sqrt",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        state_bits: int = 32,
        stochastic_rounding: bool = True,
        nonfinite: str = "error",
        seed: int = 0,
        maximize: bool = False,
        compile: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "density_scaling": density_scaling,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "state_bits": state_bits,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "maximize": maximize,
            "rule": "adamw",
        }
        super().__init__(params, defaults, nonfinite=nonfinite, compile=compile)

    @classmethod
    def from_model(cls, model: nn.Module, lr: float | Tensor = 1e-3, **options: Any) -> Self:
        """Make the optimizer for a model with block-sparse layers, or without any.

        Args:
            model: any module, before or after sharding.
            lr: learning rate.
            options: further options of the class.
        """
        layers = {
            f"{name}.values" if name else "values": module
            for name, module in model.named_modules()
            if isinstance(module, BlockSparseLinear)
        }
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        packed = [pair for pair in trained if pair[0] in layers]
        groups: list[dict[str, Any]] = [
            {"params": packed, "layers": [layers[name] for name, _ in packed], "rule": "smet"},
            {"params": [pair for pair in trained if pair[0] not in layers], "rule": "adamw"},
        ]
        return cls([group for group in groups if group["params"]], lr, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, its options, parameters and layers checked."""
        super().add_param_group(param_group)
        if "rule" not in param_group and (unknown := sum(p.ndim == 3 for p in self.param_groups[-1]["params"])):
            warnings.warn(
                f"SMET does not know the layers of {unknown} parameters of three dimensions and trains them by AdamW; "
                "if they are values of block-sparse layers, use SMET.from_model(model, lr)",
                stacklevel=4,
            )

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["rule"] not in ("smet", "adamw"):
            raise ValueError(f"rule must be 'smet' or 'adamw', got {group['rule']!r}")

    def _check_layers(self, group: dict[str, Any], layers: list[BlockSparseLinear]) -> None:
        super()._check_layers(group, layers)
        if (group["rule"] == "smet") != bool(layers):
            raise ValueError(
                f"a group has layers if and only if its rule is 'smet', got {len(layers)} layers with rule "
                f"'{group['rule']}'; SMET.from_model makes such groups"
            )

    def _prepare(self, member: Member) -> type[Batch]:
        state, parameter = member.state, member.parameter
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if key not in state:
                state.update(moment(parameter, key, member.group["state_bits"], signed, member.packed))
        if "exp_avg_scale" in state:
            return Packed8bitBatch if member.packed else AdamW8bitBatch
        return PackedBatch if member.packed else AdamWBatch

    def _forget(self, state: dict[str, Any], slots: Tensor) -> None:
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            quantised = f"{key}_scale" in state
            fill_slots(state[key], slots, zero_code(signed) if quantised else 0)
            if quantised:
                fill_slots(state[f"{key}_scale"], slots)
