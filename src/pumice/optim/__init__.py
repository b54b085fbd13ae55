"""Optimizers and what they need; torch alone."""

from pumice.optim.groups import param_groups, routing
from pumice.optim.table import Routing

__all__ = ["Routing", "param_groups", "routing"]
