"""What became of the blocks: survival of newborns, and how much of a layer was ever active."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pumice.sparse.layout import BlockGrid, marked_entries


@dataclass(frozen=True)
class LayerUpdate:
    """What one topology update did to one layer.

    Attributes:
        layer: Full name of the module.
        active: Active blocks after it.
        dropped: Blocks dropped.
        grown: Blocks grown.
        survivors: Of the blocks grown some updates ago: how many there were and how many are still active. By age in
            updates; ages from before the run's first update are absent.
        ever_active: Share of the layer's entries that have been active at some time.
        entries: Entries of the layer's matrix.
    """

    layer: str
    active: int
    dropped: int
    grown: int
    survivors: Mapping[int, tuple[int, int]]
    ever_active: float
    entries: int


@dataclass(frozen=True)
class Update:
    """One topology update.

    Attributes:
        step: Optimizer steps taken before it.
        number: Its number, from 1.
        grace: Updates for which newborn blocks are not dropped.
        layers: One entry per layer that trains.
    """

    step: int
    number: int
    grace: int
    layers: tuple[LayerUpdate, ...]

    def metrics(self) -> dict[str, float]:
        """Sums over layers, to be logged.

        Returns:
            ``dropped``, ``grown`` and ``active`` (blocks), ``ever_active`` (share of entries), and where blocks of that
            age were ever grown ``survival_1``, ``survival_5`` (share still active after 1 and 5 updates) and
            ``survival_past_grace`` (after the two updates that follow their grace).
        """
        entries = sum(layer.entries for layer in self.layers)
        numbers: dict[str, float] = {
            "dropped": sum(layer.dropped for layer in self.layers),
            "grown": sum(layer.grown for layer in self.layers),
            "active": sum(layer.active for layer in self.layers),
        }
        if entries:
            numbers["ever_active"] = sum(layer.ever_active * layer.entries for layer in self.layers) / entries
        for name, age in (("survival_1", 1), ("survival_5", 5), ("survival_past_grace", self.grace + 2)):
            pairs = [layer.survivors[age] for layer in self.layers if age in layer.survivors]
            if born := sum(pair[0] for pair in pairs):
                numbers[name] = sum(pair[1] for pair in pairs) / born
        return numbers


class History:
    """One bit per block of a layer, whether it was ever active, and how many blocks its last updates grew.

    Args:
        layer: Full name of the module.
        grid: Its block grid.
        ages: For how many updates newborn blocks are followed.
    """

    def __init__(self, layer: str, grid: BlockGrid, ages: tuple[int, ...]) -> None:
        self.layer, self.grid, self.ages = layer, grid, ages
        self.bits = torch.zeros(-(-grid.blocks // 8), dtype=torch.uint8)
        self.births: list[tuple[int, int]] = []  # (step, blocks grown), the latest update last

    def record(self, before: Tensor, after: Tensor, birth: Tensor, step: int) -> LayerUpdate:
        """Note an update.

        Args:
            before: Ids of the slots before it, (slots,).
            after: Ids after it.
            birth: Birth steps after it.
            step: Optimizer steps taken.

        Returns:
            What it did.
        """
        blocks = self.grid.blocks
        changed, filled = before != after, after < blocks
        grown = int((changed & filled).sum())
        self.births = [*self.births[-max(self.ages) :], (step, grown)]
        return LayerUpdate(
            layer=self.layer,
            active=int(filled.sum()),
            dropped=int(changed.sum()),
            grown=grown,
            survivors={
                age: (born, int((birth[filled] == then).sum()))
                for age in self.ages
                if age < len(self.births)
                for then, born in [self.births[-1 - age]]
            },
            ever_active=marked_entries(self._mark(before, after), self.grid) / self.grid.entries,
            entries=self.grid.entries,
        )

    def _mark(self, *ids: Tensor) -> Tensor:
        """Set the bits of some blocks, and return all bits as bool, (blocks,)."""
        device, blocks = ids[0].device, self.grid.blocks
        powers = 2 ** torch.arange(8, dtype=torch.uint8, device=device)
        marks = (self.bits.to(device).unsqueeze(1) & powers).flatten() > 0
        for some in ids:
            marks[some[some < blocks].long()] = True
        self.bits = (marks.view(-1, 8) * powers).sum(1, dtype=torch.uint8)
        return marks[:blocks]

    def state_dict(self) -> dict[str, Any]:
        """Bits and births, as tensors and numbers."""
        return {"ever_active": self.bits, "births": [list(pair) for pair in self.births]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` of a history of the same layer gave.

        Raises:
            ValueError: It belongs to a layer with another number of blocks.
        """
        if state["ever_active"].shape != self.bits.shape:
            raise ValueError(f"expected one bit for each of {self.grid.blocks} blocks")
        self.bits = state["ever_active"].clone()
        self.births = [(int(step), int(grown)) for step, grown in state["births"]]
