"""Memory of training: bytes before anything is allocated, bytes while it runs, and losses that need fewer."""

from pumice.memory.cards import card_bytes
from pumice.memory.loss import chunked_cross_entropy, use_chunked_loss
from pumice.memory.measure import Measurement, measure
from pumice.memory.plan import Plan, Sharding, plan

__all__ = [
    "Measurement",
    "Plan",
    "Sharding",
    "card_bytes",
    "chunked_cross_entropy",
    "measure",
    "plan",
    "use_chunked_loss",
]
