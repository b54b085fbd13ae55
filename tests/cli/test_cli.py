import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pumice
from pumice.cli import main
from pumice.train.load import bundled


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "train a language model as a recipe says" in told(capsys)
    assert main(["--version"]) == 0
    assert told(capsys) == pumice.__version__


def test_no_verb_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: pumice VERB" in capsys.readouterr().err


def test_help_of_train_is_made_from_the_dataclasses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    text = told(capsys)
    for part in (
        f"RECIPE is a YAML file or one of: {', '.join(bundled())}",
        "--data.seq_len SEQ_LEN Tokens of a block. (type: int, default: 256)",
        "--trainer.max_steps MAX_STEPS",
        "--trainer.eval_strategy {no,steps,epoch}",
        "--output.prompt PROMPT",
        "sinkgd: SinkGD: balanced gradients",
        "sinkhorn_iters=1",
    ):
        assert part in text, part


def test_module_is_the_program() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pumice", "train", "quickstart", "--trainer.max_step", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "pumice: unknown option --trainer.max_step: did you mean '--trainer.max_steps'?\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quikstart", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("pumice: unknown recipe 'quikstart': did you mean 'quickstart'?\n")


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(source: str, overrides: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pumice.train.load.load", interrupt)
    assert main(["train", "quickstart"]) == 130
    assert capsys.readouterr().err == "pumice: interrupted\n"


def test_words_in_any_order(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("pumice.train.run.run", lambda recipe, resume: seen.append((recipe.trainer, resume)) or 0)
    words = ["--trainer.max_steps", "3", "--resume=auto", str(recipe), "--trainer.learning_rate=-1e-3"]
    assert main(["train", *words]) == 2  # a value may begin with a dash
    assert main(["train", *words[:-1]]) == 0
    assert [(trainer.max_steps, resume) for trainer, resume in seen] == [(3, "auto")]


def test_a_file_that_cannot_be_written(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file" / "run") == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("pumice: ")
