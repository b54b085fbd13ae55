"""Bytes of a training step before anything is allocated.

:func:`plan` combines what a traced step says (:mod:`pumice.memory.trace`): the weights and the optimizer's state are
there throughout; activations, logits and gradients come and go in a known order. The peak is the largest sum on the
way, with gradients kept until the optimizer's step or, if they are released, freed as soon as they are whole.
"""

from dataclasses import dataclass
from typing import Literal

from pumice.errors import UserError
from pumice.memory.ledger import CATEGORIES
from pumice.memory.trace import Stored, Timeline

_BUCKET = 25 << 20  # bytes that DistributedDataParallel reduces at a time


@dataclass(frozen=True)
class Sharding:
    """How the training is spread over devices.

    Args:
        devices: Their number.
        kind: ``"ddp"``: each holds everything; ``"fsdp"``: each holds its part of weights, gradients and state, and the
            weights of a layer are gathered while it runs.

    Raises:
        UserError: A wrong number, or a kind that does not exist.
    """

    devices: int = 1
    kind: Literal["ddp", "fsdp"] = "fsdp"

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise UserError(f"the number of devices must be at least 1, got {self.devices}")
        if self.kind not in ("ddp", "fsdp"):
            raise UserError(f"sharding must be 'ddp' or 'fsdp', got '{self.kind}'")


@dataclass(frozen=True)
class Plan:
    """The peak of a step on one device.

    Attributes:
        peak_bytes: Bytes of all tensors at the moment of the peak.
        moment: ``"forward"``, ``"loss"``, ``"backward"`` or ``"optimizer step"``.
        breakdown_bytes: The peak by category.
    """

    peak_bytes: int
    moment: str
    breakdown_bytes: dict[str, int]


def plan(timeline: Timeline, stored: Stored, *, release: bool = False, sharding: Sharding | None = None) -> Plan:
    """Return the peak of a training step, in steady state.

    Args:
        timeline: Of forward and backward, from :func:`pumice.memory.trace.record`.
        stored: Of weights and optimizer, from :func:`pumice.memory.trace.stored`.
        release: Whether gradients are released in the backward pass.
        sharding: Over which devices, if several.

    Raises:
        UserError: Release with several devices.
    """
    sharding = sharding or Sharding()
    if release and sharding.devices > 1:
        raise UserError(
            f"gradient release works on one device, got {sharding.devices}: leave it out, or plan for one device"
        )
    parts = sharding.devices if sharding.kind == "fsdp" else 1
    now = dict.fromkeys(CATEGORIES, 0)
    now["weights"], now["optimizer_state"] = stored.weights // parts, stored.state // parts
    if sharding.devices > 1:  # gathered weights of two layers and one layer's gradient; or what is being reduced
        now["transient"] = 3 * stored.layer if parts > 1 else stored.gradients + _BUCKET
    best, moment = dict(now), "forward"

    def check(phase: str, more: int = 0) -> None:
        nonlocal best, moment
        if sum(now.values()) + more > sum(best.values()):
            best, moment = {**now, "transient": now["transient"] + more}, phase

    for phase, events in timeline.phases:
        for event in events:
            if event.becomes is None:
                now[event.category] += event.size
                check(phase)
                continue
            now[event.category] -= event.size
            now["gradients"] += event.size
            if release:
                check(phase, stored.updates[event.name])
                now["gradients"] -= event.size
            elif parts > 1:
                now["gradients"] -= event.size - event.size // parts
    check("optimizer step", 0 if release else stored.step // parts)
    return Plan(sum(best.values()), moment, best)
