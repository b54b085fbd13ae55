"""What gradient release saves, and what it costs: peak memory and time of whole steps, with and without it.

Peaks are those of torch.profiler's allocation events; times are of steps that take turns in one process.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from common import alternate, parse, parser, save, table
from models import tiny_llama
from plan_vs_measured import llama_130m, measured_peak, optimizer_of, prepared

from pumice.optim import GradientRelease

NAME = "release"
MIB = 1 << 20


def seconds(config: Any, method: str, shape: tuple[int, int], rounds: int) -> dict[str, float]:
    """Return the median seconds of a step without and with release."""
    first = prepared(config, method, True, meta=False).train()
    steps: dict[str, Callable[[], None]] = {}
    ids = torch.randint(config.vocab_size, shape)
    for name, model in (("ordinary", first), ("release", copy.deepcopy(first))):
        optimizer = optimizer_of(model, method)
        if name == "release":
            GradientRelease(optimizer)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    return {name: median(found) for name, found in alternate(steps, rounds).items()}


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    lines = [
        (
            row["method"],
            f"{row['peaks']['ordinary'] / MIB:.0f}",
            f"{row['peaks']['release'] / MIB:.0f}",
            f"{100 * row['share']:.1f} %",
            f"{row['seconds']['release'] / row['seconds']['ordinary']:.3f}",
        )
        for row in values["rows"]
    ]
    header = ("method", "peak MiB", "with release", "of all gradients but the largest", "time to ordinary")
    return {"release": table(header, lines)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the comparison and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=9)
    args = parse(made, NAME, argv)
    config, shape = (tiny_llama(), (1, 16)) if args.quick else (llama_130m(), (1, 128))
    rounds = 1 if args.quick else args.rounds
    values: dict[str, Any] = {"rows": []}
    for method in ("sinkgd", "adamw"):
        sizes = [4 * parameter.numel() for parameter in prepared(config, method, True, meta=True).parameters()]
        peaks = {
            name: measured_peak(config, method, name == "release", True, shape) for name in ("ordinary", "release")
        }
        share = (peaks["ordinary"] - peaks["release"]) / (sum(sizes) - max(sizes))
        timed = seconds(config, method, shape, rounds)
        values["rows"].append({"method": method, "peaks": peaks, "share": share, "seconds": timed})
        save(args.out, {"model": "llama-130m", "batch": shape[0], "seq_len": shape[1], "rounds": rounds}, values, argv)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
