"""Dynamic sparse training of the small models: the methods, and what is recorded of each topology update."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from study import EMBEDDINGS, Bench
from torch import Tensor, nn
from torch.optim import Optimizer

from pumice.optim import SMET
from pumice.optim.adamw import AdamWBatch
from pumice.optim.batch import Batch, Member
from pumice.optim.smet import PackedBatch
from pumice.sparse import NewbornProbe, Topology

PROBE_WINDOWS = 16  # validation windows of which the jumps are measured


class _RampBatch(PackedBatch):
    """An update whose bias correction counts all updates, as AdamW's, while its ramp goes by the age of a block."""

    def _rates(self, lr: float, beta1: float, beta2: float) -> list[float]:
        rate, *_, per_warmup = super()._rates(lr, beta1, beta2)
        t = self.members[0].step
        return [rate * math.sqrt(1 - beta2**t) / (1 - beta1**t), -math.inf, -math.inf, per_warmup]


class RampOnly(SMET):
    """SMET without its implicit warm-up; ε counts before the bias correction of v."""

    def _prepare(self, member: Member) -> type[Batch]:
        super()._prepare(member)
        return _RampBatch if member.packed else AdamWBatch


def optimizer(model: nn.Module, spec: Mapping[str, Any], state: Mapping[str, Mapping[str, Tensor]]) -> Optimizer:
    """Make the optimizer of a run.

    Args:
        model: sparse or not.
        spec: "optimizer" is "adamw" (one count of updates for all blocks), "smet" or "ramp"; "lr", "embedding_lr",
            "betas", and for the latter two "warmup_steps" and "density_scaling".
        state: moments and step by parameter name to go on from; empty: none.
    """
    named = dict(model.named_parameters())
    apart = {name: p for name, p in named.items() if re.search(EMBEDDINGS, name)}
    made: Optimizer
    betas = (spec["betas"][0], spec["betas"][1])
    if spec["optimizer"] == "adamw":
        groups = [
            {"params": [pair for pair in named.items() if pair[0] not in apart]},
            {"params": list(apart.items()), "lr": spec["embedding_lr"]},
        ]
        made = torch.optim.AdamW(groups, spec["lr"], betas=betas, weight_decay=0.0, fused=True)
    else:
        kind = SMET if spec["optimizer"] == "smet" else RampOnly
        options = {key: spec[key] for key in ("warmup_steps", "density_scaling", "state_bits") if key in spec}
        for parameter in apart.values():
            parameter.requires_grad_(False)  # so that they are left out here, and get a group of their own
        made = kind.from_model(model, spec["lr"], betas=betas, compile=False, **options)
        for parameter in apart.values():
            parameter.requires_grad_(True)
        made.add_param_group({"params": list(apart.items()), "lr": spec["embedding_lr"]})
    for name, values in state.items():
        made.state[named[name]] = {key: value.clone() for key, value in values.items()}
    return made


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return copies of an optimizer's state."""
    return {
        name: {key: value.clone() for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }


@dataclass
class Watch:
    """Changes the topology, and measures the loss on fixed windows around each update and half-way between them.

    A jump is the larger of the losses after the next two steps, minus the loss at the moment: after a topology update,
    or at a step without one. ``dropped`` is what the update itself costs.
    """

    bench: Bench
    topology: Topology | None
    interval: int
    jumps: list[float] = field(default_factory=list)
    usual: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    ratios: list[list[float]] = field(default_factory=list)
    survival: dict[str, list[float]] = field(default_factory=dict)
    ever_active: float | None = None
    _base: tuple[list[float], float] | None = None
    _after: list[float] = field(default_factory=list)
    _probe: NewbornProbe | None = None

    def __post_init__(self) -> None:
        if self.topology is not None:
            self._probe = NewbornProbe(self.topology)

    def before(self, step: int, optimizer: Optimizer) -> None:
        """Come before an update."""
        if self._probe is not None:
            self._probe.before_step()

    def after(self, step: int, optimizer: Optimizer) -> None:
        """Come after an update: the clock ticks."""
        if self._probe is not None and self.topology is not None:
            since = self.topology.steps - self.topology.updated_at
            if (ratio := self._probe.after_step()) is not None:
                self.ratios[since : since + 1] = [[*(self.ratios[since] if since < len(self.ratios) else []), ratio]]
        taken = step + 1
        due = taken % self.interval == 0
        if self._base is not None:
            self._after.append(self._loss())
            if len(self._after) == 2:
                self._base[0].append(max(self._after) - self._base[1])
                self._base = None
        before = self._loss() if due and self.topology is not None else 0.0
        update = self.topology.step(optimizer) if self.topology is not None else None
        if update is not None:
            at = self._loss()
            self.dropped.append(at - before)
            self._base, self._after = (self.jumps, at), []
            for name, value in update.metrics().items():
                if name.startswith("survival"):
                    self.survival.setdefault(name, []).append(value)
                elif name == "ever_active":
                    self.ever_active = value
        elif taken % self.interval == self.interval // 2:
            self._base, self._after = (self.usual, self._loss()), []

    def _loss(self) -> float:
        return self.bench.validate(PROBE_WINDOWS)

    def values(self) -> dict[str, Any]:
        """Return what was measured."""
        return {
            "jumps": self.jumps,
            "usual_jumps": self.usual,
            "dropped": self.dropped,
            "newborn_ratio": [fmean(at_age) for at_age in self.ratios],
            "survival": {name: fmean(found) for name, found in self.survival.items()},
            "ever_active": self.ever_active,
        }
