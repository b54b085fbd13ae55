"""Runs of the sparse methods: what they leave behind, and that an interrupted one ends as one that was left alone."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pumice.cli import main
from tests.integration.test_resume import figures, lines, same_weights, start_slowly

SPARSE = ["--output.sample_tokens", "0", "--method.options.density", "0.5", "--method.options.block_shape", "[1, 16]"]
MOVING = [*SPARSE, "--method.options.interval", "3", "--method.options.stop", "1.0"]
SMET = ["--method.name", "smet", *MOVING, "--method.options.warmup_steps", "2"]
METHODS = {
    "smet": SMET,
    "smet by gradient": [*SMET, "--method.options.grow", "gradient", "--method.options.final_share", "0.5"],
    "set": ["--method.name", "set", *MOVING],
    "rigl": ["--method.name", "rigl", *MOVING, "--trainer.bf16", "true", "--trainer.use_cpu", "true"],
    "static-sparse": ["--method.name", "static-sparse", *SPARSE],
}
SHORT = ["--trainer.max_steps", "4", "--trainer.save_strategy", "no", "--trainer.dataloader_num_workers", "0"]


@pytest.fixture(scope="module", params=METHODS.values(), ids=METHODS)
def whole(
    request: pytest.FixtureRequest, recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """A run that is left alone, with topology updates after steps 3, 6, 9 and 12, and the words that made it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = [*request.param, "--trainer.dataloader_num_workers", "0"]
    assert main(["train", str(recipe), "--output.dir", str(folder), *words]) == 0
    return folder, request.param


def updates(folder: Path) -> list[dict[str, float]]:
    return [line for line in lines(folder) if "topology/update" in line]


def inner_matrices(folder: Path) -> dict[str, Tensor]:
    weights = load_file(folder / "model" / "model.safetensors")
    return {name: weight for name, weight in weights.items() if "proj" in name}


def test_what_a_run_leaves_behind(whole: tuple[Path, list[str]]) -> None:
    folder, words = whole
    moving = "static-sparse" not in words
    share = 0.5 if "--method.options.final_share" in words else 1.0
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not any("values" in name for name, _ in model.named_parameters())
    matrices = inner_matrices(folder)
    assert len(matrices) == 14
    for weight in matrices.values():
        blocks = weight.view(-1, 16)
        active = (blocks != 0).any(1)
        newborn_at_most = 0.35 if moving else 0.0  # of the last update, which have had two steps to move from zero
        assert 0.5 * share * (1 - newborn_at_most) <= float(active.float().mean()) <= 0.51 * share
    drawn = {path.name for path in folder.glob("*.png")}
    assert drawn == {"loss.png", "density.png"} | ({"topology.png"} if moving else set())
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["stored_parameters"] == summary["parameters"] - sum(w.numel() // 2 for w in matrices.values())
    assert summary["end_loss"] < summary["start_loss"] - 0.5


def test_metrics_of_updates(whole: tuple[Path, list[str]]) -> None:
    folder, words = whole
    told = updates(folder)
    assert [line["topology/update"] for line in told] == ([] if "static-sparse" in words else [1, 2, 3, 4])
    for line in told:
        number = line["topology/update"]
        assert line["step"] == (3 * (number + 1) if number < 4 else 14), "just before the next update, or at the end"
        assert line["topology/dropped"] >= line["topology/grown"]
        assert line["topology/dropped"] > 0
        assert ("topology/newborn_ratio_1" in line) == (line["topology/grown"] > 0)
        assert ("topology/spike_height" in line) == (number > 1)
        assert sum(key.startswith("topology/density/") for key in line) <= 14
    ever = [line["topology/ever_active"] for line in told]
    assert ever == sorted(ever)


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


@pytest.mark.parametrize("whole", [SMET], ids=["smet"], indirect=True)
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


def test_accumulated_micro_batches_tick_once(train: Callable[..., int], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    accumulated = ["--trainer.per_device_train_batch_size", "4", "--trainer.gradient_accumulation_steps", "2"]
    words = [*METHODS["rigl"], *SHORT, "--trainer.save_strategy", "steps", *accumulated]
    assert train(folder, *words) == 0
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    topology = state["stateful_callbacks"]["TopologyCallback"]["attributes"]["monitor"]["topology"]
    assert (topology["steps"], topology["updates"], topology["updated_at"]) == (4, 1, 3)


@pytest.mark.parametrize("sparse_first", [False, True], ids=["dense then sparse", "sparse then dense"])
def test_checkpoint_of_the_other_kind(
    sparse_first: bool, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, sparse = ["--method.name", "adamw"], METHODS["smet"]
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
