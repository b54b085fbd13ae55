"""How much of each layer is active, and the table that tells it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from pumice.errors import UserError, nearest
from pumice.sparse.layout import BlockGrid, real_entries
from pumice.sparse.linear import BlockSparseLinear

Distribution = Literal["uniform", "erk"] | Mapping[str, float]


def active_blocks(grids: Mapping[str, BlockGrid], density: float, distribution: Distribution) -> dict[str, int]:
    """Decide how many blocks of each layer are active.

    A layer of density d_l should have d_l · blocks of them. That number is rounded down, but at least to one. Then one
    block more goes to one layer after the other, those that lost most by rounding first (the earlier layer if equal),
    for as long as it brings the total of entries closer to Σ d_l · entries. A block of a layer counts as many entries
    as its blocks have on average, because which of them are active, and so how many are short, is not known here.
    Layers of one shape can thus differ by one block.

    Args:
        grids: Block grid of each layer, by name, in the model's order.
        density: Share of entries that are active, in (0, 1].
        distribution: ``"uniform"``: the same density in every layer. ``"erk"``: the Erdős–Rényi kernel, d_l
            proportional to (rows + cols) / (rows · cols) such that the whole has the given density; layers that would
            exceed 1 are dense and the others share what is left (arXiv 1911.11134). A mapping of regular expression to
            density: layers whose name the expression is found in (``re.search``; the first that matches) have that
            density, and others the given one.

    Returns:
        Number of active blocks of each layer.

    Raises:
        UserError: A density is outside (0, 1], the distribution is unknown, or an expression is invalid or matches no
            layer.
    """
    check_density(density, "density")
    if isinstance(distribution, Mapping):
        wanted = _by_name(grids, density, distribution)
    elif distribution == "erk":
        wanted = erk_densities(grids, density)
    elif distribution == "uniform":
        wanted = dict.fromkeys(grids, density)
    else:
        known = ("uniform", "erk")
        raise UserError(f"unknown distribution '{distribution}'; {nearest(str(distribution), known)}")
    return _whole_blocks(grids, wanted)


def check_density(density: float, what: str) -> None:
    """Raise UserError unless ``density`` is a number in (0, 1]."""
    if not (isinstance(density, int | float) and 0 < density <= 1):
        raise UserError(f"{what} must be in (0, 1], got {density}")


def erk_densities(grids: Mapping[str, BlockGrid], density: float) -> dict[str, float]:
    """Density of each layer by the Erdős–Rényi kernel; see :func:`active_blocks`."""
    dense: set[str] = set()
    while True:
        rest = {name: grid for name, grid in grids.items() if name not in dense}
        budget = density * sum(grid.entries for grid in grids.values()) - sum(grids[name].entries for name in dense)
        scale = budget / max(1, sum(grid.rows + grid.cols for grid in rest.values()))
        densities = {name: scale * (grid.rows + grid.cols) / grid.entries for name, grid in rest.items()}
        if not (above := {name for name, wanted in densities.items() if wanted > 1}):
            return {name: densities.get(name, 1.0) for name in grids}
        dense |= above


def _by_name(grids: Mapping[str, BlockGrid], density: float, overrides: Mapping[str, float]) -> dict[str, float]:
    wanted = dict.fromkeys(grids, density)
    assigned: set[str] = set()
    for expression, own in overrides.items():
        check_density(own, f"density of '{expression}'")
        matched = matching(expression, grids)
        wanted.update({name: own for name in matched if name not in assigned})
        assigned.update(matched)
    return wanted


def matching(expression: str, names: Mapping[str, object]) -> list[str]:
    """The names that a regular expression is found in; UserError if it is invalid or found in none."""
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UserError(f"'{expression}' is not a regular expression: {error}") from error
    if not (matched := [name for name in names if pattern.search(name)]):
        raise UserError(f"'{expression}' matches no layer to sparsify; {nearest(expression, names)}")
    return matched


def _whole_blocks(grids: Mapping[str, BlockGrid], wanted: Mapping[str, float]) -> dict[str, int]:
    exact = {name: round(wanted[name] * grid.blocks, 6) for name, grid in grids.items()}  # 0.3 · 10 is not 3
    counts = {name: max(1, int(number)) for name, number in exact.items()}
    mean = {name: grid.entries / grid.blocks for name, grid in grids.items()}
    missing = sum(wanted[name] * grid.entries - counts[name] * mean[name] for name, grid in grids.items())
    for name in sorted(grids, key=lambda name: counts[name] - exact[name]):  # stable: the model's order if equal
        if counts[name] < exact[name] and abs(missing - mean[name]) < abs(missing):
            counts[name] += 1
            missing -= mean[name]
    return counts


# --- table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One block-sparse layer.

    Attributes:
        name: Full name of the module.
        rows: Rows of its matrix, the outputs.
        cols: Columns, the inputs.
        block_shape: (block rows, block cols).
        active: Number of active blocks.
        blocks: Number of blocks of the grid.
        active_entries: Real entries of the active blocks.
    """

    name: str
    rows: int
    cols: int
    block_shape: tuple[int, int]
    active: int
    blocks: int
    active_entries: int

    @property
    def density(self) -> float:
        """Share of the entries that are active."""
        return self.active_entries / (self.rows * self.cols)


@dataclass(frozen=True)
class Summary:
    """One row per block-sparse layer, in the model's order; print it.

    Attributes:
        layers: The rows.
    """

    layers: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.layers)

    @property
    def density(self) -> float:
        """Share of the entries of all these layers that are active; 1 if there are none."""
        total = sum(row.rows * row.cols for row in self.layers)
        return sum(row.active_entries for row in self.layers) / total if total else 1.0

    def __str__(self) -> str:
        table = [
            ("layer", "matrix", "block", "active blocks", "density"),
            *(
                (
                    row.name or "(model)",
                    f"{row.rows} x {row.cols}",
                    "{} x {}".format(*row.block_shape),
                    f"{row.active:,} of {row.blocks:,}",
                    f"{row.density:.4f}",
                )
                for row in self.layers
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
        active = sum(row.active_entries for row in self.layers)
        total = f"{len(self.layers)} block-sparse layers, {active:,} active entries, density {self.density:.4f}"
        return "\n".join([*lines, "", total])


def summary(model: nn.Module) -> Summary:
    """Tell how much of each block-sparse layer of a model is active.

    Args:
        model: Any module with :class:`BlockSparseLinear` layers that are not on the meta device.

    Returns:
        A table; print it.
    """
    rows = []
    for name, layer in model.named_modules():
        if isinstance(layer, BlockSparseLinear):
            grid, ids = layer.grid, layer.ids.to(torch.int64)
            active, entries = int((ids < grid.blocks).sum()), int(real_entries(ids, grid).sum())
            rows.append(Row(name, grid.rows, grid.cols, layer.block_shape, active, grid.blocks, entries))
    return Summary(tuple(rows))
