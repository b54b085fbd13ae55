"""What happens around the steps: metrics on disk and progress on the terminal."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers.trainer_callback import TrainerCallback

from pumice.integrations.topology import PREFIX

logger = logging.getLogger(__name__)

_RENAMED = {"learning_rate": "lr"}
_RECORDED = ("loss", "lr", "grad_norm", "tokens_per_second", "epoch", "eval_loss", "eval_perplexity")


class MetricsFile(TrainerCallback):
    """Appends each log to a file, one JSON object a line; a resumed run first drops the lines beyond its step.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what the run that is continued had logged up to here."""
        if state.is_world_process_zero:
            kept = [line for line in read_metrics(self._path) if line["step"] <= state.global_step > 0]
            partial = self._path.with_name(f"{self._path.name}.partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            partial.replace(self._path)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log before each save, so that no logged mean spans a checkpoint: a resumed run logs the same."""
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Append a line, if the log is of training, evaluation or a topology update.

        A value that is not finite becomes null.
        """
        values = {_RENAMED.get(key, key): value for key, value in logs.items()}
        recorded = [key for key in (*_RECORDED, *values) if key in values and (key in _RECORDED or PREFIX in key)]
        if state.is_world_process_zero and {"loss", "eval_loss", PREFIX + "update"} & set(recorded):
            line = {"step": state.global_step, "tokens": values["tokens"]}
            line |= {key: _finite(values[key]) for key in recorded}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without a last one that was cut short; empty if there is no file."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class ProgressReport(TrainerCallback):
    """A bar with loss, tokens/s and time left on a terminal; without one, a logged line at each log.

    Args:
        bar: Whether to draw the bar.
    """

    def __init__(self, bar: bool) -> None:
        self._bar = bar
        self._progress: Progress | None = None
        self._shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the bar."""
        if self._bar and state.is_world_process_zero:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=Console(stderr=True),
            )
            self._progress.add_task("training", total=state.max_steps, completed=state.global_step, figures="")
            self._progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self._progress:
            self._progress.update(self._progress.task_ids[0], completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the latest figures."""
        figures = {label: pattern.format(logs[key]) for key, (label, pattern) in _FIGURES.items() if key in logs}
        if not state.is_world_process_zero or not figures:
            return
        self._shown |= figures
        if self._progress:
            text = "  ".join(f"{label} {value}" for label, value in self._shown.items())
            self._progress.update(self._progress.task_ids[0], figures=text)
        else:
            text = "  ".join(f"{label} {value}" for label, value in figures.items())
            logger.info("step %d/%d  %s", state.global_step, state.max_steps, text)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the bar as it stands."""
        if self._progress:
            self._progress.stop()
            self._progress = None


_FIGURES = {
    "loss": ("loss", "{:.4f}"),
    "eval_loss": ("validation loss", "{:.4f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
}
