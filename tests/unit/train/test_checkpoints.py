import json
import logging
import os
from pathlib import Path

import pytest

from pumice.errors import UserError
from pumice.train import checkpoints

FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "shards/0.distcp")


def save(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of step {step}")
    checkpoints.seal(folder)
    return folder


def test_sealed_is_whole_and_unsealed_is_not(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert checkpoints.flaw(folder) is None
    assert checkpoints.step_of(folder) == 3
    checkpoints.unseal(folder)
    assert checkpoints.flaw(folder) == "it has no manifest.json"
    checkpoints.unseal(folder)  # twice is no mistake


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("truncated", [True, False], ids=["truncated", "missing"])
def test_a_broken_file_is_found_and_the_one_before_taken(
    name: str, truncated: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = save(tmp_path, 90), save(tmp_path, 100)
    if truncated:
        os.truncate(broken / name, (broken / name).stat().st_size - 1)
    else:
        (broken / name).unlink()
    before = {file for file in tmp_path.rglob("*") if file.is_file()}
    with caplog.at_level(logging.WARNING, logger="pumice"):
        assert checkpoints.last_whole(tmp_path) == whole
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("skipped checkpoint-100, a save that was cut short: ")
    assert name in caplog.messages[0]
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == before, "nothing is deleted"


def test_only_weights_cannot_be_continued_from(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "trainer_state.json").unlink()
    checkpoints.seal(folder)
    assert checkpoints.flaw(folder) == "it was saved without trainer_state.json"


def test_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert checkpoints.last_whole(tmp_path) is None
    assert checkpoints.last_whole(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [1, 2, 3, 4]),
        (2, None, [3, 4]),
        (1, None, [4]),
        (2, 1, [1, 4]),
        (1, 1, [1, 4]),
        (9, 2, [1, 2, 3, 4]),
    ],
)
def test_rotation_keeps_the_last_and_the_best(
    limit: int | None, best: int | None, kept: list[int], tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        stamp(save(tmp_path, step), step)
    checkpoints.rotate(tmp_path, limit, None if best is None else tmp_path / f"checkpoint-{best}")
    assert sorted(map(checkpoints.step_of, checkpoints.checkpoints(tmp_path))) == kept


def test_rotation_counts_by_time_and_takes_broken_ones_first(tmp_path: Path) -> None:
    """After a resumption from step 5, a broken checkpoint of step 11 must not cost the new one of step 10."""
    for time, step in enumerate((11, 5, 10)):
        stamp(save(tmp_path, step), time)
    checkpoints.unseal(tmp_path / "checkpoint-11")
    checkpoints.rotate(tmp_path, 2, None)
    assert sorted(map(checkpoints.step_of, checkpoints.checkpoints(tmp_path))) == [5, 10]
    checkpoints.rotate(tmp_path, 1, None)
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-10"]


def stamp(folder: Path, time: int) -> None:
    os.utime(folder / checkpoints.MANIFEST, ns=(time, time))


def test_paths_that_a_user_gives(tmp_path: Path) -> None:
    whole, broken = save(tmp_path, 1), save(tmp_path, 2)
    (broken / "optimizer.pt").unlink()
    assert checkpoints.resolve(whole) == whole
    assert checkpoints.resolve(tmp_path) == whole
    with pytest.raises(UserError, match=r"checkpoint-2: the checkpoint is not whole: optimizer\.pt is missing"):
        checkpoints.resolve(broken)
    with pytest.raises(UserError, match="there is no such folder"):
        checkpoints.resolve(tmp_path / "nowhere")
    (whole / "optimizer.pt").unlink()
    with pytest.raises(UserError, match="none of its checkpoints is whole"):
        checkpoints.resolve(tmp_path)


def test_state_is_read(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text(json.dumps({"global_step": 12}))
    assert checkpoints.state_of(tmp_path).global_step == 12
