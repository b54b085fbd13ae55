"""A corpus and a recipe so small that a run takes seconds."""

import json
import logging
import random
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml

from pumice.cli import main

WORDS = "the a red old stone river floats sinks under over light slow water and then of with no".split()


@pytest.fixture(scope="session", autouse=True)
def linkable_torch() -> Iterator[None]:
    """Let torch.compile link in an environment below a folder with a space.

    torch quotes the folders of headers but not those of libraries, at least until 2.13. Without this, pumice runs
    uncompiled there, and what is compiled could not be tested.
    """
    with pytest.MonkeyPatch.context() as patch:
        if " " in torch.__file__:
            from torch._inductor.cpp_builder import BuildOptionsBase

            folders = BuildOptionsBase.get_libraries_dirs
            patch.setattr(BuildOptionsBase, "get_libraries_dirs", lambda self: [*map(shlex.quote, folders(self))])
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Undo what a command did to the logger, which is one for all tests of a process."""
    yield
    logger = logging.getLogger("pumice")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A .jsonl file of 36 distinct documents."""
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("corpus") / "text.jsonl"
    rows = [{"text": f"{number}: " + " ".join(draw.choices(WORDS, k=60))} for number in range(36)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def recipe(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of 14 steps, of which 8 are an epoch, with dropout, data workers and a checkpoint every 4 steps."""
    tree = {
        "model": {"name": "llama-tiny", "config": {"attention_dropout": 0.1}},
        "data": {"path": str(corpus), "seq_len": 32, "validation_fraction": 0.1},
        "method": {"name": "adamw"},
        "trainer": {
            "max_steps": 14,
            "learning_rate": 1e-2,
            "per_device_train_batch_size": 8,
            "eval_steps": 7,
            "save_steps": 4,
            "logging_steps": 2,
            "dataloader_num_workers": 2,
            "save_total_limit": None,
        },
        "output": {"prompt": "the old", "sample_tokens": 8},
    }
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.fixture
def train(recipe: Path) -> Callable[..., int]:
    """``pumice train`` with that recipe, in this process."""

    def call(folder: Path, *words: str) -> int:
        return main(["train", str(recipe), "--output.dir", str(folder), *words])

    return call
