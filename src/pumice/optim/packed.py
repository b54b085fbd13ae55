"""SinkGD on packed values: rows and columns are those of the whole matrix, and sums run over its active entries.

X = diag(r) · G · diag(c) as for a dense matrix of which all inactive entries are zero, but a row with k active entries
is brought to L2 norm √k, and so is a column, so that the active entries of X have RMS 1. A row or column without any
keeps its scale. What the passes of :mod:`pumice.optim.sinkhorn` do to matrices they do here to blocks, each with its
own part of r and c; what they return for a block is added to what other blocks give for the same rows or columns.

Vectors cover the whole blocks of the grid: where the block does not divide the matrix, there is more of them than of
rows or columns. Empty slots count as a row of blocks below the matrix.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.optim.balanced import FIRST_POWER_ITERATIONS, STRAY, descend, rate_of, start_vector
from pumice.optim.batch import Batch, Calls
from pumice.optim.sharding import axis_sum, to_local
from pumice.optim.sinkhorn import (
    CHUNK_BYTES,
    accumulation_dtype,
    bounded,
    col_pass,
    col_product,
    iterate,
    power_iteration,
    powers,
    row_pass,
    row_product,
)
from pumice.sparse.layout import BlockGrid
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.sharding import local_slots


@dataclass(frozen=True)
class PackedMatrix:
    """Blocks of a matrix, with where they lie.

    Attributes:
        values: (slots, block rows, block cols).
        row: row of blocks of each slot, int64 (slots,).
        col: column of blocks of each slot, int64 (slots,).
        shape: rows and columns of blocks, a row for empty slots included.
    """

    values: Tensor
    row: Tensor
    col: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, values: Tensor, ids: Tensor, grid: BlockGrid) -> "PackedMatrix":
        """Return blocks whose ids are (slots,)."""
        ids = ids.long()
        return cls(values, ids // grid.grid_cols, ids % grid.grid_cols, (grid.grid_rows + 1, grid.grid_cols))

    @property
    def rows(self) -> int:
        """Length of vectors along rows."""
        return self.shape[0] * self.values.shape[1]

    @property
    def cols(self) -> int:
        """Length of vectors along columns."""
        return self.shape[1] * self.values.shape[2]

    def outline(self) -> Tensor:
        """Return a matrix of the shape of the whole, without storage of its own."""
        return self.values.new_empty(()).expand(self.rows, self.cols)

    def chunks(self) -> Iterator[slice]:
        """Cut the slots into runs of about CHUNK_BYTES bytes in float32."""
        slots = len(self.values)
        size = max(1, CHUNK_BYTES // (4 * self.values[:1].numel())) if slots else 1
        yield from (slice(start, start + size) for start in range(0, slots, size))

    def at_rows(self, vector: Tensor, slots: slice) -> Tensor:
        """Return the parts of a vector along rows that belong to slots: (slots, block rows)."""
        return vector.view(self.shape[0], -1)[self.row[slots]]

    def at_cols(self, vector: Tensor, slots: slice) -> Tensor:
        """Return the parts of a vector along columns that belong to slots: (slots, block cols)."""
        return vector.view(self.shape[1], -1)[self.col[slots]]

    def sum_to_rows(self, part: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        """Add up what ``part`` gives for slots, (slots, block rows), to a vector along rows."""
        return self._sum(part, self.row, self.shape[0], self.values.shape[1], dtype)

    def sum_to_cols(self, part: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        """Add up what ``part`` gives for slots, (slots, block cols), to a vector along columns."""
        return self._sum(part, self.col, self.shape[1], self.values.shape[2], dtype)

    def _sum(
        self, part: Callable[[slice], Tensor], where: Tensor, lines: int, width: int, dtype: torch.dtype
    ) -> Tensor:
        total = torch.zeros(lines, width, dtype=dtype, device=self.values.device)
        for slots in self.chunks():
            if total.is_cuda:  # in a fixed order there, which index_add_ is not
                total.index_put_((where[slots],), part(slots), accumulate=True)
            else:
                total.index_add_(0, where[slots], part(slots))
        return total.view(-1)

    def row_pass(self, c: Tensor, unit: Tensor | None) -> Tensor:
        """Do :func:`pumice.optim.sinkhorn.row_pass`."""

        def part(slots: slice) -> Tensor:
            own = None if unit is None else self.at_rows(unit, slots)
            return row_pass(self.values[slots], self.at_cols(c, slots), own)

        return self.sum_to_rows(part, c.dtype)

    def col_pass(self, r: Tensor, unit: Tensor | None) -> Tensor:
        """Do :func:`pumice.optim.sinkhorn.col_pass`."""

        def part(slots: slice) -> Tensor:
            own = None if unit is None else self.at_cols(unit, slots)
            return col_pass(self.values[slots], self.at_rows(r, slots), own)

        return self.sum_to_cols(part, r.dtype)

    def row_product(self, v: Tensor) -> Tensor:
        """Return the matrix times a vector along columns."""
        return self.sum_to_rows(lambda slots: row_product(self.values[slots], self.at_cols(v, slots)), v.dtype)

    def col_product(self, u: Tensor) -> Tensor:
        """Return the transposed matrix times a vector along rows."""
        return self.sum_to_cols(lambda slots: col_product(self.values[slots], self.at_rows(u, slots)), u.dtype)

    def units(self, c: Tensor, complete: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the powers of two that bring rows and then columns near 1, as :func:`pumice.optim.sinkhorn.units`."""
        wide = torch.float64

        def size_of_rows(slots: slice) -> Tensor:
            return (self.values[slots].to(wide).abs() * self.at_cols(c, slots).to(wide).unsqueeze(-2)).sum(-1)

        row_unit = powers(complete(self.sum_to_rows(size_of_rows, wide)), c.dtype)

        def size_of_cols(slots: slice) -> Tensor:
            return (self.values[slots].to(wide).abs() * self.at_rows(row_unit, slots).to(wide).unsqueeze(-1)).sum(-2)

        return row_unit, powers(complete(self.sum_to_cols(size_of_cols, wide)), c.dtype)


def entries(layer: BlockSparseLinear) -> tuple[Tensor, Tensor]:
    """Count the active entries of each row and of each column of a layer, float32, as long as the vectors here."""
    grid, ids = layer.grid, layer.ids.long()
    blocks = PackedMatrix.of(layer.values.new_empty(len(ids), 0, 0), ids, grid)
    inside = ids < grid.blocks

    def real(index: Tensor, size: int, length: int) -> Tensor:
        """Which places of blocks lie inside the matrix, (slots, size)."""
        place = index.unsqueeze(-1) * size + torch.arange(size, device=ids.device)
        return (place < length) & inside.unsqueeze(-1)

    real_rows, real_cols = real(blocks.row, grid.block_rows, grid.rows), real(blocks.col, grid.block_cols, grid.cols)
    per_row = torch.zeros(grid.grid_rows + 1, grid.block_rows, device=ids.device)
    per_col = torch.zeros(grid.grid_cols, grid.block_cols, device=ids.device)
    per_row.index_add_(0, blocks.row, real_rows * real_cols.sum(-1, keepdim=True).float())
    per_col.index_add_(0, blocks.col, real_cols * real_rows.sum(-1, keepdim=True).float())
    return per_row.view(-1), per_col.view(-1)


class PackedBalancedBatch(Batch):
    """A SinkGD update of packed values."""

    stackable = False
    joint = False

    @property
    def _layer(self) -> BlockSparseLinear:
        (member,) = self.members
        assert member.layer is not None
        return member.layer

    def measure(self) -> Calls[Tensor]:
        """Balance the gradient."""
        yield from ()
        return self._balance(rescale=False)

    def remeasure(self) -> Calls[Tensor]:
        """Balance the gradient with rows and columns first brought near 1, so that no square under- or overflows."""
        yield from ()
        return self._balance(rescale=True)

    def _targets(self) -> tuple[Tensor, Tensor]:
        """Return the squared norms that rows and columns are brought to."""
        return entries(self._layer)

    def _balance(self, rescale: bool) -> Tensor:
        (member,) = self.members
        layer, parameter = self._layer, member.parameter
        gradient = member.gradient.view(to_local(parameter).shape)
        self.blocks = PackedMatrix.of(gradient, layer.ids[local_slots(parameter)], layer.grid)
        self.complete = axis_sum(parameter, 0)
        dtype = accumulation_dtype(gradient)
        if self.group["warm_start"]:
            c = member.state["col_scale"]
        else:
            c = torch.ones(self.blocks.cols, dtype=dtype, device=gradient.device)
        row_unit, col_unit = self.blocks.units(c, self.complete) if rescale else (None, None)
        row_targets, self.col_targets = (target.to(dtype) for target in self._targets())
        self.r, self.c, flag = iterate(
            self.blocks.outline(),
            c,
            self.col_targets,
            row_targets,
            self.group["sinkhorn_iters"],
            row_unit,
            col_unit,
            None,
            lambda _, c, unit: self.blocks.row_pass(c, unit),
            lambda _, r, unit: self.blocks.col_pass(r, unit),
            self.complete,
            self.complete,
            lambda exponents: exponents.mean(-1, keepdim=True),
        )
        return flag.view(1)

    def _update_norm(self) -> Tensor | float:
        """Return the operator norm of X, by which it is divided; 1 if it is left as it is."""
        if self.group["spectral_target"] is None:
            return 1.0
        (member,) = self.members
        v = member.state["right_vector"]
        sigma, new = power_iteration(
            self.blocks.outline(),
            self.r,
            self.c,
            v + STRAY * start_vector(member, v.numel()),
            FIRST_POWER_ITERATIONS if member.step <= 2 else 1,
            lambda _, x: self.blocks.row_product(x),
            lambda _, x: self.blocks.col_product(x),
            self.complete,
            self.complete,
        )
        v.copy_(new)
        # The largest column has that norm at least, however far the power iteration is from its limit.
        return torch.maximum(sigma, self.col_targets.max().sqrt())

    def apply(self) -> Calls[None]:
        """Update weights and the state for the next balancing."""
        (member,) = self.members
        group, layer, blocks = self.group, self._layer, self.blocks
        values = to_local(member.parameter).detach()
        rate = rate_of(group, layer.out_features, layer.in_features) * member.density_factor
        numbers = self.numbers([rate, 1 - float(group["lr"]) * group["weight_decay"]])
        rates = numbers[0] / self._update_norm() * member.ramp
        row_random, col_random = yield from self.uniforms()
        for slots in blocks.chunks():
            yield from self.run(
                descend,
                values[slots],
                blocks.values[slots],
                blocks.at_rows(self.r, slots),
                blocks.at_cols(self.c, slots),
                rates[slots].unsqueeze(-1),
                numbers[1],
                row_random if row_random is None else row_random[slots],
                col_random if col_random is None else col_random[slots],
            )
        if group["warm_start"]:
            member.state["col_scale"].copy_(bounded(self.c))
        member.state["step"] += 1

    def _rounding_indices(self) -> tuple[Tensor, Tensor]:
        """Number the rows of slots (slots, block rows) and the places in them (block cols,)."""
        (member,) = self.members
        slots, _ = member.rounding_indices()
        _, rows, cols = member.parameter.shape
        device = slots.device
        return slots.unsqueeze(-1) * rows + torch.arange(rows, device=device), torch.arange(cols, device=device)
