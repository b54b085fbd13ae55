"""Validation loss averaged over tokens, by Trainer's own hooks.

Trainer averages the mean losses of batches, which weighs the tokens of a small batch more. Here every sequence is
reduced to the sum of its tokens' losses and their count on the device, and only these two numbers are gathered.
"""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.trainer_utils import EvalPrediction

_NO_TARGET = -100


def sequence_losses(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Reduce a batch to one row per sequence; Trainer's ``preprocess_logits_for_metrics``.

    Args:
        logits: (batch, length, vocabulary), alone or first of a tuple.
        labels: (batch, length); -100 where there is no target.

    Returns:
        (batch, 2), float64: summed loss in nats, and number of targets. Position i predicts label i + 1.
    """
    logits = logits[0] if isinstance(logits, tuple) else logits
    targets = labels[:, 1:]
    losses = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2).float(), targets, ignore_index=_NO_TARGET, reduction="none"
    )
    return torch.stack([losses.sum(1, dtype=torch.float64), (targets != _NO_TARGET).sum(1).double()], dim=1)


def token_average(prediction: EvalPrediction) -> dict[str, float]:
    """Average over all tokens; Trainer's ``compute_metrics``.

    Returns:
        ``loss`` in nats per token, which takes the place of Trainer's own, and ``perplexity``.
    """
    loss_sum, tokens = np.asarray(prediction.predictions).sum(axis=0).tolist()
    loss = loss_sum / tokens
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # beyond, a float64 overflows
