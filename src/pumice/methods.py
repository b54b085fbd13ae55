"""The training methods, by name: each is a set of options and a way to build an optimizer for a model.

A new method joins by :func:`register`; nothing else has to know it.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from pumice.errors import UserError, nearest
from pumice.optim import SMET, SinkGD
from pumice.sparse import BlockSparseLinear, Topology, sparsify
from pumice.sparse.topology import Grow


@dataclass(frozen=True)
class Method:
    """A training method.

    Args:
        name: What a recipe calls it.
        summary: One line for the help text.
        options: Frozen dataclass of its options, each with a default.
        build: From a model, a learning rate, a weight decay and such options to an optimizer over the model's
            trainable parameters. An option that is None is left to the optimizer's own default.
        prepare: From a model, such options and a seed to the model that is trained, changed in place or wrapped; None:
            the model is trained as it is. It comes before ``build`` and before the model is sharded.
        topology: From a prepared model, such options, the optimizer steps of the run and a seed to its topology; None:
            there is none.
    """

    name: str
    summary: str
    options: type
    build: Callable[[nn.Module, float, float, Any], Optimizer]
    prepare: Callable[[nn.Module, Any, int], nn.Module] | None = None
    topology: Callable[[nn.Module, Any, int, int], Topology] | None = None

    def settings(self, options: Mapping[str, Any]) -> Any:
        """Return ``options`` as an instance of the class of this method's options.

        Raises:
            UserError: One is unknown; the message names the nearest.
        """
        known = [field.name for field in fields(self.options)]
        for key in options:
            if key not in known:
                raise UserError(f"unknown option {key} of {self.name}: {nearest(key, known)}")
        return self.options(**options)


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


@dataclass(frozen=True)
class DenseAdamWOptions(AdamWOptions):
    """Options of AdamW on a dense model.

    Args:
        state_bits: Bits of the moments: 32 (torch.optim.AdamW), or 8.
    """

    state_bits: int = 32


def _dense_adamw(model: nn.Module, lr: float, weight_decay: float, options: DenseAdamWOptions) -> Optimizer:
    if options.state_bits == 32:
        return _adamw(model, lr, weight_decay, options)
    given = _given(options, AdamWOptions)  # without sparse layers, SMET is AdamW
    return SMET.from_model(model, lr, weight_decay=weight_decay, state_bits=options.state_bits, **given)


def _adamw(model: nn.Module, lr: float, weight_decay: float, options: AdamWOptions) -> Optimizer:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [entry for entry in trained if entry[1].ndim >= 2]
    vectors = [entry for entry in trained if entry[1].ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    given = _given(options, AdamWOptions)
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, **given)


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
    return SinkGD.from_model(model, lr, weight_decay=weight_decay, **_given(options, SinkGDOptions))


@dataclass(frozen=True)
class SparseOptions:
    """Which blocks of the linear layers are stored, at the start.

    Args:
        density: Share of the entries of the sparse layers that are active, in (0, 1].
        block_shape: Rows and columns of a block.
        distribution: "uniform", "erk", or regular expressions on names of layers and their own densities.
        targets: Regular expressions on names of the linear layers to make sparse; none: all but the output head.
        keep: Blocks to keep: "magnitude" (the largest), or "random"; none: the largest of a trained model, random ones
            of a new one.
        rescale: Enlarge what is kept so that outputs have the variance that they had; none: in a new model only.
    """

    density: float = 0.4
    block_shape: tuple[int, int] = (1, 64)
    distribution: Literal["uniform", "erk"] | dict[str, float] = "uniform"
    targets: list[str] | None = None
    keep: Literal["magnitude", "random"] | None = None
    rescale: bool | None = None


def _sparsify(model: nn.Module, options: SparseOptions, seed: int) -> nn.Module:
    # transformers notes where a model was loaded from.
    trained = bool(getattr(getattr(model, "config", None), "_name_or_path", ""))
    model = sparsify(
        model,
        options.density,
        options.block_shape,
        options.distribution,
        options.targets,
        seed,
        options.keep or ("magnitude" if trained else "random"),
        (not trained) if options.rescale is None else options.rescale,
    )
    if not any(isinstance(module, BlockSparseLinear) and module.values.requires_grad for module in model.modules()):
        raise UserError(
            "a sparse method trains the weights of sparse layers, but all of them are frozen: unfreeze them, or train "
            "an adapter without a sparse method"
        )
    return model


@dataclass(frozen=True)
class TopologyOptions(SparseOptions):
    """Which blocks are stored, and how they move; see :class:`pumice.sparse.Topology`.

    Args:
        interval: Optimizer steps between two topology updates.
        drop_fraction: Share of active blocks to swap in the first topology update.
        final_drop_fraction: The same at the end; in between it follows half a cosine wave.
        grace: Topology updates for which a newborn block is not dropped; none: the method's.
        start: First step for topology updates: a fraction of the run if at most 1, else a whole step.
        stop: Last step for topology updates: a fraction of the run if at most 1, else a whole step.
        final_share: Share of the blocks that is still active at the end.
    """

    interval: int = 100
    drop_fraction: float = 0.2
    final_drop_fraction: float = 0.005
    grace: int | None = None
    start: float = 0.0
    stop: float = 0.75
    final_share: float = 1.0


def _moving(grow: Grow | None, grace: int) -> Callable[[nn.Module, Any, int, int], Topology]:
    def topology(model: nn.Module, options: Any, total_steps: int, seed: int) -> Topology:
        schedule = _given(options, TopologyOptions, without=SparseOptions)
        return Topology(
            model, **{"grace": grace, "grow": grow or options.grow, **schedule}, total_steps=total_steps, seed=seed
        )

    return topology


@dataclass(frozen=True)
class StaticOptions(SparseOptions, AdamWOptions):
    """Options of training with blocks that do not move, by AdamW."""


@dataclass(frozen=True)
class NaiveOptions(TopologyOptions, AdamWOptions):
    """Options of SET and RigL: moving blocks, and AdamW with one count of steps for all of them."""


@dataclass(frozen=True)
class SMETOptions(TopologyOptions):
    """Moving blocks, and :class:`pumice.optim.SMET`, which says more of its options.

    Args:
        grow: Blocks to grow: "random", or "gradient" (those with the largest gradients).
        warmup_steps: Optimizer steps over which a newborn block's learning rate rises.
        density_scaling: Factor on the learning rate of sparse layers: "sqrt" (density^-1/2), "linear" (1/density) or
            "none".
        betas: Decay rates of the two moments; none: the trainer's.
        eps: Added to the root of the second moment; none: the trainer's.
        state_bits: Bits of the moments, 8 or 32.
        stochastic_rounding: Round bfloat16 weights at random instead of to nearest.
        nonfinite: What to do about a gradient that is not finite: "error", or "skip" the parameter and warn.
        seed: Seed of the rounding; none: the trainer's.
        compile: Use torch.compile for the update; none: for large models where a compiler works.
    """

    grow: Literal["random", "gradient"] = "random"
    warmup_steps: int | None = None
    density_scaling: Literal["sqrt", "linear", "none"] = "sqrt"
    betas: tuple[float, float] | None = None
    eps: float | None = None
    state_bits: int | None = None
    stochastic_rounding: bool = True
    nonfinite: Literal["error", "skip"] = "error"
    seed: int | None = None
    compile: bool | None = None


def _smet(model: nn.Module, lr: float, weight_decay: float, options: SMETOptions) -> Optimizer:
    given = _given(options, SMETOptions, without=TopologyOptions)
    given.pop("grow")
    return SMET.from_model(model, lr, weight_decay=weight_decay, **given)


@dataclass(frozen=True)
class SparseSinkGDOptions(TopologyOptions, SinkGDOptions):
    """Moving blocks, and :class:`pumice.optim.SinkGD` on them.

    Args:
        grow: Blocks to grow: "random", or "gradient" (those with the largest gradients).
        warmup_steps: Optimizer steps over which a newborn block's learning rate rises.
        density_scaling: Factor on the learning rate of sparse layers: "none", "sqrt" (density^-1/2) or "linear".
    """

    grow: Literal["random", "gradient"] = "random"
    warmup_steps: int = 0
    density_scaling: Literal["sqrt", "linear", "none"] = "none"


def _sparse_sinkgd(model: nn.Module, lr: float, weight_decay: float, options: SparseSinkGDOptions) -> Optimizer:
    given = _given(options, SparseSinkGDOptions, without=TopologyOptions)
    given.pop("grow")
    return SinkGD.from_model(model, lr, weight_decay=weight_decay, **given)


def _given(options: Any, of: type, without: type | None = None) -> dict[str, Any]:
    """Return the options that are not None, of those that a class declares and another does not."""
    names = {field.name for field in fields(of)} - {field.name for field in (fields(without) if without else ())}
    return {name: value for name, value in asdict(options).items() if name in names and value is not None}


register(Method("adamw", "AdamW, by default of torch.optim; vectors are not decayed", DenseAdamWOptions, _dense_adamw))
register(
    Method(
        "sinkgd", "SinkGD: balanced gradients, no state of weight matrices; AdamW for the rest", SinkGDOptions, _sinkgd
    )
)
register(
    Method(
        "smet",
        "SMET: moving blocks of the weights; each warms up by its own age",
        SMETOptions,
        _smet,
        _sparsify,
        _moving(None, grace=2),
    )
)
register(
    Method(
        "sinkgd-sparse",
        "SinkGD on moving blocks of the weights: no state but their column scales",
        SparseSinkGDOptions,
        _sparse_sinkgd,
        _sparsify,
        _moving(None, grace=2),
    )
)
_SET, _RIGL = _moving("random", grace=0), _moving("gradient", grace=0)
register(Method("set", "SET: moving blocks, grown at random; AdamW", NaiveOptions, _adamw, _sparsify, _SET))
register(Method("rigl", "RigL: moving blocks, grown by gradient; AdamW", NaiveOptions, _adamw, _sparsify, _RIGL))
register(Method("static-sparse", "blocks that are chosen once; AdamW", StaticOptions, _adamw, _sparsify))
