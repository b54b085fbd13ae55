"""What topology updates do to training: jumps of the loss, and how far newborn blocks move beside mature ones."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pumice.sparse.layout import real_entries
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.sharding import local_slots, summed
from pumice.sparse.topology import Topology


@dataclass(frozen=True)
class Spike:
    """The jump of the loss at one topology update.

    Attributes:
        step: Optimizer steps taken at the update.
        height: Largest loss of the next two steps minus that of the update's own step.
        usual: Mean of such jumps between updates.
        noise: Their standard deviation.
    """

    step: int
    height: float
    usual: float
    noise: float

    def metrics(self) -> dict[str, float]:
        """``spike_height`` and, in standard deviations above the usual jump, ``spike_deviations``."""
        above = (self.height - self.usual) / self.noise if self.noise else 0.0
        return {"spike_height": self.height, "spike_deviations": above}


class Spikes:
    """Compares the jumps of the training loss at topology updates with those in between.

    Args:
        memory: How many of the latest jumps between updates make up the noise.
    """

    AHEAD = 2

    def __init__(self, memory: int = 200) -> None:
        self._recent: deque[tuple[int, float, bool]] = deque(maxlen=self.AHEAD + 1)
        self._quiet: deque[float] = deque(maxlen=memory)

    def see(self, step: int, loss: float, updated: bool) -> Spike | None:
        """Take in one step.

        Args:
            step: Optimizer steps taken, this one included.
            loss: Of this step's batch, before its update.
            updated: Whether the topology changed after it.

        Returns:
            The jump at the update two steps ago, if there was one and if there are jumps to compare it with.
        """
        self._recent.append((step, loss, updated))
        if len(self._recent) <= self.AHEAD:
            return None
        (then, before, was_update), *after = self._recent
        height = max(value for _, value, _ in after) - before
        if was_update:
            known = len(self._quiet) > 1
            return Spike(then, height, fmean(self._quiet), pstdev(self._quiet)) if known else None
        if not any(changed for _, _, changed in after[:-1]):
            self._quiet.append(height)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Losses and jumps, as numbers."""
        return {"recent": [list(entry) for entry in self._recent], "quiet": list(self._quiet)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self._recent.clear()
        self._recent.extend((int(step), float(loss), bool(updated)) for step, loss, updated in state["recent"])
        self._quiet.clear()
        self._quiet.extend(state["quiet"])


class NewbornProbe:
    """Measures the RMS of updates to newborn weights over that of updates to the others, after a topology update.

    Without warm-up this is where the instability starts: it is 1 if newborn blocks move as others do. A sample of slots
    is copied before the optimizer's step and compared after it.

    Args:
        topology: Whose layers and clock to follow.
        steps: For how many optimizer steps after each topology update.
        sample: Slots to copy at most of each layer, as many newborn ones as others.
    """

    def __init__(self, topology: Topology, steps: int = 5, sample: int = 4096) -> None:
        self._topology, self._steps, self._sample = topology, steps, sample
        self._copies: list[tuple[int, BlockSparseLinear, Tensor, Tensor]] = []  # 0 for newborn slots, 1 for others

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy the sample, if a topology update was not long ago."""
        topology = self._topology
        self._copies = []
        if not topology.updated_at or topology.steps - topology.updated_at >= self._steps:
            return
        for layer in topology.layers.values():
            here = local_slots(layer.values)
            birth = layer.birth[here]
            newborn = birth == topology.updated_at
            for kind, chosen in enumerate((newborn, ~newborn & (layer.ids[here] < layer.grid.blocks))):
                slots = chosen.nonzero().flatten()
                stride = -(-len(slots) // (self._sample // 2)) or 1
                slots = slots[::stride]
                self._copies.append((kind, layer, slots, _local(layer.values)[slots].clone()))

    @torch.no_grad()
    def after_step(self) -> float | None:
        """Return the ratio of the two RMS; None if nothing was copied or one of them has no weights."""
        if not self._copies:
            return None
        sums = torch.zeros(2, 2, dtype=torch.float64)  # of squares and entries, of newborn and of other weights
        for kind, layer, slots, copied in self._copies:
            moved = (_local(layer.values)[slots] - copied).to(torch.float64).square().sum()
            entries = real_entries(layer.ids[local_slots(layer.values)][slots].long(), layer.grid).sum()
            sums[kind] += torch.stack((moved, entries.to(torch.float64))).cpu()
        self._copies = []
        (new, new_entries), (old, old_entries) = summed(sums.to(layer.values.device)).tolist()
        if not new_entries or not old_entries or not old:
            return None
        return float((new / new_entries / (old / old_entries)) ** 0.5)


class Monitor:
    """Ticks a topology, and tells of each of its updates what it did to training.

    Call :meth:`before_step` before the optimizer's step and :meth:`step` after it, in place of ``topology.step``.

    Args:
        topology: The topology.

    Attributes:
        windows: Of each update, the losses of the steps from ``BEFORE`` before it to ``AFTER`` after it, where known.
    """

    BEFORE, AFTER = 5, 10
    _STEPS = 5  # after an update until it is told of

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.windows: list[list[float]] = []
        self._probe, self._spikes = NewbornProbe(topology, self._STEPS), Spikes()
        self._losses: deque[float] = deque(maxlen=self.BEFORE + 1 + self.AFTER)
        self._open: deque[int] = deque()  # updates whose window is not complete
        self._densities: dict[str, float] = {}
        self._record: dict[str, float] = {}

    def before_step(self) -> None:
        """Come before the optimizer's step."""
        self._probe.before_step()

    def step(self, optimizer: Optimizer, loss: float | None = None) -> dict[str, float] | None:
        """Come after the optimizer's step: count it, and change the topology if it is time.

        Args:
            optimizer: The one that trains the layers.
            loss: The training loss of this step, if jumps of the loss are to be measured.

        Returns:
            Five steps after an update, or just before the next one, what is known of it: ``update`` (its number), the
            entries of :meth:`Update.metrics` and :meth:`Spike.metrics`, ``newborn_ratio_1`` … ``_5`` (see
            :class:`NewbornProbe`), and as ``density/LAYER`` the densities of layers that have changed.
        """
        topology, finished = self.topology, None
        if (ratio := self._probe.after_step()) is not None:
            self._record[f"newborn_ratio_{topology.steps - topology.updated_at + 1}"] = ratio
        update = topology.step(optimizer)
        if loss is not None:
            self._losses.append(loss)
            if (spike := self._spikes.see(topology.steps, loss, update is not None)) is not None:
                self._record |= spike.metrics()
            if self._open and topology.steps - self._open[0] == self.AFTER:
                self._open.popleft()
                self.windows.append(list(self._losses))
        if update is not None:
            self._open.append(topology.steps)
            finished = self.finish()
            self._record = {"update": update.number, **update.metrics()}
            densities = {layer.layer: layer.density for layer in update.layers}
            changed = {name: d for name, d in densities.items() if self._densities.get(name) != d}
            self._record |= {f"density/{name}": density for name, density in changed.items()}
            self._densities |= changed
        elif topology.updated_at and topology.steps - topology.updated_at == self._STEPS:
            finished = self.finish()
        return finished

    def finish(self) -> dict[str, float] | None:
        """Return what is known of the latest update, if that has not been told."""
        record, self._record = self._record, {}
        return record if "update" in record else None

    def state_dict(self) -> dict[str, Any]:
        """State of the topology and of what is measured: numbers that JSON can hold."""
        return {
            "topology": self.topology.state_dict(),
            "spikes": self._spikes.state_dict(),
            "windows": self.windows,
            "losses": list(self._losses),
            "open": list(self._open),
            "densities": self._densities,
            "record": self._record,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where :meth:`state_dict` was called."""
        self.topology.load_state_dict(state["topology"])
        self._spikes.load_state_dict(state["spikes"])
        self.windows = [list(window) for window in state["windows"]]
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._open = deque(state["open"])
        self._densities, self._record = dict(state["densities"]), dict(state["record"])


def _local(values: Tensor) -> Tensor:
    values = values.detach()
    return values.to_local() if isinstance(values, DTensor) else values
