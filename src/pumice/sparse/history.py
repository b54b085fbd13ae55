"""What became of the blocks: survival of newborns, and how much of a layer was ever active."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pumice.sparse.layout import mark, marked, marked_entries
from pumice.sparse.linear import BlockSparseLinear


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
        density: Share of the layer's entries that are active after it.
        ever_active: Share of the layer's entries that have been active at some time.
        entries: Entries of the layer's matrix.
    """

    layer: str
    active: int
    dropped: int
    grown: int
    survivors: Mapping[int, tuple[int, int]]
    density: float
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
            ``dropped``, ``grown`` and ``active`` (blocks), ``density`` and ``ever_active`` (shares of entries), and
            where blocks of that age were ever grown ``survival_1``, ``survival_5`` (share still active after 1 and 5
            updates) and ``survival_past_grace`` (after the two updates that follow their grace).
        """
        entries = sum(layer.entries for layer in self.layers)
        numbers: dict[str, float] = {
            "dropped": sum(layer.dropped for layer in self.layers),
            "grown": sum(layer.grown for layer in self.layers),
            "active": sum(layer.active for layer in self.layers),
        }
        if entries:
            numbers["density"] = sum(layer.density * layer.entries for layer in self.layers) / entries
            numbers["ever_active"] = sum(layer.ever_active * layer.entries for layer in self.layers) / entries
        for name, age in (("survival_1", 1), ("survival_5", 5), ("survival_past_grace", self.grace + 2)):
            pairs = [layer.survivors[age] for layer in self.layers if age in layer.survivors]
            if born := sum(pair[0] for pair in pairs):
                numbers[name] = sum(pair[1] for pair in pairs) / born
        return numbers


class History:
    """How many blocks the last updates of a layer grew.

    Args:
        name: Full name of the layer.
        ages: For how many updates newborn blocks are followed.
    """

    def __init__(self, name: str, ages: tuple[int, ...]) -> None:
        self.name, self.ages = name, ages
        self.births: list[tuple[int, int]] = []  # (step, blocks grown), the latest update last

    def record(self, layer: BlockSparseLinear, before: Tensor, step: int) -> LayerUpdate:
        """Note an update.

        Args:
            layer: The layer after it.
            before: Ids of the slots before it, (slots,).
            step: Optimizer steps taken.

        Returns:
            What it did.
        """
        grid, after = layer.grid, layer.ids
        changed, filled = before != after, after < grid.blocks
        grown = int((changed & filled).sum())
        self.births = [*self.births[-max(self.ages) :], (step, grown)]
        mark(layer.ever_active, after, grid)
        return LayerUpdate(
            layer=self.name,
            active=int(filled.sum()),
            dropped=int(changed.sum()),
            grown=grown,
            survivors={
                age: (born, int((layer.birth[filled] == then).sum()))
                for age in self.ages
                if age < len(self.births)
                for then, born in [self.births[-1 - age]]
            },
            density=layer.density,
            ever_active=marked_entries(marked(layer.ever_active, grid), grid) / grid.entries,
            entries=grid.entries,
        )
