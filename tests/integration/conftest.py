"""A model folder, data files and a way to run the files in examples/, for the tests of other software."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pumice.train.model import build_config, build_model
from pumice.train.recipe import ModelConfig
from pumice.train.tokenizer import train_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="session")
def model_folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer that has a chat template and a padding token."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    tokenizer = train_tokenizer(texts, 300)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    build_model(build_config(ModelConfig("llama-tiny"), tokenizer), seed=0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def rows_of(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """From a name and a function of a short text and its number to a .jsonl file with a row for each text."""

    def write(name: str, make: Callable[[str, int], dict[str, Any]]) -> Path:
        texts = [json.loads(line)["text"][:80] for line in corpus.read_text(encoding="utf-8").splitlines()[:12]]
        path = tmp_path_factory.mktemp(name) / f"{name}.jsonl"
        path.write_text("".join(json.dumps(make(text, n)) + "\n" for n, text in enumerate(texts)), encoding="utf-8")
        return path

    return write


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run an example in this process with words of a command line; return its variables."""

    def run(name: str, *words: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        torch.manual_seed(0)
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run


TRAINER_WORDS = "--use_cpu true --report_to none --disable_tqdm true --per_device_train_batch_size 2 --save_steps 3"
TRAINER_WORDS += " --max_steps 6 --learning_rate 0.01 --logging_steps 3"


@pytest.fixture
def resumes(run_example: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a Trainer example for six steps, again from its checkpoint of step 3, and compare what the two saved."""

    def check(name: str, *words: object) -> dict[str, Any]:
        usual = [*TRAINER_WORDS.split(), *words]
        whole = run_example(name, *usual, "--output_dir", tmp_path / "whole")
        checkpoint = tmp_path / "whole" / "checkpoint-3"
        run_example(name, *usual, "--output_dir", tmp_path / "again", "--resume_from_checkpoint", checkpoint)
        one, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "again"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
        halfway = load_file(checkpoint / "model.safetensors")
        assert any(not torch.equal(one[key], halfway[key]) for key in one.keys() & halfway.keys())
        return whole

    return check
