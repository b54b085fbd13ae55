"""Optimizers and what they need; torch alone."""

from pumice.optim.groups import param_groups, routing
from pumice.optim.release import GradientRelease
from pumice.optim.sinkgd import SinkGD
from pumice.optim.smet import SMET
from pumice.optim.table import Routing

__all__ = ["SMET", "GradientRelease", "Routing", "SinkGD", "param_groups", "routing"]
