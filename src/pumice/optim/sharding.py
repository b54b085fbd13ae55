"""Where the local part of a parameter lies in the whole, and over which process groups its axes are split."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def align_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's part of ``gradient``, placed as ``parameter`` is; partial sums are reduced."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements).to_local()
    return to_local(gradient)


def _shards(tensor: Tensor, axis: int) -> list[tuple[int, Any]]:
    """List (mesh dimension, mesh) of the splits of ``axis``, outermost first."""
    if not isinstance(tensor, DTensor):
        return []
    splits = []
    for mesh_dim, placement in enumerate(tensor.placements):
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"a parameter must be placed as Shard or Replicate, got {placement} of {tensor.placements}"
            )
        if isinstance(placement, Shard) and placement.dim % tensor.ndim == axis % tensor.ndim:
            splits.append((mesh_dim, tensor.device_mesh))
    return splits


def part_count(tensor: Tensor, axis: int) -> int:
    """Return into how many parts ``axis`` is split."""
    return math.prod(mesh.size(mesh_dim) for mesh_dim, mesh in _shards(tensor, axis))


def global_indices(tensor: Tensor, axis: int) -> Tensor:
    """Return the global index of each local element along ``axis``: int64, on the tensor's device."""
    start, size = 0, tensor.shape[axis]
    for mesh_dim, mesh in _shards(tensor, axis):
        chunk = -(-size // mesh.size(mesh_dim))  # as torch.chunk cuts
        offset = min(chunk * mesh.get_local_rank(mesh_dim), size)
        start, size = start + offset, min(chunk, size - offset)
    return torch.arange(start, start + size, device=to_local(tensor).device)


def axis_sum(tensor: Tensor, axis: int) -> Callable[[Tensor], Tensor]:
    """Return the function that completes a sum along ``axis`` over the ranks that share it."""
    groups = [mesh.get_group(mesh_dim) for mesh_dim, mesh in _shards(tensor, axis)]

    def complete(partial: Tensor) -> Tensor:
        total = partial.clone() if groups else partial
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    return complete


def any_rank(flags: Tensor, tensor: Tensor) -> Tensor:
    """Combine boolean ``flags`` over all ranks that hold a part or a copy of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return flags
    counts = flags.to(torch.float32)
    for mesh_dim in range(tensor.device_mesh.ndim):
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=tensor.device_mesh.get_group(mesh_dim))
    return counts > 0


def vector_like(local: Tensor, parameter: Tensor, axis: int) -> Tensor:
    """Wrap a local vector along ``axis`` (with the batch axes before it) so that it is sharded as that axis is.

    Args:
        local: shape of the parameter's local part without its other matrix axis.
        parameter: (..., m, n).
        axis: -1 or -2.
    """
    if not isinstance(parameter, DTensor):
        return local
    lost = parameter.ndim + (-2 if axis == -1 else -1)
    shape = [size for dim, size in enumerate(parameter.shape) if dim != lost]
    placements: list[Shard | Replicate] = []
    for placement in parameter.placements:
        if isinstance(placement, Shard) and placement.dim % parameter.ndim != lost:
            dim = placement.dim % parameter.ndim
            placements.append(Shard(dim - 1 if dim > lost else dim))
        else:
            placements.append(Replicate())
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
