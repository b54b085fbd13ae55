"""A mistake of the user is one sentence on stderr and exit code 2, before anything is trained or left behind."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pumice.cli import main
from pumice.train.load import bundled
from pumice.train.tokenizer import train_tokenizer

CASES = {
    "no recipe": (["train"], f"one recipe, please, not none: a YAML file or one of: {', '.join(bundled())}"),
    "two recipes": (
        ["train", "a", "b"],
        f"one recipe, please, not a and b: a YAML file or one of: {', '.join(bundled())}",
    ),
    "unknown verb": (["trian"], "unknown verb 'trian': did you mean 'train'?"),
    "unknown recipe": (["train", "quickstat"], "unknown recipe 'quickstat': did you mean 'quickstart'?"),
    "resume without a value": (
        ["train", "quickstart", "--resume"],
        "--resume needs a value: auto, never or the path of a checkpoint",
    ),
}


@pytest.mark.parametrize(("words", "sentence"), CASES.values(), ids=CASES)
def test_wrong_command(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"pumice: {sentence}\n"


@pytest.fixture
def refused(train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a training that must be refused, and return the sentence."""

    def call(*words: str) -> str:
        folder = tmp_path / "run"
        assert train(folder, *words) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("pumice: ")
        assert err.count("\n") == 1, err
        assert not (folder / "metrics.jsonl").exists()
        assert not (folder / "recipe.yaml").exists()
        return err.removeprefix("pumice: ").rstrip("\n")

    return call


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trainer.learning_rate", "0"], "trainer.learning_rate must be a finite number above 0, got 0.0"),
        (["--trainer.learning_rate", "-1"], "trainer.learning_rate must be a finite number above 0, got -1.0"),
        (["--trainer.learning_rate", "nan"], "trainer.learning_rate must be a number, got nan"),
        (["--trainer.learning_rate", ".nan"], "trainer.learning_rate must be a finite number above 0, got nan"),
        (["--trainer.weight_decay", "-1"], "trainer.weight_decay must be a finite number of at least 0, got -1.0"),
        (["--data.seq_len", "1"], "data.seq_len must be at least 2 (a token and the next one), got 1"),
        (["--data.validation_fraction", "1"], "data.validation_fraction must be between 0 and 1, got 1.0"),
        (["--data.max_documents", "1"], "data.max_documents must be at least 2 (one to train on, one held out), got 1"),
        (["--output.sample_tokens", "-1"], "output.sample_tokens must not be negative, got -1"),
        (["--trainer.save_steps", "1.5"], "trainer: --save_steps must be an integer if bigger than 1: 1.5"),
        (["--model.name", "lama-tiny"], "unknown model 'lama-tiny': did you mean 'llama-tiny'?"),
        (
            ["--data.seq_len", "1024"],
            "data.seq_len is 1024, more than the model's 256 positions: "
            "lower it or raise model.config.max_position_embeddings",
        ),
        (
            ["--method.options.betas", "[0.9, 0.95]", "--trainer.adam_beta2", "0.99"],
            "method option betas is (0.9, 0.95) but trainer.(adam_beta1, adam_beta2) is (0.9, 0.99): "
            "set only the latter",
        ),
    ],
)
def test_wrong_setting(words: list[str], sentence: str, refused: Callable[..., str]) -> None:
    assert refused(*words) == sentence


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("state_bits", "7", "state_bits"),
        ("sinkhorn_iters", "0", "sinkhorn_iters"),
        ("overrides", "{nothing: adamw}", "nothing"),
    ],
)
def test_option_that_the_optimizer_refuses(option: str, value: str, named: str, refused: Callable[..., str]) -> None:
    said = refused("--method.name", "sinkgd", f"--method.options.{option}", value, "--data.path", "/not/read/yet")
    assert named in said
    assert "/not/read/yet" not in said


def test_missing_file(refused: Callable[..., str], tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    assert f"data.path '{missing}' does not exist" in refused("--data.path", str(missing))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("empty.txt", " \n", "holds no text"),
        ("short.txt", "a\nb\nc", "less than one block of data.seq_len 32"),
        ("bad.jsonl", '{"text": "fine"}\n{"text": \n', "bad.jsonl', line 2: not JSON"),
        ("column.jsonl", '{"body": "b", "author": "a"}\n', "no column 'text' among author, body"),
    ],
)
def test_data(name: str, text: str, sentence: str, refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert sentence in refused("--data.path", str(tmp_path / name))


def test_tokenizer_larger_than_the_model(refused: Callable[..., str], tmp_path: Path) -> None:
    train_tokenizer(["the old stone floats under water " * 9], 300).save_pretrained(tmp_path / "tokenizer")
    words = ["--tokenizer.path", str(tmp_path / "tokenizer"), "--model.config.vocab_size", "270"]
    assert "exceeds the model's of 270" in refused(*words)


def test_output_folder_of_another_run(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    short = ["--trainer.max_steps", "2", "--trainer.eval_strategy", "no", "--trainer.dataloader_num_workers", "0"]
    assert train(folder, *short) == 0
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    capsys.readouterr()
    for words, sentence in (
        (short, f"output.dir '{folder}' already holds a run: continue it with --resume auto, or choose another"),
        ([*short, "--resume", "auto", "--trainer.seed", "5"], "of another recipe, which differs in trainer.seed"),
        ([*short, "--resume", str(tmp_path / "none")], "already holds a run"),
    ):
        assert train(folder, *words) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


def test_folder_of_an_attempt_that_was_refused_is_free(
    refused: Callable[..., str], train: Callable[..., int], corpus: Path, tmp_path: Path
) -> None:
    """Its tokenizer, made of other text, is not kept."""
    other = tmp_path / "short.txt"
    other.write_text("x y z\n" * 20)
    refused("--data.path", str(other))
    short = ["--trainer.max_steps", "1", "--trainer.eval_strategy", "no", "--trainer.dataloader_num_workers", "0"]
    assert train(tmp_path / "run", *short) == 0
    assert train(tmp_path / "fresh", *short) == 0
    ours, theirs = ((tmp_path / name / "tokenizer" / "tokenizer.json").read_text() for name in ("run", "fresh"))
    assert ours == theirs
