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

import torch
from torch import Tensor, nn

from pumice.optim.adamw import AdamW8bitBatch, AdamWBatch, moment
from pumice.optim.base import MatrixOptimizer, check_whole
from pumice.optim.batch import Batch, Member
from pumice.optim.quantised import zero_code
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.sharding import fill_slots, local_slots

DENSITY_EXPONENTS = {"sqrt": -0.5, "linear": -1.0, "none": 0.0}


class PackedBatch(AdamWBatch):
    """An update of packed values with moments in 32 bits."""

    stackable = False

    @property
    def _layer(self) -> BlockSparseLinear:
        (member,) = self.members
        assert member.layer is not None
        return member.layer

    def _rates(self, lr: float, beta1: float, beta2: float) -> list[float]:
        warmup = self.group["warmup_steps"]
        factor = self._layer.density ** DENSITY_EXPONENTS[self.group["density_scaling"]]
        logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
        return [lr * factor, *logs, 1 / warmup if warmup else math.inf]

    def _ages(self) -> Tensor:
        (member,) = self.members
        birth = self._layer.birth[local_slots(member.parameter)]
        ages = member.step + int(member.state["lag"]) - birth
        return torch.where(birth > 0, ages, member.step).clamp(1, member.step).float()


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
        self._layers: dict[int, BlockSparseLinear] = {}  # by position: parameters are swapped when they are sharded
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
        """Add a group as torch does, its options and parameters checked."""
        param_group = dict(param_group)
        layers = list(param_group.pop("layers", []))
        first = sum(len(group["params"]) for group in self.param_groups)
        bare = "rule" not in param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if bare and (unknown := sum(p.ndim == 3 for p in group["params"])):
            warnings.warn(
                f"SMET does not know the layers of {unknown} parameters of three dimensions and trains them by AdamW; "
                "if they are values of block-sparse layers, use SMET.from_model(model, lr)",
                stacklevel=4,
            )
        if (group["rule"] == "smet") != bool(layers) or (layers and len(layers) != len(group["params"])):
            self.param_groups.pop()
            raise ValueError(
                f"a group with rule 'smet' must name a layer for each of its {len(group['params'])} parameters, "
                f"got {len(layers)} layers with rule '{group['rule']}'; SMET.from_model makes such groups"
            )
        self._layers.update(enumerate(layers, first))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layers": self._layers}

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_whole("warmup_steps", group["warmup_steps"], 0)
        if group["density_scaling"] not in DENSITY_EXPONENTS:
            raise ValueError(f"density_scaling must be 'sqrt', 'linear' or 'none', got {group['density_scaling']!r}")
        if group["rule"] not in ("smet", "adamw"):
            raise ValueError(f"rule must be 'smet' or 'adamw', got {group['rule']!r}")

    def _prepare(self, member: Member) -> type[Batch]:
        state, parameter = member.state, member.parameter
        member.layer = self._layers.get(member.number)
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        if member.layer is not None and "lag" not in state:  # to new moments, all blocks are of one age
            birth = member.layer.birth
            state["lag"] = torch.tensor(0.0 if birth.is_meta else float(birth.max()), dtype=torch.float32)
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if key not in state:
                state.update(moment(parameter, key, member.group["state_bits"], signed, member.packed))
        if "exp_avg_scale" in state:
            return Packed8bitBatch if member.packed else AdamW8bitBatch
        return PackedBatch if member.packed else AdamWBatch

    @torch.no_grad()
    def reset_slots(self, parameter: Tensor, slots: Tensor) -> None:
        """Forget the moments of slots that have got another block; a topology calls it when it changes.

        Args:
            parameter: ``values`` of a layer, as it stands in a parameter group.
            slots: int64: numbers of slots of the whole parameter, whose births in the layer are set already.

        Raises:
            ValueError: the optimizer does not know the layer of ``parameter``.
        """
        members = {id(p): i for i, p in enumerate(p for group in self.param_groups for p in group["params"])}
        layer = self._layers.get(members.get(id(parameter), -1))
        if layer is None:
            raise ValueError("SMET does not know the layer of these values; make it with SMET.from_model(model, lr)")
        state = self.state.get(parameter, {})
        if not state or not slots.numel():
            return
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            quantised = f"{key}_scale" in state
            fill_slots(state[key], slots, zero_code(signed) if quantised else 0)
            if quantised:
                fill_slots(state[f"{key}_scale"], slots)
        state["lag"].fill_(int(layer.birth[slots[0]]) - int(state["step"]))
