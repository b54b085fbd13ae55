import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pumice.train.callbacks import MetricsFile, ProgressReport, read_metrics


def state(step: int, main: bool = True) -> Any:
    return SimpleNamespace(global_step=step, max_steps=40, is_world_process_zero=main)


def log(callback: Any, step: int, main: bool = True, **logs: float) -> None:
    callback.on_log(None, state(step, main), None, logs={"tokens": 8 * step, **logs})


def test_lines(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.on_train_begin(None, state(0), None)
    log(metrics, 0, eval_loss=3.0, eval_perplexity=20.0, eval_runtime=1.0)
    log(metrics, 10, loss=2.5, learning_rate=1e-3, grad_norm=float("inf"), tokens_per_second=9.0, epoch=0.5)
    log(metrics, 10, train_runtime=3.0)
    log(metrics, 20, main=False, loss=2.0)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()] == [
        {"step": 0, "tokens": 0, "eval_loss": 3.0, "eval_perplexity": 20.0},
        {"step": 10, "tokens": 80, "loss": 2.5, "lr": 1e-3, "grad_norm": None, "tokens_per_second": 9.0, "epoch": 0.5},
    ]


@pytest.mark.parametrize(("resumed", "kept"), [(20, [0, 10, 20]), (10, [0, 10]), (0, [])])
def test_resumption_drops_later_lines_and_one_that_was_cut(resumed: int, kept: list[int], tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 10, 20, 30)) + '{"step": 4')
    MetricsFile(path).on_train_begin(None, state(resumed), None)
    assert [line["step"] for line in read_metrics(path)] == kept
    assert path.read_text().endswith("\n") or not kept


def test_logs_before_each_save(tmp_path: Path) -> None:
    control = SimpleNamespace(should_save=True, should_log=False)
    MetricsFile(tmp_path / "metrics.jsonl").on_step_end(None, None, control)
    assert control.should_log


def test_lines_instead_of_a_bar(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("pumice"), "propagate", True)
    caplog.set_level(logging.INFO, logger="pumice")
    report = ProgressReport(bar=False)
    report.on_train_begin(None, state(0), None)
    log(report, 10, loss=2.5, tokens_per_second=1234.4)
    log(report, 10, eval_loss=2.25)
    log(report, 10, train_runtime=1.0)
    log(report, 20, main=False, loss=9.0)
    report.on_train_end(None, state(20), None)
    assert caplog.messages == [
        "step 10/40  loss 2.5000  tokens/s 1,234",
        "step 10/40  validation loss 2.2500",
    ]


def test_bar_shows_loss_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    report = ProgressReport(bar=True)
    report.on_train_begin(None, state(0), None)
    report.on_step_end(None, state(10), None)
    log(report, 10, loss=2.5, tokens_per_second=1234.4)
    report.on_train_end(None, state(10), None)
    shown = capsys.readouterr().err
    assert "10/40" in shown
    assert "loss 2.5000  tokens/s 1,234" in shown
    assert "left" in shown


def test_other_processes_draw_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    report = ProgressReport(bar=True)
    report.on_train_begin(None, state(0, main=False), None)
    report.on_step_end(None, state(1, main=False), None)
    report.on_train_end(None, state(1, main=False), None)
    assert capsys.readouterr().err == ""
