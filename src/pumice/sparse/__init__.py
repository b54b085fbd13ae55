"""Block-sparse layers; torch alone."""

from pumice.sparse.convert import densify, sparsify
from pumice.sparse.distribution import Summary, summary
from pumice.sparse.linear import BlockSparseLinear

__all__ = ["BlockSparseLinear", "Summary", "densify", "sparsify", "summary"]
