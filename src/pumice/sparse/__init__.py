"""Block-sparse layers, and training in which the set of active blocks moves; torch alone."""

from pumice.sparse.convert import densify, sparsify
from pumice.sparse.diagnostics import Monitor, NewbornProbe, Spike, Spikes
from pumice.sparse.distribution import Summary, summary
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.topology import Topology

__all__ = [
    "BlockSparseLinear",
    "Monitor",
    "NewbornProbe",
    "Spike",
    "Spikes",
    "Summary",
    "Topology",
    "densify",
    "sparsify",
    "summary",
]
