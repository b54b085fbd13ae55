"""The recipe's ``trainer`` section: a frozen dataclass with the fields of ``transformers.TrainingArguments``.

Names, types and help come from TrainingArguments; the defaults too, except those of ``DEFAULTS``. Left out is what a
recipe says elsewhere.
"""

import dataclasses
import enum
import functools
import math
import operator
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.training_args import TrainingArguments

from pumice.errors import UserError

DEFAULTS: dict[str, Any] = {
    "seed": 42,
    "learning_rate": 1e-3,
    "weight_decay": 0.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 16,
    "logging_steps": 10,
    "logging_nan_inf_filter": False,  # a loss that is not a number must be seen
    "eval_strategy": "steps",
    "eval_steps": 100,
    "eval_on_start": True,
    "save_steps": 100,
    "save_total_limit": 2,
    "report_to": ["tensorboard"],
    "ddp_find_unused_parameters": False,  # True walks the graph at every step, and dense models have none
}

# Fields of TrainingArguments that a recipe sets in another place, and that place.
ELSEWHERE = {
    "output_dir": "output.dir",
    "logging_dir": "output.dir",
    "optim": "method.name",
    "optim_args": "method.options",
    "optim_target_modules": "method.options",
    "resume_from_checkpoint": "--resume",
    "parallelism_config": "the configuration of accelerate",
}


def _described() -> tuple[list[tuple[str, Any, Any]], str]:
    """Return the fields for ``make_dataclass`` and a docstring that describes them."""
    hints = typing.get_type_hints(TrainingArguments)
    fields, lines = [], ["Any field of transformers.TrainingArguments.", "", "Args:"]
    for field in dataclasses.fields(TrainingArguments):
        if not field.init or field.name in ELSEWHERE:
            continue
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        default = DEFAULTS.get(field.name, made.value if isinstance(made, enum.Enum) else made)
        mutable = isinstance(default, list | dict)
        declared = dataclasses.field(default_factory=default.copy) if mutable else dataclasses.field(default=default)
        fields.append((field.name, _plain(hints[field.name]), declared))
        text = " ".join(str(field.metadata.get("help", "")).split())
        lines.append(f"    {field.name}: {text.partition('. ')[0].rstrip('.')}.")
    return fields, "\n".join(lines)


def _plain(hint: Any) -> Any:
    """Replace an enumeration by its values, and a dict of nothing in particular by one of plain values."""
    members = typing.get_args(hint)
    for member in (hint, *members):
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return Literal[tuple(choice.value for choice in member)]
    if dict in members:
        return functools.reduce(operator.or_, (dict[str, Any] if member is dict else member for member in members))
    return hint


if TYPE_CHECKING:
    TrainerConfig = TrainingArguments
else:
    _FIELDS, _DOC = _described()

    def _check(self: Any) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise UserError(f"trainer.learning_rate must be a finite number above 0, got {self.learning_rate}")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise UserError(f"trainer.weight_decay must be a finite number of at least 0, got {self.weight_decay}")
        if self.max_steps != -1 and self.max_steps < 1:
            raise UserError(
                "trainer.max_steps must be at least 1, or -1 to train for trainer.num_train_epochs, "
                f"got {self.max_steps}"
            )
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"trainer.{name} must be at least 1, got {value}")
        if self.dataloader_num_workers < 0:
            raise UserError(f"trainer.dataloader_num_workers must not be negative, got {self.dataloader_num_workers}")

    TrainerConfig = dataclasses.make_dataclass(
        "TrainerConfig", _FIELDS, frozen=True, namespace={"__doc__": _DOC, "__post_init__": _check}
    )


def training_arguments(trainer: TrainerConfig, output_dir: Path) -> TrainingArguments:
    """Return transformers' arguments for a recipe's ``trainer`` section.

    Raises:
        UserError: TrainingArguments refuses a value or a combination of values.
    """
    values = {field.name: getattr(trainer, field.name) for field in dataclasses.fields(trainer)}
    if not torch.accelerator.is_available():
        values["dataloader_pin_memory"] = False  # would do nothing but warn
    try:
        return TrainingArguments(output_dir=str(output_dir), **values)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"trainer: {error}") from error
