"""The README's code runs, its commands parse, and its recipe is one."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, TrainingArguments

from pumice import cli
from pumice.train.load import load
from pumice.train.model import build_config, build_model
from pumice.train.recipe import ModelConfig

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[list[str]]:
    lines = (line for block in blocks("sh") for line in block.splitlines())
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True))[0] == program]


@pytest.fixture
def model() -> PreTrainedModel:
    return build_model(build_config(ModelConfig("llama-tiny")), seed=0)


@pytest.fixture
def surroundings(model: PreTrainedModel, tmp_path: Path) -> dict[str, Any]:
    """What the README leaves to its reader: a model and batches."""
    ids = torch.arange(64).reshape(2, 32)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, learning_rate=1e-3, use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids.tolist()])
    return {"model": model, "batches": [{"input_ids": ids, "labels": ids}] * 8, "blocks": rows, "args": arguments}


def test_the_training_loop_trains(model: PreTrainedModel, surroundings: dict[str, Any]) -> None:
    with torch.no_grad():
        before = model(**surroundings["batches"][0]).loss.item()
    exec(blocks("python")[0], surroundings)
    assert model(**surroundings["batches"][0]).loss.item() < before
    assert type(surroundings["optimizer"]).__module__.startswith("pumice.")


def test_the_trainer_trains_every_weight(model: PreTrainedModel, surroundings: dict[str, Any]) -> None:
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    exec(blocks("python")[1], surroundings)
    surroundings["trainer"].train()
    assert all(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_the_sparse_lines_train(surroundings: dict[str, Any]) -> None:
    config = ModelConfig("llama-tiny", {"hidden_size": 64})  # a block of (1, 64) fits
    surroundings["model"] = model = build_model(build_config(config), seed=0)
    exec(blocks("python")[2], surroundings)
    optimizer, topology = surroundings["optimizer"], surroundings["topology"]
    losses = []
    for batch in surroundings["batches"]:
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        topology.step(optimizer)
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert (topology.steps, len(topology.layers)) == (8, 14)


def test_the_recipe_is_one(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    recipe = load(str(path))
    assert (recipe.data.seq_len, recipe.tokenizer.vocab_size, recipe.trainer.learning_rate) == (512, 16000, 2e-3)
    assert build_config(recipe.model).max_position_embeddings == recipe.data.seq_len


def test_pumice_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    calls = []
    monkeypatch.setattr("pumice.train.run.run", lambda recipe, resume: calls.append((recipe, resume)) or 0)
    for words in commands("pumice"):
        assert cli.main(words) == 0, words
    assert len(calls) == len(commands("pumice")) - 1  # --help does not run
    assert {(recipe.method.name, resume) for recipe, resume in calls} == {
        ("sinkgd", "never"),
        ("sinkgd", "auto"),
        ("adamw", "never"),
    }


def test_make_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert [words[0] for words in commands("make")] == ["quickstart", "test"]
    assert targets >= {"quickstart", "test", "check", "lint", "types", "contract", "pins", "clean"}


def test_linked_files_exist() -> None:
    linked = [target for target in re.findall(r"\]\(([^)]+)\)", README) if "://" not in target]
    assert linked
    assert all((ROOT / target).is_file() for target in linked)
