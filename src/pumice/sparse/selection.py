"""Choosing blocks by score, so that ties and random draws come out the same wherever they are made."""

import hashlib

import torch
from torch import Tensor


def largest(scores: Tensor, count: int) -> Tensor:
    """Return the positions of the ``count`` largest scores, in ascending order; among equal scores the first win.

    Args:
        scores: (n,); NaN counts as zero.
        count: From 0 to n.

    Returns:
        int64, (count,).
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    scores = scores.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    threshold = scores.topk(count, sorted=False).values.min()
    above = (scores > threshold).nonzero().flatten()
    ties = (scores == threshold).nonzero().flatten()[: count - above.shape[0]]
    return torch.cat((above, ties)).sort().values


def random_scores(count: int, seed: int, layer: str, update: int) -> Tensor:
    """Draw scores that depend on the arguments alone: float32 on the CPU, (count,), uniform in [0, 1).

    Args:
        count: Number of scores.
        seed: Of the run.
        layer: Name of the layer.
        update: Number of the topology update; 0 is the choice at the start.
    """
    digest = hashlib.blake2b(f"{seed}/{update}/{layer}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu")
