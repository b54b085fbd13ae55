"""Is dynamic sparse training stable, and what makes it so?

Small byte-level models under an aggressive schedule: every 20 steps 30 % of the active blocks are swapped, falling
along half a cosine wave. The cold start of regrown weights needs a count of updates far beyond 1/(1 − β2), so there are
two regimes: *stress* with betas (0.5, 0.99) from scratch, and *late* with the usual (0.9, 0.999), which goes on from
2,000 steps of training with a static topology at a constant rate. Learning rates of the matrices are searched per
method at density 0.25, seed 0, the rate of embeddings and head is the same for all.

Parts: "main" (methods × densities), "ablation" (what stabilises), "late", "qwen3" (another architecture), "sizes" (a
LLaMA six times larger). Every finished run is stored, and a study started again goes on.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from common import parse, parser, table
from dst import Watch, optimizer, state_by_name
from models import Corpus, corpus, tiny_llama, tiny_qwen3
from study import Bench, Plan, Runs, settings, tune
from torch import nn
from transformers import PretrainedConfig

from pumice.sparse import Topology, sparsify

NAME = "dst_stability"
INTERVAL, DROP = 20, 0.3
STRESS, USUAL = [0.5, 0.99], [0.9, 0.999]
DENSITIES = (0.5, 0.4, 0.25, 0.1)
SMET = {"optimizer": "smet", "warmup_steps": 10, "density_scaling": "sqrt", "grace": 2}
ADAMW = {"optimizer": "adamw", "grace": 0}
METHODS: dict[str, dict[str, Any]] = {
    "dense": {"optimizer": "adamw"},
    "static": {**ADAMW, "grow": "static"},
    "SET": {**ADAMW, "grow": "random"},
    "RigL": {**ADAMW, "grow": "gradient"},
    "SMET": {**SMET, "grow": "random"},
    "SMET, grown by gradient": {**SMET, "grow": "gradient"},
}
TUNED_AS = {"SMET, grown by gradient": "SMET"}
ABLATIONS: dict[str, dict[str, Any]] = {
    "SET": {"optimizer": "adamw", "grace": 0},
    "age reset only": {"warmup_steps": 0, "density_scaling": "none", "grace": 0},
    "ramp only": {"optimizer": "ramp", "density_scaling": "none", "grace": 0},
    "reset and ramp": {"density_scaling": "none", "grace": 0},
    "reset, ramp, sqrt": {"grace": 0},
    "reset, ramp, linear": {"grace": 0, "density_scaling": "linear"},
    "SET, grace 2": {"optimizer": "adamw"},
    "SMET, W = 0": {"warmup_steps": 0},
    "SMET, W = 20": {"warmup_steps": 20},
    "SMET, grace 1": {"grace": 1},
    "SMET (grace 2)": {},
    "SMET, grace 4": {"grace": 4},
    "SMET, none": {"density_scaling": "none"},
    "SMET, linear": {"density_scaling": "linear"},
    "SMET, 8-bit moments": {"state_bits": 8},
}
Spec = dict[str, Any]


def larger_llama() -> PretrainedConfig:
    """Return a model of 2.8 million parameters: six layers of width 192."""
    config = tiny_llama(6)
    config.update({"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6})
    return config


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "larger llama": larger_llama,
}


class Study:
    """Runs by their description; a model is compiled once for all runs of its shape."""

    def __init__(self, text: Corpus, plan: Plan, late: Plan, runs: Runs, compile: bool) -> None:
        self.text, self.plan, self.late, self.runs, self.compile = text, plan, late, runs, compile
        self._benches: dict[Any, Bench] = {}
        self._trained: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}

    def run(self, spec: Spec, seed: int) -> dict[str, Any]:
        """Return the result of one run, stored or made now."""
        return self.runs.get({**spec, "seed": seed}, lambda: self._train(spec, seed))

    def loss(self, spec: Spec) -> float:
        """Return the final validation loss with seed 0."""
        found = self.run(spec, 0)["loss"]
        return math.inf if found is None else found

    def _bench(self, spec: Spec) -> Bench:
        key = (spec["model"], spec["density"], str(spec["block"]), spec["regime"])
        if key not in self._benches:
            plan = self.late if spec["regime"] == "late" else self.plan

            def convert(model: nn.Module, seed: int) -> None:
                if spec["density"] < 1:
                    block = (spec["block"][0], spec["block"][1])
                    sparsify(model, spec["density"], block, seed=seed, keep="random", rescale=True)
                if (*key, seed) in self._trained:
                    model.load_state_dict(self._trained[*key, seed][0])

            self._benches[key] = Bench(MODELS[spec["model"]](), self.text, plan, self.compile, convert)
        return self._benches[key]

    def _train(self, spec: Spec, seed: int) -> dict[str, Any]:
        bench, moments = self._bench(spec), {}
        if spec["regime"] == "late":
            moments = self._long_trained(spec, seed, bench)
        watch: Watch | None = None

        def make(model: nn.Module) -> torch.optim.Optimizer:
            nonlocal watch
            topology = None
            if spec["density"] < 1:
                topology = Topology(
                    model, INTERVAL, DROP, spec["grow"], spec["grace"], total_steps=bench.plan.steps, seed=seed
                )
            watch = Watch(bench, topology, INTERVAL)
            return optimizer(model, spec, moments)

        result = bench.train(
            seed,
            make,
            1.0,
            lambda step, made: watch.before(step, made) if watch else None,
            lambda step, made: watch.after(step, made) if watch else None,
        )
        return {**result, **(watch.values() if watch else {})}

    def _long_trained(self, spec: Spec, seed: int, bench: Bench) -> dict[str, Any]:
        """Train long with a static topology, for the runs that go on from there."""
        key = (spec["model"], spec["density"], str(spec["block"]), spec["regime"], seed)
        if key not in self._trained:
            made: list[torch.optim.Optimizer] = []
            static = {**spec, "optimizer": "adamw"}

            def make(model: nn.Module) -> torch.optim.Optimizer:
                made.append(optimizer(model, static, {}))
                return made[0]

            bench.train(seed, make, 1.0, plan=replace(bench.plan, steps=10 * bench.plan.steps))
            weights = {name: value.clone() for name, value in bench.model.state_dict().items()}
            self._trained[key] = weights, state_by_name(bench.model, made[0])
        return self._trained[key][1]


def spec_of(method: str, model: str = "llama", density: float = 0.25, **changes: Any) -> Spec:
    """Return the description of a run, but for its seed."""
    dense = method == "dense"
    return {
        "regime": "stress",
        "model": model,
        "density": 1.0 if dense else density,
        "block": None if dense else [1, 16],
        "betas": STRESS,
        "embedding_lr": 0.01,
        **METHODS[method],
        **changes,
    }


def tuned(study: Study, grid: Sequence[float]) -> dict[str, float]:
    """Search the learning rate of each method at density 0.25."""
    best: dict[str, float] = {}
    for method in METHODS:
        if method not in TUNED_AS:
            best[method], _ = tune(lambda lr, method=method: study.loss(spec_of(method, lr=lr)), grid, most=6)
    return best | {method: best[like] for method, like in TUNED_AS.items()}


def parts(best: Mapping[str, float]) -> dict[str, list[tuple[str, Spec]]]:
    """Return all rows: pairs of a label and the description of its runs, by part."""
    smet = best["SMET"]
    main = [("dense", spec_of("dense", lr=best["dense"]))]
    for density in DENSITIES:
        for method in METHODS:
            if method != "dense":
                main.append((f"{method}, d = {density:g}", spec_of(method, density=density, lr=best[method])))
    ablation = [
        (name, {**spec_of("SMET", lr=best["SET"] if "SET" in name else smet), **changes})
        for name, changes in ABLATIONS.items()
    ]
    for block in ([1, 1], [16, 16]):
        for method in ("SET", "SMET"):
            label = f"{method}, blocks {block[0]} x {block[1]}"
            ablation.append((label, spec_of(method, block=block, lr=best[method])))
    late = [
        (
            name,
            {**spec_of(name, lr=best["SET"] / 4), "regime": "late", "betas": USUAL, "embedding_lr": 0.005, **changes},
        )
        for name, changes in (("static", {}), ("SET", {}), ("RigL", {}), ("SMET", {"density_scaling": "none"}))
    ]
    late.append(("age reset only", {**late[-1][1], "warmup_steps": 0, "grace": 0}))
    qwen3 = [(name, spec_of(name, "qwen3", lr=best[name])) for name in ("dense", "SET", "SMET")]
    sizes = []
    for model in ("llama", "larger llama"):
        sizes.append((f"{model}, dense", spec_of("dense", model, lr=best["dense"])))
        for density in (0.4, 0.1):
            sizes.append((f"{model}, SMET, d = {density:g}", spec_of("SMET", model, density, lr=smet)))
    return {"main": main, "ablation": ablation, "late": late, "qwen3": qwen3, "sizes": sizes}


def row_of(label: str, spec: Spec, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up the runs of a row."""
    losses = [math.inf if result["loss"] is None else result["loss"] for result in results]
    jumps = [jump for result in results for jump in result["jumps"]]
    usual = [jump for result in results for jump in result["usual_jumps"]]
    ratios = [result["newborn_ratio"] for result in results if result["newborn_ratio"]]
    survival = [result["survival"] for result in results]
    return {
        "label": label,
        "lr": spec["lr"],
        "loss": fmean(losses),
        "range": max(losses) - min(losses),
        "seeds": len(losses),
        "jump": fmean(jumps) if jumps else None,
        "worst_jump": max(jumps) if jumps else None,
        "usual": fmean(usual),
        "noise": pstdev(usual),
        "dropped": fmean(d for r in results for d in r["dropped"]) if jumps else None,
        "newborn_ratio": [fmean(at) for at in zip(*ratios, strict=False)],
        "survival": {
            name: fmean(found[name] for found in survival if name in found)
            for name in ("survival_1", "survival_5", "survival_past_grace")
            if any(name in found for found in survival)
        },
        "ever_active": fmean(r["ever_active"] for r in results) if jumps else None,
    }


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return a table for each part."""

    def signed(value: float | None) -> str:
        return "" if value is None else f"{value:+.3f}"

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.0%}"

    header = ("row", "lr", "seeds", "validation loss", "range", "jump", "worst", "usual jump", "its deviation")
    header = (*header, "newborn to mature", "kept 1 update", "kept past grace", "ever active")
    made = {}
    for part, rows in values["parts"].items():
        lines = []
        for row in rows:
            ratio = row["newborn_ratio"]
            lines.append(
                (
                    row["label"],
                    f"{row['lr']:g}",
                    row["seeds"],
                    f"{row['loss']:.3f}",
                    f"{row['range']:.3f}",
                    signed(row["jump"]),
                    signed(row["worst_jump"]),
                    signed(row["usual"]),
                    f"{row['noise']:.3f}",
                    f"{ratio[0]:.2f}" if ratio else "",
                    share(row["survival"].get("survival_1")),
                    share(row["survival"].get("survival_past_grace")),
                    share(row["ever_active"]),
                )
            )
        made[f"dst-{part}"] = table(header, lines)
    return made


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the study and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--data", type=Path, help="folder of the corpus; default: the standard library's sources")
    made.add_argument("--seeds", type=int, default=2)
    made.add_argument("--parts", nargs="*", help="parts to run; default: all")
    args = parse(made, NAME, argv)
    plan, late = Plan(), Plan(steps=200, warmup=0.0, floor=1.0)
    if args.quick:
        plan = Plan(steps=44, batch=2, length=8, validation_windows=2, evaluations=2)
        late = replace(plan, warmup=0.0, floor=1.0)
    text = corpus(args.data, 1 << 18 if args.quick else 1 << 40)
    runs = Runs(args.out, settings(plan, text, interval=INTERVAL, drop_fraction=DROP), argv)
    study = Study(text, plan, late, runs, compile=not args.quick)
    best = tuned(study, [0.005, 0.01]) if args.quick else tuned(study, [0.0025, 0.005, 0.01])
    values: dict[str, Any] = {"best_lr": best, "parts": {}}
    for part, rows in parts(best).items():
        if args.parts is None or part in args.parts:
            chosen = rows[:3] if args.quick else rows
            results = [(label, spec, [study.run(spec, seed) for seed in range(args.seeds)]) for label, spec in chosen]
            values["parts"][part] = [row_of(*row) for row in results]
            runs.write(**values)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
