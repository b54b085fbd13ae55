"""Slots of a tensor that may be split over ranks along its first axis, as FSDP2 splits `values`."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor on every rank, or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def summed(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, or the tensor itself where there is one process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def local_slots(tensor: Tensor) -> slice:
    """Return which slots of the whole tensor are on this rank.

    Args:
        tensor: (slots, ...); a DTensor is replicated or sharded along its first axis.

    Raises:
        ValueError: The tensor is sharded in another way.
    """
    start, size = 0, tensor.shape[0]
    if isinstance(tensor, DTensor):
        for mesh_dim, placement in enumerate(tensor.placements):
            if type(placement) is Shard and placement.dim == 0:
                chunk = -(-size // tensor.device_mesh.size(mesh_dim))  # as torch.chunk cuts
                offset = min(chunk * tensor.device_mesh.get_local_rank(mesh_dim), size)
                start, size = start + offset, min(chunk, size - offset)
            elif not isinstance(placement, Replicate):
                raise ValueError(f"slots must be replicated or sharded along axis 0, got {placement}")
    return slice(start, start + size)


def fill_slots(tensor: Tensor, slots: Tensor, value: float = 0) -> None:
    """Set all elements of some slots to a value, in place.

    Args:
        tensor: As :func:`local_slots` takes it.
        slots: int64: numbers of slots of the whole tensor.
        value: What to set them to.

    Raises:
        ValueError: The tensor is sharded along another axis.
    """
    here = local_slots(tensor)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    mine = slots[(slots >= here.start) & (slots < here.stop)] - here.start
    with torch.no_grad():
        local[mine.to(local.device)] = value
