"""An interrupted run of a sparse method ends as one that was left alone, and takes up no other's checkpoint."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pumice.cli import main
from tests.integration.test_resume import figures, same_weights, start_slowly

SPARSE = ["--output.sample_tokens", "0", "--method.options.density", "0.5", "--method.options.block_shape", "[1, 16]"]
MOVING = [*SPARSE, "--method.options.interval", "3", "--method.options.stop", "1.0"]
SMET = ["--method.name", "smet", *MOVING, "--method.options.warmup_steps", "2"]
GRADIENT = [*SMET, "--method.options.grow", "gradient", "--method.options.final_share", "0.5"]
RIGL = ["--method.name", "rigl", *MOVING, "--trainer.bf16", "true", "--trainer.use_cpu", "true"]
SHORT = ["--trainer.max_steps", "4", "--trainer.save_strategy", "no", "--trainer.dataloader_num_workers", "0"]


@pytest.fixture(scope="module", params=[GRADIENT, RIGL], ids=["smet", "rigl"])
def whole(
    request: pytest.FixtureRequest, recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A run that is left alone, with topology updates after steps 3, 6, 9 and 12, and the words that made it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = [*request.param, "--trainer.dataloader_num_workers", "0"]
    assert main(["train", str(recipe), "--output.dir", str(folder), *words]) == 0
    return folder, request.param


def test_continued_run_is_the_same_bit_for_bit(
    whole: tuple[Path, list[str]], train: Callable[..., int], tmp_path: Path
) -> None:
    """Across the update after step 9, with that after step 6 not reported yet and its newborns not grown up."""
    left, words = whole
    folder = tmp_path / "run"
    shutil.copytree(left, folder)
    for name in ("model", "checkpoint-12", "checkpoint-14"):
        shutil.rmtree(folder / name)
    (folder / "summary.json").unlink()
    assert train(folder, *words, "--trainer.dataloader_num_workers", "0", "--resume", "auto") == 0
    assert same_weights(left, folder)
    assert figures(left) == figures(folder)


@pytest.mark.parametrize("whole", [GRADIENT], ids=["smet"], indirect=True)
def test_killed_after_the_last_step(whole: tuple[Path, list[str]], train: Callable[..., int], tmp_path: Path) -> None:
    left, words = whole
    folder = tmp_path / "run"
    shutil.copytree(left, folder)
    drawn = {path.name: path.read_bytes() for path in folder.glob("*.png")}
    for name in ("summary.json", *drawn):
        (folder / name).unlink()
    shutil.rmtree(folder / "model")
    assert train(folder, *words, "--trainer.dataloader_num_workers", "0", "--resume", "auto") == 0
    assert same_weights(left, folder)
    assert figures(left) == figures(folder)
    assert {path.name: path.read_bytes() for path in folder.glob("*.png")} == drawn


def test_stopped_by_a_signal(recipe: Path, train: Callable[..., int], tmp_path: Path) -> None:
    folder, alone, marker = tmp_path / "run", tmp_path / "alone", tmp_path / "training"
    words = [*SMET, "--trainer.save_strategy", "no", "--trainer.max_steps", "8", "--trainer.logging_steps", "1"]
    assert train(alone, *words) == 0
    process = start_slowly("0.3", marker, ["train", str(recipe), "--output.dir", str(folder), *words], after=4)
    os.killpg(process.pid, signal.SIGTERM)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 143, told
    assert train(folder, *words, "--resume", "auto") == 0
    assert same_weights(alone, folder)
    assert figures(alone) == figures(folder)


@pytest.mark.parametrize("sparse_first", [False, True], ids=["dense then sparse", "sparse then dense"])
def test_checkpoint_of_the_other_kind(
    sparse_first: bool, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, sparse = ["--method.name", "adamw"], SMET
    first, second = (sparse, dense) if sparse_first else (dense, sparse)
    assert train(tmp_path / "first", *SHORT, "--trainer.save_strategy", "steps", *first) == 0
    capsys.readouterr()
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    code = train(tmp_path / "second", *SHORT, "--trainer.max_steps", "8", *second, "--resume", checkpoint)
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.splitlines()[-1].startswith("pumice: cannot resume from")
    assert "Traceback" not in err
    assert not (tmp_path / "second" / "metrics.jsonl").exists()
