"""A run that is killed or told to stop, and continued, ends as one that was left alone: bit for bit on the CPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pumice.cli import main

# Runs pumice in a process of its own, in which the checkpoint of one step is never finished.
KILL_IN_SAVE = """
import os, signal, sys
from pumice.cli import main
from pumice.train import checkpoints
seal = checkpoints.seal
def kill(folder):
    if folder.name == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    seal(folder)
checkpoints.seal = kill
main(sys.argv[2:])
"""

# The same with steps so slow that a signal meets one of them; the first lasts as long as argv[1] says.
SLOW_STEPS = """
import sys, time
from pumice.cli import main
from pumice.train.meter import Meter
see = Meter.see
def slowly(self, *args):
    with open(sys.argv[2], "a") as marker:
        marker.write(".")
    time.sleep(float(sys.argv[1]))
    see(self, *args)
Meter.see = slowly
sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is left alone."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", str(recipe), "--output.dir", str(folder)]) == 0
    assert json.loads((folder / "model" / "config.json").read_text())["attention_dropout"] == 0.1
    epochs = {line["step"]: line["epoch"] for line in lines(folder)}
    assert epochs[8] == 1.0, "the checkpoint of step 8 must lie on the epoch's boundary"
    return folder


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(folder: Path) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines(folder)]


def same_weights(one: Path, other: Path) -> bool:
    left, right = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def words(recipe: Path, folder: Path) -> list[str]:
    return ["train", str(recipe), "--output.dir", str(folder)]


@pytest.mark.parametrize(
    ("killed_at", "resumed_from"),
    [pytest.param(8, 4, id="across the epoch's end"), pytest.param(12, 8, id="at the epoch's end")],
)
def test_killed_while_saving(
    killed_at: int,
    resumed_from: int,
    whole: Path,
    recipe: Path,
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, "-c", KILL_IN_SAVE, f"checkpoint-{killed_at}", *words(recipe, folder)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert (folder / f"checkpoint-{killed_at}" / "trainer_state.json").exists(), "all but the manifest was written"

    assert train(folder) == 2  # holds a run: not without --resume
    assert train(folder, "--resume", "auto") == 0
    told = capsys.readouterr().err
    assert f"skipped checkpoint-{killed_at}" in told
    assert f"continuing from checkpoint-{resumed_from}" in told
    assert same_weights(whole, folder)
    assert figures(whole) == figures(folder), "no step logged twice, none lost"
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (folder, whole))
    for key in ("batches_sha256", "tokens", "start_perplexity", "end_perplexity", "sample"):
        assert ours[key] == theirs[key], key


def test_begins_where_no_checkpoint_is_whole(
    whole: Path, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "summary.json").unlink()
    for checkpoint in folder.glob("checkpoint-*"):
        (checkpoint / "optimizer.pt").write_bytes(b"cut")
    assert train(folder, "--resume", "auto") == 0
    assert capsys.readouterr().err.count("skipped checkpoint-") == 4
    assert same_weights(whole, folder)
    assert figures(whole) == figures(folder)


def test_killed_after_the_last_step(whole: Path, train: Callable[..., int], tmp_path: Path) -> None:
    """Trainer itself would take a fifteenth step."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    kept = json.loads((folder / "summary.json").read_text())
    for name in ("summary.json", "loss.png"):
        (folder / name).unlink()
    shutil.rmtree(folder / "model")
    assert train(folder, "--resume", "auto") == 0
    assert same_weights(whole, folder)
    assert figures(whole) == figures(folder)
    made = json.loads((folder / "summary.json").read_text())
    assert _lasting(made) == _lasting(kept)


def _lasting(summary: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in summary.items() if key not in ("peak_memory_bytes", "model")}


def test_finished_run_is_left_alone(whole: Path, train: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    before = {file: file.stat().st_mtime_ns for file in whole.rglob("*")}
    assert train(whole, "--resume", "auto") == 0
    told = capsys.readouterr()
    assert "finished already" in told.err
    assert "validation perplexity at the end" in told.out
    assert {file: file.stat().st_mtime_ns for file in whole.rglob("*")} == before


def test_continues_elsewhere_from_a_path(whole: Path, train: Callable[..., int], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(folder, "--resume", str(whole / "checkpoint-8")) == 0
    assert same_weights(whole, folder)
    assert [line["step"] for line in lines(folder)] == [step for step in map(_step, lines(whole)) if step > 8]


def _step(line: dict[str, float]) -> float:
    return line["step"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_signal_stops_after_the_step(
    number: signal.Signals, code: int, whole: Path, recipe: Path, train: Callable[..., int], tmp_path: Path
) -> None:
    folder, marker = tmp_path / "run", tmp_path / "training"
    process = start_slowly("0.5", marker, words(recipe, folder))
    os.killpg(process.pid, number)  # the data workers get it too, as from a terminal or a job scheduler
    told = process.communicate(timeout=60)[1]
    assert process.returncode == code, told
    last = told.strip().splitlines()[-1]
    step = max(int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*"))
    assert last == f"stopped after step {step}; --resume auto continues"
    assert not (folder / "model").exists()

    assert train(folder, "--resume", "auto") == 0
    assert same_weights(whole, folder)
    steps = [line["step"] for line in lines(folder) if "loss" in line]
    assert len(steps) == len(set(steps))


def test_second_interrupt_stops_at_once(recipe: Path, tmp_path: Path) -> None:
    folder, marker = tmp_path / "run", tmp_path / "training"
    process = start_slowly("600", marker, words(recipe, folder))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None, "the first one waits for the step"
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=60)[1]
    assert process.returncode == 130, told
    assert told.strip().splitlines()[-1] == "pumice: interrupted"
    assert not list(folder.glob("checkpoint-*"))


def start_slowly(seconds: str, marker: Path, words: list[str], after: int = 1) -> "subprocess.Popen[str]":
    """Start a process with slow steps, and wait until so many of them have begun."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_STEPS, seconds, str(marker), *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not marker.exists() or marker.stat().st_size < after:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process
