"""Which setting of SinkGD is best, against an AdamW tuned in the same way.

Every row searches a grid of its own, seed 0, that grows for as long as its best value lies at an edge; its best setting
is run with a second seed, and with two more if its mean comes near the best of all. The last row combines what won, by
rule: the best form of the matrix update, the best treatment of embeddings and head, then the learning rate of the AdamW
part, the learning rate, and the betas of the AdamW part. AdamW is searched over betas and learning rate, then over a
learning rate of its own for embeddings and head.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from common import parse, parser, table
from models import corpus, tiny_llama
from study import Bench, Plan, Runs, optimizer, settings, tune

NAME = "sinkgd_variants"
NEAR = 0.1  # nats a byte
BETAS = ((0.9, 0.999), (0.9, 0.95), (0.5, 0.99))
Spec = dict[str, Any]


class Study:
    """Rows of the comparison, each with the runs that its search has used."""

    def __init__(self, bench: Bench, runs: Runs, seeds: int) -> None:
        self.bench, self.runs, self.seeds = bench, runs, seeds
        self.rows: list[dict[str, Any]] = []

    def run(self, spec: Spec, seed: int = 0) -> dict[str, Any]:
        """Train with a setting."""
        clip = 1.0 if spec["method"] == "adamw" else None
        return self.runs.get(
            {"model": "llama", "seed": seed, "optimizer": spec},
            lambda: self.bench.train(seed, lambda model: optimizer(model, spec, self.bench.compile), clip),
        )

    def loss(self, spec: Spec) -> float:
        """Return the validation loss with seed 0."""
        found = self.run(spec)["loss"]
        return math.inf if found is None else found

    def row(
        self, name: str, searches: Sequence[tuple[Callable[[float, Spec], Spec], Sequence[float]]], spec: Spec
    ) -> Spec:
        """Search one grid after the other, each from the best of the one before; return the best setting.

        Args:
            name: of the row.
            searches: pairs of a function that puts a value into a setting, and a grid.
            spec: setting to start from.
        """
        tried = []
        for put, grid in searches:
            best, losses = tune(lambda value, put=put, spec=spec: self.loss(put(value, spec)), grid)
            tried.append({f"{value:g}": loss for value, loss in losses.items()})
            spec = put(best, spec)
        self.add(name, spec, tried)
        return spec

    def add(self, name: str, spec: Spec, tried: list[dict[str, float]]) -> None:
        """Add a row that is known to be best at ``spec``."""
        finite = [{value: loss if math.isfinite(loss) else None for value, loss in grid.items()} for grid in tried]
        self.rows.append({"name": name, "setting": spec, "tried": finite, "runs": sum(map(len, tried))})
        print(f"{name}: {spec} {self.loss(spec):.4f}", flush=True)

    def finish(self) -> list[dict[str, Any]]:
        """Run the other seeds of every row; add losses and the updates to reach AdamW's final loss."""
        results = {row["name"]: [self.run(row["setting"], seed) for seed in range(self.seeds)] for row in self.rows}
        means = {name: mean(result["loss"] or math.inf for result in found) for name, found in results.items()}
        for row in self.rows:
            if means[row["name"]] < min(means.values()) + NEAR:
                results[row["name"]] = [self.run(row["setting"], seed) for seed in range(2 * self.seeds)]
        for row in self.rows:
            found = results[row["name"]]
            row["losses"] = [result["loss"] for result in found]
            goals = [result["loss"] for result in results["AdamW"][: len(found)]]
            reached = [first_below(r["curve"], goal) for r, goal in zip(found, goals, strict=False)]
            row["updates_to_adamw"] = None if None in reached else mean(filter(None, reached))
        return self.rows


def first_below(curve: Sequence[tuple[int, float]], goal: float) -> float | None:
    """Return the update at which a curve of (update, loss), linear between its points, first reaches ``goal``."""
    for (left, high), (right, low) in pairwise(curve):
        if low <= goal:
            return right if high <= goal else left + (right - left) * (high - goal) / (high - low)
    return None


def lr(value: float, spec: Spec) -> Spec:
    """Set the learning rate of all."""
    return {**spec, "lr": value}


def adamw_lr(value: float, spec: Spec) -> Spec:
    """Set the learning rate of the AdamW part."""
    return {**spec, "adamw_lr": value}


def embeddings_scale(value: float, spec: Spec) -> Spec:
    """Set the lr_scale of balanced embeddings and head."""
    return {**spec, "embeddings": {**spec["embeddings"], "lr_scale": value}}


def embedding_lr(value: float, spec: Spec) -> Spec:
    """Set AdamW's learning rate for embeddings and head."""
    return {**spec, "embedding_lr": value}


def around(value: float) -> list[float]:
    """Return a grid of three about a value."""
    return [value / 2, value, value * 2]


def study(bench: Bench, runs: Runs, seeds: int) -> list[dict[str, Any]]:
    """Return the rows of the comparison."""
    made = Study(bench, runs, seeds)
    sinkgd: Spec = {"method": "sinkgd"}

    plain = made.row("plain (lr_scale 0.05)", [(lr, [0.01, 0.02, 0.04])], sinkgd)
    tuned = made.row("plain, adamw_lr", [(adamw_lr, around(plain["lr"] / 2))], plain)
    part = tuned["adamw_lr"]
    matched = made.row("match_rms_adamw", [(lr, [0.0025, 0.005, 0.01])], {**sinkgd, "lr_scale": "match_rms_adamw"})
    forms = {"plain": tuned, "match_rms_adamw": matched}
    for target in ("sqrt", 1.0):
        spec = {**sinkgd, "spectral_target": target, "lr_scale": 1.0, "adamw_lr": part}
        forms[f"spectral {target}"] = made.row(f"spectral_target {target}, adamw_lr", [(lr, [0.02, 0.04, 0.08])], spec)

    treatments = {"adamw": tuned}
    for share in (0.0, 0.1, 0.3):
        spec = {**tuned, "embeddings": {"negligible_rows": share, "spectral_target": None}}
        name = f"embeddings and head balanced, negligible_rows {share:g}"
        treatments[name] = made.row(name, [(embeddings_scale, [0.1, 0.2, 0.4])], spec)

    candidates = []
    for betas in BETAS:
        spec = {"method": "adamw", "betas": list(betas)}
        candidates.append(made.row(f"AdamW {betas}", [(lr, [0.0025, 0.005, 0.01])], spec))
    best = min(candidates, key=made.loss)
    made.row("AdamW", [(embedding_lr, around(best["lr"])), (lr, around(best["lr"]))], best)

    form, treatment = (
        min(forms, key=lambda k: made.loss(forms[k])),
        min(treatments, key=lambda k: made.loss(treatments[k])),
    )
    spec = dict(forms[form])
    if treatment == "adamw":
        tune_embeddings = (adamw_lr, around(spec.get("adamw_lr", spec["lr"])))
    else:
        chosen = treatments[treatment]
        spec["embeddings"] = chosen["embeddings"]
        tune_embeddings = (embeddings_scale, around(spec["embeddings"]["lr_scale"] * chosen["lr"] / spec["lr"]))

    def betas_of_part(value: float, spec: Spec) -> Spec:
        return {**spec, "betas": list(BETAS[round(value)])}

    spec = made.row("recommended", [tune_embeddings, (lr, around(spec["lr"]))], spec)
    row = made.rows.pop()
    losses = {i: made.loss(betas_of_part(i, spec)) for i in range(len(BETAS))}
    best_betas = min(losses, key=lambda i: losses[i])
    tried = [*row["tried"], {str(BETAS[i]): loss for i, loss in losses.items()}]
    made.add("recommended", betas_of_part(best_betas, spec), tried)
    return made.finish()


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    rows = []
    for row in values["rows"]:
        reached = row["updates_to_adamw"]
        rows.append(
            (
                row["name"],
                describe(row["setting"]),
                row["runs"],
                len(row["losses"]),
                f"{mean(row['losses']):.3f}",
                f"{max(row['losses']) - min(row['losses']):.3f}",
                "not reached" if reached is None else f"{reached / values['steps']:.0%}",
            )
        )
    header = ("method", "best setting", "runs", "seeds", "validation loss", "range", "updates to AdamW's loss")
    searched = values["settings_searched"]
    effort = f"Settings searched in all: {searched['sinkgd']} of SinkGD, {searched['adamw']} of AdamW."
    return {"sinkgd-variants": f"{table(header, rows)}\n\n{effort}"}


def describe(spec: Spec) -> str:
    """Return what was tuned in a setting."""
    shown = ("lr", "adamw_lr", "embedding_lr", "betas")
    parts = [f"{key} {spec[key]}" for key in shown if key in spec]
    if "embeddings" in spec:
        parts.append(f"their lr_scale {spec['embeddings']['lr_scale']}")
    return ", ".join(parts)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the study and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--data", type=Path, help="folder of the corpus; default: the standard library's sources")
    made.add_argument("--seeds", type=int, default=2)
    args = parse(made, NAME, argv)
    plan = Plan(steps=2, batch=2, length=8, validation_windows=2, evaluations=2) if args.quick else Plan()
    text = corpus(args.data, 1 << 18 if args.quick else 1 << 40)
    runs = Runs(args.out, settings(plan, text), argv)
    rows = study(Bench(tiny_llama(), text, plan, compile=not args.quick), runs, args.seeds)
    searched = Counter(run["run"]["optimizer"]["method"] for run in runs.done if run["run"]["seed"] == 0)
    values = {"rows": rows, "steps": plan.steps, "settings_searched": dict(searched)}
    runs.write(**values)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
