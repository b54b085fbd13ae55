"""Recipes of published experiments: their budgets, as docs/recipes.md lists them, and a step at full architecture."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pumice.integrations.transformers import optimizer_cls_and_kwargs, prepare_model
from pumice.train.arguments import training_arguments
from pumice.train.load import bundled, load
from pumice.train.model import build_config, build_model

DOCUMENT = Path(__file__).parents[3] / "docs" / "recipes.md"
PUBLISHED = [name for name in bundled() if name.startswith(("c4-", "owt-"))]
WEIGHTS, GRADIENT, MOMENTS = 4, 4, 8  # bytes of a weight in float32, with AdamW


def row(name: str) -> str:
    recipe = load(name)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(build_config(recipe.model)).num_parameters()
    trainer = recipe.trainer
    batch = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps * recipe.data.seq_len
    tokens = trainer.max_steps * batch
    flops = 6 * weights * tokens
    memory = (WEIGHTS + GRADIENT + MOMENTS) * weights / 2**30
    return (
        f"| `{name}` | {weights / 1e6:,.0f} | {trainer.learning_rate:g} | {trainer.max_steps:,} | {tokens / 1e9:.2f} "
        f"| {flops:.1e} | {flops / 1e14 / 3600:,.1f} | {memory:.1f} |"
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_budget(name: str) -> None:
    recipe = load(name)
    trainer = recipe.trainer
    assert trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps * recipe.data.seq_len == 131_072
    assert row(name) in DOCUMENT.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "-60m-" in name])
def test_a_step_at_full_architecture(name: str, tmp_path: Path) -> None:
    recipe = load(name, ["--trainer.bf16", "false"])
    args = training_arguments(recipe.trainer, tmp_path)
    model, _ = prepare_model(
        recipe.method.name, build_model(build_config(recipe.model), seed=0), args, **recipe.method.options
    )
    factory, kwargs = optimizer_cls_and_kwargs(recipe.method.name, args, **recipe.method.options)
    optimizer = factory()(model, **kwargs)
    ids = torch.arange(16)[None]
    losses = []
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        losses.append(float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
