"""Where local parts lie, on a process group that only pretends to have other ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from pumice.optim.sharding import align_gradient, global_indices, part_count, vector_like


@contextmanager
def rank_of(rank: int, mesh_shape: tuple[int, ...]) -> Iterator[dist.DeviceMesh]:
    size = int(torch.tensor(mesh_shape).prod())
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


def sharded(shape: tuple[int, ...], mesh: dist.DeviceMesh, placements: list[Placement]) -> tuple[DTensor, Tensor]:
    """Return a DTensor and the flat positions of its local entries in the whole, by torch's own arithmetic."""
    whole = torch.arange(int(torch.tensor(shape).prod())).view(shape)
    local_shape, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    local = whole
    for axis, (size, start) in enumerate(zip(local_shape, offset, strict=True)):
        local = local.narrow(axis, min(start, shape[axis]), size)
    positions = local.clone()
    stride = torch.empty(shape, device="meta").stride()
    size = torch.Size(shape)
    tensor = DTensor.from_local(positions.float(), mesh, placements, run_check=False, shape=size, stride=stride)
    return tensor, positions


LAYOUTS = [
    ((3,), [Shard(0)]),
    ((3,), [Shard(1)]),
    ((3,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Shard(1)]),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(7, 6), (2, 5), (1, 4), (4, 5, 3)], ids=str)
def test_indices_are_those_of_the_local_entries(
    mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    for rank in range(int(torch.tensor(mesh_shape).prod())):
        with rank_of(rank, mesh_shape) as mesh:
            tensor, positions = sharded(shape, mesh, placements)
            ours = torch.zeros((), dtype=torch.int64)
            for axis in range(len(shape)):
                ours = ours.unsqueeze(-1) * shape[axis] + global_indices(tensor, axis)
            assert torch.equal(ours, positions)


@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("axis", [-1, -2])
def test_vectors_are_sharded_as_their_axis(mesh_shape: tuple[int, ...], placements: list[Placement], axis: int) -> None:
    """Taken over the ranks, the parts of a vector are the whole one's: for matrices and for batches of them."""
    for shape in ((7, 6), (4, 5, 3)):
        wanted = (*shape[:-2], shape[axis])
        for rank in range(int(torch.tensor(mesh_shape).prod())):
            with rank_of(rank, mesh_shape) as mesh:
                tensor, _ = sharded(shape, mesh, placements)
                local = tensor.to_local().sum(-2 if axis == -1 else -1)
                vector = vector_like(local, tensor, axis)
                assert vector.shape == wanted
                assert (
                    vector.to_local().shape == compute_local_shape_and_global_offset(wanted, mesh, vector.placements)[0]
                )


@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS, ids=str)
def test_part_count(mesh_shape: tuple[int, ...], placements: list[Placement]) -> None:
    with rank_of(0, mesh_shape) as mesh:
        tensor, _ = sharded((8, 8), mesh, placements)
        counts = [part_count(tensor, axis) for axis in (0, 1)]
    expected = [1, 1]
    for size, placement in zip(mesh_shape, placements, strict=True):
        if isinstance(placement, Shard):
            expected[placement.dim] *= size
    assert counts == expected


def test_ordinary_tensors_are_whole() -> None:
    tensor = torch.zeros(3, 4)
    assert torch.equal(global_indices(tensor, -1), torch.arange(4))
    assert part_count(tensor, 0) == 1
    assert vector_like(tensor[0], tensor, -1) is not None
    assert align_gradient(tensor, tensor) is tensor


def test_partial_parameters_are_refused() -> None:
    with rank_of(0, (2,)) as mesh:
        tensor = DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match="must be placed as Shard or Replicate, got P"):
            global_indices(tensor, 0)
