"""SinkGD on moving blocks: no moments, so no cold start by construction. What makes it learn, and is it as good?

The schedule, model, batches and measurements are those of ``dst_stability.py`` in its *stress* regime: every 20 steps
30 % of the blocks are swapped. Each row searches its own learning rate with seed 0, then runs the other seeds if it is
among those that are compared in the end. SMET is run at equal density and, since SinkGD stores half the bytes of an
active float32 weight that SMET does with 32-bit moments, at half the density.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import parse, parser
from dst import Watch
from dst_stability import INTERVAL, STRESS, row_of, spec_of
from dst_stability import Study as DSTStudy
from dst_stability import tables as dst_tables
from models import corpus
from study import Bench, Plan, Runs, settings, tune
from torch import Tensor, nn
from torch.optim import Optimizer

from pumice.optim import SinkGD
from pumice.optim.batch import Batch, Member
from pumice.optim.packed import PackedBalancedBatch, entries
from pumice.sparse import Topology

NAME = "stateless_sparse"
EMBEDDING_LR = 0.01
Spec = dict[str, Any]


class ConstantTargets(PackedBalancedBatch):
    """Rows are brought to one norm, and columns to one, however many active entries they have."""

    def _targets(self) -> tuple[Tensor, Tensor]:
        rows, cols = entries(self._layer)
        return tuple(torch.where(t > 0, t.sum() / (t > 0).sum(), 0.0) for t in (rows, cols))  # type: ignore[return-value]


class PerBlock(PackedBalancedBatch):
    """Every block is brought to RMS 1 on its own: its gradient divided by its norm."""

    def _balance(self, rescale: bool) -> Tensor:
        flag = super()._balance(rescale)
        self.r, self.c = torch.ones_like(self.r), torch.ones_like(self.c)
        size = self.blocks.values.float().square().mean((1, 2), keepdim=True).sqrt()
        self.blocks = type(self.blocks)(
            torch.where(size > 0, self.blocks.values / size, 0.0), self.blocks.row, self.blocks.col, self.blocks.shape
        )
        return flag


FORMS = {"counts": PackedBalancedBatch, "constant": ConstantTargets, "per block": PerBlock}


class Variant(SinkGD):
    """SinkGD with another way to balance packed values."""

    form = "counts"

    def _prepare(self, member: Member) -> type[Batch]:
        kind = super()._prepare(member)
        return FORMS[self.form] if kind is PackedBalancedBatch else kind


def sinkgd(model: nn.Module, spec: Spec) -> Optimizer:
    """Make the optimizer of a run."""
    options = {key: spec[key] for key in ("lr_scale", "spectral_target", "warmup_steps") if key in spec}
    made = Variant.from_model(
        model, spec["lr"], adamw_lr=EMBEDDING_LR, betas=tuple(STRESS), compile=False, state_bits=32, **options
    )
    made.form = spec.get("form", "counts")
    return made


class Study(DSTStudy):
    """The same with SinkGD among the optimizers."""

    def _train(self, spec: Spec, seed: int) -> dict[str, Any]:
        if spec["optimizer"] != "sinkgd":
            return super()._train(spec, seed)
        bench: Bench = self._bench(spec)
        watch: list[Watch] = []

        def make(model: nn.Module) -> Optimizer:
            topology = Topology(
                model, INTERVAL, 0.3, spec["grow"], spec["grace"], total_steps=bench.plan.steps, seed=seed
            )
            watch.append(Watch(bench, topology, INTERVAL))
            return sinkgd(model, spec)

        def before(step: int, made: Optimizer) -> None:
            watch[0].before(step, made)

        def after(step: int, made: Optimizer) -> None:
            watch[0].after(step, made)

        result = bench.train(seed, make, None, before, after)
        return {**result, **watch[0].values()}


def sinkgd_spec(**changes: Any) -> Spec:
    """Return the description of a run of SinkGD."""
    base = {**spec_of("SMET"), "optimizer": "sinkgd", "lr_scale": 1.0, "embedding_lr": EMBEDDING_LR}
    for name in ("warmup_steps", "density_scaling"):
        base.pop(name)
    return {**base, **changes}


def variants() -> dict[str, tuple[Spec, Sequence[float]]]:
    """Return the rows and the learning rates they start from."""
    spectral = {"spectral_target": 1.0}
    plain, normed = (0.001, 0.002, 0.004), (0.05, 0.1, 0.2)
    return {
        "plain": (sinkgd_spec(), plain),
        "spectral target 1": (sinkgd_spec(**spectral), normed),
        "spectral, W = 10": (sinkgd_spec(**spectral, warmup_steps=10), normed),
        "plain, W = 10": (sinkgd_spec(warmup_steps=10), plain),
        "spectral, grace 0": (sinkgd_spec(**spectral, grace=0), normed),
        "spectral, grown by gradient": (sinkgd_spec(**spectral, grow="gradient"), normed),
        "spectral, constant targets": (sinkgd_spec(**spectral, form="constant"), normed),
        "spectral, blocks 16 x 16": (sinkgd_spec(**spectral, block=[16, 16]), normed),
        "per block": (sinkgd_spec(form="per block"), plain),
    }


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    made = dst_tables({"parts": values["parts"]})
    return {name.replace("dst-", "stateless-"): text for name, text in made.items()}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the study and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--data", type=Path, help="folder of the corpus; default: the standard library's sources")
    made.add_argument("--seeds", type=int, default=3)
    args = parse(made, NAME, argv)
    plan = Plan()
    if args.quick:
        plan = Plan(steps=44, batch=2, length=8, validation_windows=2, evaluations=2)
    text = corpus(args.data, 1 << 18 if args.quick else 1 << 40)
    runs = Runs(args.out, settings(plan, text, interval=INTERVAL, drop_fraction=0.3), argv)
    study = Study(text, plan, plan, runs, compile=not args.quick)

    rows = variants()
    if args.quick:
        rows = {name: rows[name] for name in ("spectral target 1", "per block", "spectral, constant targets")}
    searched, best = [], {}
    for name, (spec, grid) in rows.items():
        lr, tried = tune(lambda lr, spec=spec: study.loss({**spec, "lr": lr}), grid[:2] if args.quick else grid, most=5)
        best[name] = {**spec, "lr": lr}
        searched.append({**row_of(name, best[name], [study.run(best[name], 0)]), "runs": len(tried)})
        runs.write(parts={"search": searched})
    smet_lr, _ = tune(lambda lr: study.loss(spec_of("SMET", lr=lr)), (0.0025, 0.005, 0.01), most=5)
    winner = min(best, key=lambda name: study.loss(best[name]))
    finals = [(f"SMET, d = {d:g}", spec_of("SMET", density=d, lr=smet_lr)) for d in (0.25, 0.5)]
    for name in dict.fromkeys(("spectral target 1", winner)):
        finals += [(f"{name}, d = {d:g}", {**best[name], "density": d}) for d in (0.25, 0.5)]
    final = [
        row_of(label, spec, [study.run(spec, seed) for seed in range(args.seeds)])
        for label, spec in (finals[:3] if args.quick else finals)
    ]
    values = {"parts": {"search": searched, "final": final}, "winner": winner}
    if not all(math.isfinite(row["loss"]) for row in final):
        print("a run diverged")
    runs.write(**values)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
