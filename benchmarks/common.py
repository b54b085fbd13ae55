"""Result files, alternating timings and tables: what all benchmarks share."""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, help="result file; default: benchmarks/results/NAME.json, none with --quick")
    made.add_argument("--quick", action="store_true", help="tiny sizes: tells whether the script runs, nothing else")
    made.add_argument("--threads", type=int, help="threads of torch; default: torch's")
    return made


def parse(made: argparse.ArgumentParser, name: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse ``argv``, set the number of threads and settle where results go and which commit they name."""
    commit()
    args = made.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.out is None and not args.quick:
        args.out = RESULTS / f"{name}.json"
    return args


def environment(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what a result depends on besides its settings: command, commit, date, machine and versions.

    Folders are left out of the command: a reader has others.
    """
    words = sys.argv[1:] if argv is None else argv
    shown = [Path(word).name if os.sep in word else word for word in words]
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *shown]),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "system": platform.system(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("pumice", "torch", "torchao", "transformers")},
        },
    }


@cache
def commit() -> str:
    """Return the commit that this process began with, with "+changes" if optimizers or benchmarks differ from it."""

    def git(*words: str) -> str:
        root = Path(__file__).parents[1]
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "src/pumice/optim", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def save(path: Path | None, settings: Mapping[str, Any], values: Any, argv: Sequence[str] | None = None) -> None:
    """Write a result file whole or not at all; do nothing without a path.

    Args:
        path: where; its stem is the result's name.
        settings: what was chosen.
        values: what was measured.
        argv: arguments of the command, if not those of this process.
    """
    if path is None:
        return
    content = {"name": path.stem, **environment(argv), "settings": settings, "values": values}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    os.replace(part, path)


def load(path: Path) -> dict[str, Any]:
    """Read a result file."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def alternate(calls: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Time calls in turn, so that a disturbance of the machine hits all of them alike.

    Args:
        calls: what to time, by name.
        rounds: how often to time each; every round begins with another call.
        warmup: untimed rounds before.

    Returns:
        Seconds by name.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            _synchronise()
            start = time.perf_counter()
            calls[name]()
            _synchronise()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return median and quartiles of seconds, in milliseconds."""
    low, _, high = quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    return {"median_ms": median(seconds) * 1e3, "q1_ms": low * 1e3, "q3_ms": high * 1e3}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; columns but the first are aligned to the right."""
    cells = [list(map(str, row)) for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| "
        + " | ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
