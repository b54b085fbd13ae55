"""The training methods, by name: each is a set of options and a way to build an optimizer for a model.

A new method joins by :func:`register`; nothing else has to know it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from pumice.errors import UserError, nearest
from pumice.optim import SinkGD


@dataclass(frozen=True)
class Method:
    """A training method.

    Args:
        name: What a recipe calls it.
        summary: One line for the help text.
        options: Frozen dataclass of its options, each with a default.
        build: From a model, a learning rate, a weight decay and such options to an optimizer over the model's
            trainable parameters. An option that is None is left to the optimizer's own default.
    """

    name: str
    summary: str
    options: type
    build: Callable[[nn.Module, float, float, Any], Optimizer]


METHODS: dict[str, Method] = {}


def register(method: Method) -> None:
    """Make a method known by its name.

    Raises:
        ValueError: The name is taken.
    """
    if method.name in METHODS:
        raise ValueError(f"method '{method.name}' is registered already")
    METHODS[method.name] = method


def get(name: str) -> Method:
    """Return the method of that name.

    Raises:
        UserError: There is none; the message names the nearest.
    """
    if name not in METHODS:
        raise UserError(f"unknown method '{name}': {nearest(name, METHODS)}")
    return METHODS[name]


@dataclass(frozen=True)
class AdamWOptions:
    """Options of AdamW.

    Args:
        betas: Decay rates of the two moments; none: the trainer's.
        eps: Added to the root of the second moment; none: the trainer's.
    """

    betas: tuple[float, float] | None = None
    eps: float | None = None


def _adamw(model: nn.Module, lr: float, weight_decay: float, options: AdamWOptions) -> Optimizer:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [entry for entry in trained if entry[1].ndim >= 2]
    vectors = [entry for entry in trained if entry[1].ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, **_given(options))


@dataclass(frozen=True)
class SinkGDOptions:
    """Options of :class:`pumice.optim.SinkGD`, which says more of each.

    Args:
        lr_scale: Factor on the learning rate of balanced matrices; "match_rms_adamw" is 0.2.
        sinkhorn_iters: Balancing iterations of an update.
        warm_start: Start an update's balancing from the column scales of the one before.
        adamw_lr: Learning rate of the AdamW part; none: the trainer's.
        betas: Decay rates of the two moments of the AdamW part; none: the trainer's.
        eps: Added to the root of the AdamW part's second moment; none: the trainer's.
        state_bits: Bits of the AdamW part's moments, 8 or 32.
        stochastic_rounding: Round bfloat16 weights at random instead of to nearest.
        spectral_target: Operator norm of an update, or "sqrt" for the root of d_out / d_in; none: as it comes.
        negligible_rows: Leave rows below this share of the RMS row norm out of balancing.
        base_width: Multiply the learning rate of balanced matrices by base_width / d_in; none: do not.
        nonfinite: What to do about a gradient that is not finite: "error", or "skip" the parameter and warn.
        seed: Seed of the rounding; none: the trainer's.
        overrides: Regular expressions on parameter names, and the rule ("sinkgd" or "adamw") for what they match.
        embeddings: Options with which to balance embeddings and output heads, like lr_scale and negligible_rows; none:
            AdamW trains them.
        compile: Use torch.compile for the update; none: for large models where a compiler works.
    """

    lr_scale: float | Literal["match_rms_adamw"] = 0.05
    sinkhorn_iters: int = 1
    warm_start: bool = True
    adamw_lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    state_bits: int = 8
    stochastic_rounding: bool = True
    spectral_target: float | Literal["sqrt"] | None = None
    negligible_rows: float = 0.0
    base_width: int | None = None
    nonfinite: Literal["error", "skip"] = "error"
    seed: int | None = None
    overrides: dict[str, str] | None = None
    embeddings: dict[str, Any] | None = None
    compile: bool | None = None


def _sinkgd(model: nn.Module, lr: float, weight_decay: float, options: SinkGDOptions) -> Optimizer:
    return SinkGD.from_model(model, lr, weight_decay=weight_decay, **_given(options))


def _given(options: Any) -> dict[str, Any]:
    return {key: value for key, value in asdict(options).items() if value is not None}


register(Method("adamw", "AdamW of torch.optim, 32-bit state; vectors are not decayed", AdamWOptions, _adamw))
register(
    Method(
        "sinkgd", "SinkGD: balanced gradients, no state of weight matrices; AdamW for the rest", SinkGDOptions, _sinkgd
    )
)
