"""pumice's methods in ``transformers.Trainer``, and in what is built on it (TRL, Axolotl).

>>> pair = optimizer_cls_and_kwargs("sinkgd", args)
>>> Trainer(model, args, optimizer_cls_and_kwargs=pair, callbacks=[ReportOptimizer()])
"""

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers.trainer_callback import TrainerCallback

from pumice import methods
from pumice.errors import UserError
from pumice.integrations.hosts import require
from pumice.integrations.topology import TopologyCallback
from pumice.optim import GradientRelease, SinkGD, routing
from pumice.optim.table import Total
from pumice.sparse import summary

logger = logging.getLogger(__name__)

# Options that no method has: they are fields of TrainingArguments.
TRAINERS_OWN = {"lr": "learning_rate", "learning_rate": "learning_rate", "weight_decay": "weight_decay"}
_ADAM = {"betas": "(adam_beta1, adam_beta2)", "eps": "adam_epsilon"}


class OptimizerFactory:
    """What Trainer takes for an optimizer class: it is made without arguments and then called with the model."""

    def __call__(
        self,
        model: nn.Module,
        training_args: Any = None,
        *,
        method: str = "sinkgd",
        release: bool = False,
        clip: float | None = None,
        **options: Any,
    ) -> Optimizer:
        """Build the optimizer of a method for a model.

        Args:
            model: The model to train, before or after sharding.
            training_args: Where ``lr``, ``weight_decay``, betas, eps and seed come from unless given (Axolotl passes
                it as the second argument; Trainer does not).
            method: Name of a method.
            release: Update in the backward pass and free the gradients: :class:`pumice.optim.GradientRelease`.
            clip: Of the same, the largest norm of a single parameter's gradient; none: that of ``training_args``.
            options: ``lr``, ``weight_decay`` and the method's options.

        Raises:
            UserError: Unknown method or option, a setting that disagrees with ``training_args``, or no ``lr``.
        """
        if training_args is not None:
            options = settle(method, training_args, options)
            clip = _release_clip(training_args) if release and clip is None else clip
        lr, weight_decay = options.pop("lr", None), options.pop("weight_decay", 0.0)
        if lr is None:
            raise UserError("the optimizer needs lr: pass it, or make the pair with optimizer_cls_and_kwargs")
        chosen = methods.get(method)
        optimizer = chosen.build(model, lr, weight_decay, chosen.settings(options))
        if release:
            GradientRelease(optimizer, clip=clip, norm=True)
        return optimizer


def optimizer_cls_and_kwargs(
    method: str, args: Any, *, release: bool = False, **options: Any
) -> tuple[type[Any], dict[str, Any]]:
    """Return the pair that ``Trainer(optimizer_cls_and_kwargs=...)`` takes.

    Trainer does not hand its learning rate, weight decay, betas and epsilon to such an optimizer, so they are
    taken from ``args`` here. Set them there and nowhere else.

    Args:
        method: Name of a method.
        args: The TrainingArguments of the same Trainer.
        release: Update in the backward pass and free the gradients: :class:`pumice.optim.GradientRelease`. Trainer
            then finds no gradients and logs a ``grad_norm`` of 0; the true one is ``grad_norm`` of that object.
            ``args.max_grad_norm`` limits the gradient of each parameter by itself; 0 does not clip.
        options: The method's options.

    Raises:
        UserError: Unknown method, an option that disagrees with ``args``, gradients that cannot be released, or a
            transformers that is too old.
    """
    require("transformers", "5.2")
    released = {"release": True, "clip": _release_clip(args)} if release else {}
    return OptimizerFactory, {"method": method, **released, **settle(method, args, options)}


def _release_clip(args: Any) -> float | None:
    """Return the norm to which gradients are clipped where they are released; raise if ``args`` rule release out."""
    if args.gradient_accumulation_steps > 1:
        raise UserError(
            f"gradient release cannot accumulate gradients, got gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps}: set it to 1 and raise per_device_train_batch_size instead, "
            "with gradient_checkpointing if memory is short, or train with a smaller learning rate"
        )
    if args.fp16:
        raise UserError("gradient release does not work with fp16, whose loss scaling needs the gradients: use bf16")
    return args.max_grad_norm or None


def prepare_model(method: str, model: nn.Module, args: Any, **options: Any) -> tuple[nn.Module, list[TopologyCallback]]:
    """Make a model what a method trains, before a Trainer is built with it; a sparse method needs that.

    >>> model, callbacks = prepare_model("smet", model, args, density=0.25)
    >>> pair = optimizer_cls_and_kwargs("smet", args, density=0.25)
    >>> Trainer(model, args, optimizer_cls_and_kwargs=pair, callbacks=callbacks)

    Args:
        method: Name of a method.
        model: The model, which may be changed in place.
        args: The TrainingArguments of the Trainer.
        options: The method's options, the same as for :func:`optimizer_cls_and_kwargs`.

    Returns:
        The model to train, and callbacks for the Trainer.

    Raises:
        UserError: Unknown method or option, one that is not possible for the model, or sparse layers that would not
            train.
    """
    chosen = methods.get(method)
    settings = chosen.settings({key: value for key, value in options.items() if key not in TRAINERS_OWN})
    if chosen.prepare is not None:
        model = chosen.prepare(model, settings, args.seed)
    if (topology := chosen.topology) is None:
        return model, []
    # What a topology refuses is refused now; if the length of the run is not known yet, as for a long one.
    topology(model, settings, args.max_steps if args.max_steps > 0 else sys.maxsize, args.seed)
    return model, [TopologyCallback(lambda model, total_steps: topology(model, settings, total_steps, args.seed))]


def settle(method: str, args: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's options with what ``args`` decides: lr, weight_decay and, if the method has them, more.

    Args:
        method: Name of a method.
        args: TrainingArguments, or any dataclass with the same fields.
        options: The method's options. ``lr`` and ``weight_decay`` may be among them if they equal those of ``args``;
            ``betas`` and ``eps`` win over values that ``args`` has by default.

    Raises:
        UserError: Unknown method, or an option that disagrees with ``args``.
    """
    settled = dict(options)
    for option, field in TRAINERS_OWN.items():
        _agree(option, settled.pop(option, None), field, getattr(args, field))
    known = {field.name for field in dataclasses.fields(methods.get(method).options)}
    usual = {field.name: field.default for field in dataclasses.fields(args)}
    for option, theirs, default in (
        ("betas", (args.adam_beta1, args.adam_beta2), (usual["adam_beta1"], usual["adam_beta2"])),
        ("eps", args.adam_epsilon, usual["adam_epsilon"]),
    ):
        if (ours := settled.get(option)) is not None and theirs != default:
            _agree(option, tuple(ours) if option == "betas" else ours, _ADAM[option], theirs)
        elif ours is None and option in known:
            settled[option] = theirs
    if "seed" in known and settled.get("seed") is None:
        settled["seed"] = args.seed
    return {"lr": args.learning_rate, "weight_decay": args.weight_decay, **settled}


def _agree(option: str, ours: Any, field: str, theirs: Any) -> None:
    if ours is not None and ours != theirs:
        raise UserError(f"method option {option} is {ours} but trainer.{field} is {theirs}: set only the latter")


class ReportOptimizer(TrainerCallback):
    """Logs, when training begins, which optimizer really runs, how it routes parameters, and what is sparse.

    The line on the optimizer is shown in any case, on stderr where logging shows nothing of level INFO.

    Args:
        overrides: The method's option of that name.
        embeddings: The same.
    """

    def __init__(self, overrides: Mapping[str, str] | None = None, embeddings: Mapping[str, Any] | None = None) -> None:
        self._how = overrides, embeddings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log at level INFO on the main process."""
        if state.is_world_process_zero:
            live = describe(kwargs["optimizer"])
            if logger.isEnabledFor(logging.INFO):
                logger.info(live)
            else:
                print(live, file=sys.stderr)
            if isinstance(_inner(kwargs["optimizer"]), SinkGD):
                logger.info("%s", routing(kwargs["model"], *self._how))
            if (sparse := summary(kwargs["model"])).layers:
                logger.info("%s", sparse)


def describe(optimizer: Optimizer) -> str:
    """Return one line on a live optimizer, wrapped by accelerate or not: its class, and what each rule trains."""
    inner = _inner(optimizer)
    totals: dict[str, Total] = {}
    for group in inner.param_groups:
        rule, params = group.get("rule", type(inner).__name__.lower()), group["params"]
        elements, size = sum(p.numel() for p in params), sum(p.nbytes for p in params)
        old = totals.get(rule, Total(0, 0, 0))
        totals[rule] = Total(old.parameters + len(params), old.elements + elements, old.bytes + size)
    routed = ", ".join(
        f"{rule}: {total.parameters:,} tensors, {total.elements:,} weights, {total.bytes / 2**30:.3f} GiB"
        for rule, total in totals.items()
    )
    return f"optimizer {type(inner).__module__}.{type(inner).__qualname__} ({routed})"


def _inner(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer without accelerate's wrapper."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
