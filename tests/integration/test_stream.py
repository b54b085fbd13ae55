"""Training on a stream: the same batches again after an interruption, and nothing that cannot work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pumice.train.tokenizer import train_tokenizer


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    train_tokenizer(["the old stone floats under water"] * 3, 300).save_pretrained(tmp_path / "tokenizer")
    return [
        *("--data.streaming", "true", "--data.validation_documents", "4", "--data.shuffle_buffer", "7"),
        *("--tokenizer.path", str(tmp_path / "tokenizer"), "--trainer.dataloader_num_workers", "1"),
    ]


def test_a_resumed_stream_goes_on_where_it_was(words: list[str], train: Callable[..., int], tmp_path: Path) -> None:
    """Step 8 of 14 lies in the second pass over the data."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert train(whole, *words) == 0
    assert train(resumed, *words, "--resume", str(whole / "checkpoint-8")) == 0
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (whole, resumed))
    assert all(one[name].equal(other[name]) for name in one)
    ours, theirs = (json.loads((folder / "summary.json").read_text()) for folder in (whole, resumed))
    assert ours["batches_sha256"] == theirs["batches_sha256"]
    assert ours["tokens"] == 14 * 8 * 32
    shutil.rmtree(whole)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--trainer.max_steps", "-1"], "a stream has no length: set trainer.max_steps"),
        (["--tokenizer.path", "null"], "no tokenizer is trained on a stream: set tokenizer.path"),
        (["--trainer.dataloader_num_workers", "2"], "dataloader_num_workers must be 0 or 1, got 2"),
        (["--data.validation_documents", "99"], "has 36 documents, and data.validation_documents holds out 99"),
    ],
)
def test_what_a_stream_cannot_do(
    change: list[str],
    sentence: str,
    words: list[str],
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(tmp_path / "run", *words, *change) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
