"""How many iterations of SR-Sinkhorn an update needs, from ones and from the column scales of the update before.

Two small models, L in {1, 2, 3, 5}, cold and warm, three seeds. On the gradients of the runs themselves, how far the
rows of the update are from equal norms (its columns are exact by construction), and the validation loss at the end. All
runs of a model share one learning rate: the best for L = 5 from ones, which is the paper's procedure.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import parse, parser, table
from models import corpus, tiny_llama, tiny_qwen3
from study import Bench, Plan, Runs, optimizer, settings, tune
from torch.optim import Optimizer

from pumice.optim.sinkhorn import balance

NAME = "sinkhorn_iterations"
MODELS = {"llama": tiny_llama, "qwen3": tiny_qwen3}
ITERATIONS = (1, 2, 3, 5)
LEARNING_RATES = (0.01, 0.02, 0.04)


class Imbalance:
    """Measures | ‖row of X‖ / √n − 1 | over all balanced matrices, every few updates but the first."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.means: list[float] = []
        self.peaks: list[float] = []

    def __call__(self, step: int, optimizer: Optimizer) -> None:
        """Measure before update ``step`` what the update will use."""
        if step == 0 or step % self.every:
            return
        for group in (group for group in optimizer.param_groups if group["rule"] == "sinkgd"):
            for parameter in group["params"]:
                start = optimizer.state[parameter]["col_scale"] if group["warm_start"] else None
                update = balance(parameter.grad, group["sinkhorn_iters"], start)
                deviation = (torch.linalg.vector_norm(update, dim=-1) / update.shape[-1] ** 0.5 - 1).abs()
                self.means.append(float(deviation.mean()))
                self.peaks.append(float(deviation.max()))

    def result(self) -> dict[str, float]:
        """Return the mean over rows, and the mean over matrices of the largest in each, with the largest of all."""
        return {"mean": mean(self.means), "mean_of_max": mean(self.peaks), "max": max(self.peaks)}


def study(bench: Bench, name: str, runs: Runs, seeds: int, every: int) -> list[dict[str, Any]]:
    """Return a row per number of iterations and start."""

    def run(iterations: int, warm: bool, lr: float, seed: int) -> dict[str, Any]:
        spec = {"method": "sinkgd", "lr": lr, "sinkhorn_iters": iterations, "warm_start": warm}

        def work() -> dict[str, Any]:
            imbalance = Imbalance(every)
            made = bench.train(seed, lambda model: optimizer(model, spec, bench.compile), None, imbalance)
            return {**made, "imbalance": imbalance.result()}

        return runs.get({"model": name, "seed": seed, "optimizer": spec}, work)

    lr, _ = tune(lambda lr: run(5, False, lr, 0)["loss"], LEARNING_RATES)
    rows = []
    for warm in (False, True):
        for iterations in ITERATIONS:
            results = [run(iterations, warm, lr, seed) for seed in range(seeds)]
            losses = [result["loss"] for result in results]
            rows.append(
                {
                    "model": name,
                    "iterations": iterations,
                    "warm_start": warm,
                    "lr": lr,
                    "losses": losses,
                    "imbalance_mean": mean(result["imbalance"]["mean"] for result in results),
                    "imbalance_mean_of_max": mean(result["imbalance"]["mean_of_max"] for result in results),
                    "imbalance_max": max(result["imbalance"]["max"] for result in results),
                }
            )
    return rows


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    rows = [
        (
            f"{row['model']}, L = {row['iterations']}, {'warm' if row['warm_start'] else 'cold'}",
            f"{row['imbalance_mean']:.2%}",
            f"{row['imbalance_mean_of_max']:.1%}",
            f"{row['imbalance_max']:.0%}",
            f"{mean(row['losses']):.3f}",
            f"{max(row['losses']) - min(row['losses']):.3f}",
        )
        for row in values["rows"]
    ]
    header = ("update", "row norms off by", "worst row of a matrix", "worst row of all", "validation loss", "range")
    return {"sinkhorn-iterations": table(header, rows)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the study and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--data", type=Path, help="folder of the corpus; default: the standard library's sources")
    made.add_argument("--seeds", type=int, default=3)
    args = parse(made, NAME, argv)
    plan = Plan(steps=6, length=16, validation_windows=8, evaluations=1) if args.quick else Plan()
    text = corpus(args.data, 1 << 18 if args.quick else 1 << 40)
    every = 2 if args.quick else 20
    runs = Runs(args.out, settings(plan, text, measured_every=every), argv)
    rows = []
    for name, config in MODELS.items():
        rows += study(Bench(config(), text, plan, compile=not args.quick), name, runs, args.seeds, every)
    runs.write(rows=rows)
    values = {"rows": rows}
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
