"""The block grid of a matrix, and the way between packed blocks and the dense matrix.

A matrix [out, in] is cut into blocks of (block rows, block cols), from the top left. Where the block does not divide a
dimension, the last blocks along it are short: they have fewer *real* entries than the others, and what is left of the
block is padding, which is zero, is not counted and gets no gradient. The 5461 columns of LLaMA-1B in blocks of 64 are
85 full blocks and one of 21 real entries.

A block's **id** is its number in row-major order of the grid, and an **active** block has a **slot**: `values[slot]`
holds its entries and `ids[slot]` its id. Slots are reused when the topology changes, so ids are in no order. An id
equal to the number of blocks marks an *empty* slot, which has no entries.

    (rows, cols) = (2, 5), block (1, 2)         ids = [5, 0]    values[0] = [[w14, 0]]    values[1] = [[w00, w01]]
    grid:  0 0 1 1 2
           3 3 4 4 5

Ids are int32, and none of these functions keeps an index tensor. The indices that exist during a call are one or two
int64 numbers for each active block, never one for each element of a larger block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pumice.errors import UserError
from pumice.sparse.sharding import gathered

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class BlockGrid:
    """A matrix of (rows, cols) cut into blocks of (block_rows, block_cols).

    Attributes:
        rows: Rows of the matrix, the outputs of a layer.
        cols: Columns of the matrix, the inputs of a layer.
        block_rows: Rows of a block: 1 for blocks along a row, 1 with ``block_cols=1`` for single entries.
        block_cols: Columns of a block.

    Raises:
        UserError: A size is not a positive integer, the block is larger than the matrix, or the blocks are too many
            for int32 ids.
    """

    rows: int
    cols: int
    block_rows: int
    block_cols: int

    def __post_init__(self) -> None:
        sizes = (self.rows, self.cols, self.block_rows, self.block_cols)
        matrix, block = f"the matrix ({self.rows}, {self.cols})", f"block ({self.block_rows}, {self.block_cols})"
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise UserError(f"{block} and {matrix} must have positive whole numbers of rows and columns")
        if self.block_rows > self.rows or self.block_cols > self.cols:
            raise UserError(f"{block} is larger than {matrix}; choose a smaller block_shape")
        if self.blocks >= _INT32_MAX:
            raise UserError(f"{block} cuts {matrix} into {self.blocks:,} blocks, more than int32 can number")

    @property
    def grid_rows(self) -> int:
        """Number of blocks from top to bottom, a short one included."""
        return -(-self.rows // self.block_rows)

    @property
    def grid_cols(self) -> int:
        """Number of blocks from left to right, a short one included."""
        return -(-self.cols // self.block_cols)

    @property
    def blocks(self) -> int:
        """Number of blocks; also the id of an empty slot."""
        return self.grid_rows * self.grid_cols

    @property
    def entries(self) -> int:
        """Number of entries of the matrix."""
        return self.rows * self.cols


def real_entries(ids: Tensor, grid: BlockGrid) -> Tensor:
    """Count the entries of blocks that lie inside the matrix.

    Args:
        ids: Integer, any shape.
        grid: Of the matrix.

    Returns:
        Tensor of the shape and dtype of ``ids``; zero for an empty slot.
    """
    height = (grid.rows - ids // grid.grid_cols * grid.block_rows).clamp(0, grid.block_rows)
    width = (grid.cols - ids % grid.grid_cols * grid.block_cols).clamp(0, grid.block_cols)
    return height * width


def marked_entries(marks: Tensor, grid: BlockGrid) -> int:
    """Count the entries of marked blocks that lie inside the matrix; ``marks`` is bool, (blocks,)."""
    table = marks.view(grid.grid_rows, grid.grid_cols)
    widths = table.sum(1) * grid.block_cols - table[:, -1] * (grid.grid_cols * grid.block_cols - grid.cols)
    missing = grid.grid_rows * grid.block_rows - grid.rows  # of the last grid row
    return int(widths.sum()) * grid.block_rows - int(widths[-1]) * missing


def marked(bits: Tensor, grid: BlockGrid) -> Tensor:
    """Unpack a bit for each block, the lowest first: uint8 (⌈blocks / 8⌉,) to bool (blocks,)."""
    return ((bits.unsqueeze(1) & _powers(bits.device)) > 0).flatten()[: grid.blocks]


def mark(bits: Tensor, ids: Tensor, grid: BlockGrid) -> None:
    """Set the bits of blocks in place; ids of empty slots are passed over."""
    marks = torch.zeros(8 * bits.shape[0], dtype=torch.bool, device=bits.device)
    marks[: grid.blocks] = marked(bits, grid)
    marks[ids[ids < grid.blocks].long()] = True
    bits.copy_((marks.view(-1, 8) * _powers(bits.device)).sum(1, dtype=torch.uint8))


def _powers(device: torch.device) -> Tensor:
    return 2 ** torch.arange(8, dtype=torch.uint8, device=device)


def blank(grid: BlockGrid, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of shape (grid_rows + 1, block_rows, grid_cols, block_cols), to be seen as blocks or as a matrix.

    The last grid row lies below the matrix: its first block is where empty slots are written to and read from.
    """
    shape = (grid.grid_rows + 1, grid.block_rows, grid.grid_cols, grid.block_cols)
    return torch.zeros(shape, dtype=dtype, device=device)


def as_matrix(buffer: Tensor, grid: BlockGrid) -> Tensor:
    """See a buffer of :func:`blank` as the matrix (rows, cols): a view without the padding."""
    return buffer.view(-1, grid.grid_cols * grid.block_cols)[: grid.rows, : grid.cols]


def gather(buffer: Tensor, ids: Tensor) -> Tensor:
    """Copy blocks out of a buffer of :func:`blank`.

    Args:
        buffer: (grid_rows + 1, block_rows, grid_cols, block_cols).
        ids: Integer, (slots,).

    Returns:
        (slots, block_rows, block_cols), of the dtype of ``buffer``.
    """
    view, index = _indexed(buffer, ids)
    values = view[index]
    return values if values.ndim == 3 else values.unsqueeze(1)


def pack(dense: Tensor, ids: Tensor, grid: BlockGrid) -> Tensor:
    """Copy blocks out of a matrix.

    Args:
        dense: (rows, cols).
        ids: Integer, (slots,); the blocks to copy.
        grid: Of the matrix.

    Returns:
        (slots, block_rows, block_cols), of the dtype of ``dense``, with zeros as padding and in empty slots.
    """
    buffer = blank(grid, dense.dtype, dense.device)
    as_matrix(buffer, grid).copy_(dense)
    return gather(buffer, ids)


def unpack(values: Tensor, ids: Tensor, grid: BlockGrid, dtype: torch.dtype | None = None) -> Tensor:
    """Write blocks into a matrix of zeros; differentiable with respect to ``values``.

    Args:
        values: (slots, block_rows, block_cols); what it holds in padding and in empty slots is left out.
        ids: Integer, (slots,), each block at most once.
        grid: Of the matrix.
        dtype: Of the result; default: that of ``values``.

    Returns:
        (rows, cols): a view, which is contiguous where the blocks divide the columns.
    """
    dtype = dtype or values.dtype
    buffer = blank(grid, dtype, values.device)
    view, index = _indexed(buffer, ids)
    view.index_put_(index, (values if view.ndim == 4 else values.squeeze(1)).to(dtype))
    return as_matrix(buffer, grid)


def _indexed(buffer: Tensor, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A view whose leading axes number the blocks, and the index of some blocks in it."""
    _, block_rows, grid_cols, block_cols = buffer.shape
    if block_rows == 1:  # one index a block instead of two: for single entries that is most of the memory
        return buffer.view(-1, block_cols), (ids.long(),)
    return buffer.transpose(1, 2), (ids.long() // grid_cols, ids.long() % grid_cols)


def mean_magnitudes(values: Tensor, ids: Tensor, grid: BlockGrid) -> Tensor:
    """Mean |w| of packed blocks over their real entries.

    Args:
        values: (slots, block_rows, block_cols), zero in padding; sharded or not.
        ids: Integer, (slots,).
        grid: Of the matrix.

    Returns:
        float32, (slots,), whole on every rank; zero for an empty slot. NaN weights give NaN.
    """
    sums = gathered(torch.linalg.vector_norm(values, ord=1, dim=(1, 2), dtype=_accumulator(values)))
    return sums.float() / real_entries(ids, grid).clamp(min=1)


def grid_norms(buffer: Tensor, grid: BlockGrid, order: int) -> Tensor:
    """Norm of the given order of each block of a buffer of :func:`blank`: float32, (blocks,), in order of ids."""
    norms = torch.linalg.vector_norm(buffer[: grid.grid_rows], order, dim=(1, 3), dtype=_accumulator(buffer))
    result: Tensor = norms.float().flatten()
    return result


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
