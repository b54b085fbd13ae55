"""Draw the jumps at topology updates and the moves of newborn weights from the stability study's results.

Writes ``docs/images/dst-jumps.png``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from common import RESULTS, load
from dst_stability import DENSITIES, METHODS, parts
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "dst-jumps.png"
COLOURS = {"SET": "C0", "RigL": "C1", "SMET": "C2", "SMET, grown by gradient": "C3"}


def results_of(runs: Sequence[dict[str, Any]], spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a description, one for each seed."""
    return [run["result"] for run in runs if {k: v for k, v in run["run"].items() if k != "seed"} == spec]


def draw(values: dict[str, Any], path: Path) -> None:
    """Draw the picture."""
    rows = parts(values["best_lr"])
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    jumps, moves = figure.subplots(1, 2, width_ratios=(3, 2))
    main = dict(rows["main"])
    for index, density in enumerate(DENSITIES):
        usual: list[float] = []
        for place, method in enumerate(name for name in METHODS if name in COLOURS):
            found = results_of(values["runs"], main[f"{method}, d = {density:g}"])
            heights = [jump for result in found for jump in result["jumps"]]
            usual += [jump for result in found for jump in result["usual_jumps"]]
            x = index + (place - 1.5) * 0.2
            label = method if index == 0 else None
            jumps.plot([x] * len(heights), heights, ".", color=COLOURS[method], alpha=0.5, markersize=5)
            jumps.plot([x - 0.07, x + 0.07], [fmean(heights)] * 2, color=COLOURS[method], linewidth=3, label=label)
        middle, spread = fmean(usual), pstdev(usual)
        jumps.fill_between(
            [index - 0.45, index + 0.45],
            middle - 2 * spread,
            middle + 2 * spread,
            color="0.85",
            label="between updates, ± 2 deviations" if index == 0 else None,
        )
    jumps.set_xticks(range(len(DENSITIES)), [f"d = {density:g}" for density in DENSITIES])
    jumps.set(ylabel="jump of the validation loss at a topology update", title="each dot an update, bars their mean")
    jumps.legend(fontsize=8)
    for name in ("SET", "age reset only", "ramp only", "reset and ramp", "SMET (grace 2)"):
        found = [r["newborn_ratio"] for r in results_of(values["runs"], dict(rows["ablation"])[name])]
        moves.plot(range(1, 6), [fmean(at) for at in zip(*found, strict=True)], "o-", label=name)
    moves.axhline(1, color="0.6", linewidth=1)
    moves.set(
        xlabel="step after a topology update",
        yscale="log",
        title="RMS of updates, newborn over others",
    )
    moves.yaxis.set_major_formatter("{x:g}")
    moves.yaxis.set_minor_formatter("")
    moves.set_yticks([0.2, 0.5, 1, 2, 5])
    moves.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--results", type=Path, default=RESULTS / "dst_stability.json")
    made.add_argument("--out", type=Path, default=PICTURE)
    args = made.parse_args(argv)
    draw(load(args.results)["values"], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
