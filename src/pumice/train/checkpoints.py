"""Which checkpoint folders are whole: a manifest with the size of every file is the last thing written into one.

A process can be killed at any moment of a save. The manifest is removed before the first file of a checkpoint is
written and appears, in one piece, after the last has reached the disk; a folder without it, or with a file that is
missing or of another size, is not resumed from.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path

from safetensors import safe_open
from torch import nn
from transformers.trainer_callback import TrainerState

from pumice.errors import UserError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_STATE = "trainer_state.json"
_WEIGHTS = "model.safetensors"


def unseal(folder: Path) -> None:
    """Mark a checkpoint as not whole, before anything is written into it."""
    (folder / MANIFEST).unlink(missing_ok=True)


def seal(folder: Path) -> None:
    """Mark a checkpoint as whole, after everything has been written into it."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())  # a manifest must not outlive a power cut that its files do not
    partial = folder / f"{MANIFEST}.partial"
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    partial.write_text(json.dumps({"bytes": sizes}, indent=1), encoding="utf-8")
    partial.rename(folder / MANIFEST)


def flaw(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint folder in a few words, or None if it is whole."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["bytes"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (ValueError, KeyError):
        return f"its {MANIFEST} cannot be read"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes instead of {size:,}"
    return None if _STATE in sizes else f"it was saved without {_STATE}"


def last_whole(run: Path) -> Path | None:
    """Return the whole checkpoint of the highest step in a run folder, or None.

    Args:
        run: The folder with the ``checkpoint-N`` folders.
    """
    for folder in sorted(checkpoints(run), key=step_of, reverse=True):
        wrong = flaw(folder)
        if wrong is None:
            return folder
        logger.warning("skipped %s, a save that was cut short: %s", folder.name, wrong)
    return None


def rotate(run: Path, limit: int | None, best: Path | None) -> None:
    """Delete checkpoints beyond a limit: first the broken ones, then the whole ones in the order of their saving.

    Args:
        run: The folder with the ``checkpoint-N`` folders.
        limit: How many to keep; None or less than 1: all of them.
        best: One to keep in any case, besides the last.
    """
    if limit is None or limit < 1:
        return
    *older, last = sorted(checkpoints(run), key=_sealed_at)
    surplus = len(older) + 1 - max(limit, len({last, best} - {None}))
    for folder in [folder for folder in older if folder != best][: max(0, surplus)]:
        shutil.rmtree(folder, ignore_errors=True)


def _sealed_at(folder: Path) -> int:
    return (folder / MANIFEST).stat().st_mtime_ns if flaw(folder) is None else 0


def checkpoints(run: Path) -> list[Path]:
    """Return the ``checkpoint-N`` folders of a run folder, whole or not, in no order."""
    return [path for path in run.glob("checkpoint-*") if path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name)]


def step_of(folder: Path) -> int:
    """Return the N of a ``checkpoint-N`` folder."""
    return int(folder.name.rpartition("-")[2])


def resolve(path: Path) -> Path:
    """Return the checkpoint that a user's path means: itself, or the last whole one of a run folder.

    Raises:
        UserError: There is no such folder, it holds no whole checkpoint, or it is a broken one.
    """
    if not path.is_dir():
        raise UserError(f"--resume {path}: there is no such folder; give a checkpoint-N folder, 'auto' or 'never'")
    if checkpoints(path):
        found = last_whole(path)
        if found is None:
            raise UserError(f"--resume {path}: none of its checkpoints is whole")
        return found
    if wrong := flaw(path):
        raise UserError(f"--resume {path}: the checkpoint is not whole: {wrong}")
    return path


def check_weights(checkpoint: Path, model: nn.Module) -> None:
    """Check that the weights of a checkpoint are those of a model, of which Trainer would load what it can.

    Raises:
        UserError: There is a tensor that the model has in another shape or not at all.
    """
    if not (checkpoint / _WEIGHTS).is_file():  # in several files, which are not written by a run of one process
        return
    own = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    with safe_open(checkpoint / _WEIGHTS, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118
            shape = weights.get_slice(name).get_shape()
            if own.get(name) != shape:
                raise UserError(
                    f"cannot resume from {checkpoint}: its '{name}' is {shape}, but in the model of this recipe it is "
                    f"{own.get(name, 'missing')}; continue it with its own recipe"
                )


def state_of(checkpoint: Path) -> TrainerState:
    """Return the Trainer's state as saved in a checkpoint."""
    state: TrainerState = TrainerState.load_from_json(str(checkpoint / _STATE))
    return state
