"""The block grid: which entries a block has, what an edge block is, and the way there and back."""

import pytest
import torch

from pumice.errors import UserError
from pumice.sparse.layout import (
    BlockGrid,
    as_matrix,
    blank,
    gather,
    grid_norms,
    marked_entries,
    mean_magnitudes,
    pack,
    real_entries,
    unpack,
)

SHAPES = [(1, 1), (1, 2), (1, 4), (2, 2), (3, 3), (2, 1), (4, 5), (3, 2)]


def matrix(rows, cols):
    return torch.arange(1.0, rows * cols + 1).view(rows, cols)


def test_ids_are_row_major_and_edge_blocks_are_padded_with_zeros():
    """(2, 5) in blocks (1, 2): ids 0 1 2 in the first row, where block 2 has one real entry."""
    values = pack(matrix(2, 5), torch.tensor([5, 0, 3]), BlockGrid(2, 5, 1, 2))
    assert values.tolist() == [[[10.0, 0.0]], [[1.0, 2.0]], [[6.0, 7.0]]]


def test_tiles_cut_both_dimensions():
    """(3, 3) in tiles (2, 2): the last tile holds the corner alone."""
    grid = BlockGrid(3, 3, 2, 2)
    values = pack(matrix(3, 3), torch.tensor([3, 1, 2]), grid)
    assert values.tolist() == [[[9.0, 0.0], [0.0, 0.0]], [[3.0, 0.0], [6.0, 0.0]], [[7.0, 8.0], [0.0, 0.0]]]
    assert (grid.grid_rows, grid.grid_cols, grid.blocks, grid.entries) == (2, 2, 4, 9)
    assert real_entries(torch.arange(5), grid).tolist() == [4, 2, 2, 1, 0]  # the last is an empty slot


def test_llama_columns_in_blocks_of_64():
    grid = BlockGrid(2, 5461, 1, 64)
    assert (grid.grid_cols, grid.blocks) == (86, 172)
    counts = real_entries(torch.arange(172), grid)
    assert counts[[0, 84, 85, 170, 171]].tolist() == [64, 64, 21, 64, 21]
    assert counts.sum() == 2 * 5461


@pytest.mark.parametrize("block", SHAPES)
def test_all_blocks_in_any_order_give_the_matrix_back(block):
    grid = BlockGrid(4, 5, *block)
    ids = torch.randperm(grid.blocks, generator=torch.Generator().manual_seed(0)).int()
    values = pack(matrix(4, 5), ids, grid)
    assert values.shape == (grid.blocks, *block)
    assert torch.equal(unpack(values, ids, grid), matrix(4, 5))
    assert int(real_entries(ids, grid).sum()) == 20


@pytest.mark.parametrize("block", SHAPES)
def test_blocks_that_are_not_active_are_exactly_zero(block):
    grid = BlockGrid(4, 5, *block)
    ids = torch.arange(0, grid.blocks, 2)
    dense = unpack(pack(matrix(4, 5), ids, grid), ids, grid)
    assert torch.equal(dense[dense != 0], matrix(4, 5)[dense != 0])
    assert int((dense != 0).sum()) == int(real_entries(ids, grid).sum())


@pytest.mark.parametrize("block", [(1, 2), (2, 2)])
def test_empty_slots_and_padding_do_not_reach_the_matrix(block):
    grid = BlockGrid(3, 3, *block)
    ids = torch.tensor([grid.blocks, grid.blocks - 1, grid.blocks])
    dense = unpack(torch.full((3, *block), 7.0), ids, grid)
    assert dense.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 7]]
    assert pack(matrix(3, 3), ids, grid)[[0, 2]].abs().sum() == 0


def test_unpack_casts_and_lets_gradients_through():
    grid = BlockGrid(2, 3, 1, 2)
    values = torch.ones(2, 1, 2, requires_grad=True)
    dense = unpack(values, torch.tensor([1, 2]), grid, torch.float64)
    assert dense.dtype == torch.float64
    (dense * matrix(2, 3)).sum().backward()
    assert values.grad.tolist() == [[[3.0, 0.0]], [[4.0, 5.0]]]


def test_scores_count_real_entries_only():
    grid = BlockGrid(2, 3, 1, 2)
    dense = torch.tensor([[1.0, -3.0, 5.0], [0.0, 2.0, -7.0]])
    ids = torch.tensor([3, 0, 1, 4])
    assert mean_magnitudes(pack(dense, ids, grid), ids, grid).tolist() == [7.0, 2.0, 5.0, 0.0]
    buffer = blank(grid, torch.bfloat16, torch.device("cpu"))
    as_matrix(buffer, grid).copy_(dense)
    norms = grid_norms(buffer, grid, 2)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.square(), torch.tensor([10.0, 25.0, 4.0, 49.0]))
    assert gather(buffer, ids).dtype == torch.bfloat16


@pytest.mark.parametrize("block", SHAPES)
def test_entries_of_marked_blocks(block):
    grid = BlockGrid(4, 5, *block)
    marks = torch.rand(grid.blocks, generator=torch.Generator().manual_seed(1)) < 0.6
    assert marked_entries(marks, grid) == int(real_entries(marks.nonzero().flatten(), grid).sum())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 5, 1, 6), r"block \(1, 6\) is larger than the matrix \(4, 5\); choose a smaller block_shape"),
        ((4, 5, 5, 1), "larger than"),
        ((4, 5, 0, 1), "positive whole numbers"),
        ((4, 5, 1, 1.0), "positive whole numbers"),
        ((2**16, 2**16, 1, 1), "4,294,967,296 blocks, more than int32 can number"),
    ],
)
def test_grids_that_cannot_be(sizes, message):
    with pytest.raises(UserError, match=message):
        BlockGrid(*sizes)
