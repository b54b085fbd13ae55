from pathlib import Path
from typing import Any

import pytest

from pumice.errors import UserError
from pumice.train.arguments import DEFAULTS, TrainerConfig, training_arguments


def test_values_reach_transformers(tmp_path: Path) -> None:
    config = TrainerConfig(max_steps=7, lr_scheduler_type="linear", gradient_accumulation_steps=3, seed=5)
    args = training_arguments(config, tmp_path)
    assert (args.max_steps, args.lr_scheduler_type.value, args.gradient_accumulation_steps) == (7, "linear", 3)
    assert (args.seed, args.output_dir) == (5, str(tmp_path))
    assert args.per_device_train_batch_size == DEFAULTS["per_device_train_batch_size"]


def test_mutable_defaults_are_not_shared() -> None:
    assert TrainerConfig().report_to is not TrainerConfig().report_to


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("weight_decay", -0.1),
        ("max_steps", 0),
        ("per_device_train_batch_size", 0),
        ("gradient_accumulation_steps", 0),
        ("dataloader_num_workers", -1),
    ],
)
def test_impossible_value(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^trainer\.{field} must .* got {value}$"):
        TrainerConfig(**{field: value})


def test_what_transformers_refuses_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="load_best_model_at_end requires the save and eval strategy to match"):
        training_arguments(TrainerConfig(load_best_model_at_end=True, eval_strategy="epoch"), tmp_path)
