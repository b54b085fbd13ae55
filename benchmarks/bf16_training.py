"""Whether weights stored in bfloat16 train like float32 ones, with stochastic rounding and without.

Only storage differs: before each update the stored weights are copied to a float32 model, whose forward and backward
pass make the gradients. At the learning rate that is best for this model an update is larger than the distance of
neighbouring bfloat16 numbers; at a twentieth of it, as in fine-tuning, most updates are smaller.
"""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import parse, parser, table
from models import corpus, tiny_llama
from study import Bench, Plan, Runs, optimizer, settings
from torch import nn
from torch.optim import Optimizer

NAME = "bf16_training"
LEARNING_RATES = (0.02, 0.001)
STORAGE = {
    "float32": (torch.float32, False),
    "bfloat16, stochastic rounding": (torch.bfloat16, True),
    "bfloat16, rounding to nearest": (torch.bfloat16, False),
}


def stored(model: nn.Module, storage: str, lr: float, seed: int, compile: bool) -> Optimizer:
    """Return SinkGD on a copy of ``model`` in the storage's dtype; each update ends with its weights in ``model``."""
    dtype, stochastic = STORAGE[storage]
    kept = copy.deepcopy(model).to(dtype)
    spec = {"method": "sinkgd", "lr": lr, "stochastic_rounding": stochastic, "seed": seed}
    made = optimizer(kept, spec, compile)
    pairs = list(zip(model.parameters(), kept.parameters(), strict=True))

    def take_gradients(*_: object) -> None:
        for computing, keeping in pairs:
            assert computing.grad is not None
            keeping.grad = computing.grad.to(dtype)
            computing.grad = None

    @torch.no_grad()
    def give_weights(*_: object) -> None:
        for computing, keeping in pairs:
            computing.copy_(keeping)

    made.register_step_pre_hook(take_gradients)
    made.register_step_post_hook(give_weights)
    give_weights()
    return made


def study(bench: Bench, runs: Runs, seeds: int) -> list[dict[str, Any]]:
    """Return a row per learning rate and storage."""
    rows = []
    for lr in LEARNING_RATES:
        for storage in STORAGE:
            results = []
            for seed in range(seeds):
                results.append(
                    runs.get(
                        {"storage": storage, "lr": lr, "seed": seed},
                        lambda storage=storage, lr=lr, seed=seed: bench.train(
                            seed, lambda model: stored(model, storage, lr, seed, bench.compile), None
                        ),
                    )
                )
            rows.append({"lr": lr, "storage": storage, "losses": [result["loss"] for result in results]})
    return rows


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    base = {row["lr"]: row["losses"] for row in values["rows"] if row["storage"] == "float32"}
    lines = []
    for row in values["rows"]:
        gaps = [loss - other for loss, other in zip(row["losses"], base[row["lr"]], strict=True)]
        lines.append(
            (
                f"lr {row['lr']}, {row['storage']}",
                f"{mean(row['losses']):.3f}",
                f"{mean(gaps):+.4f}",
                f"{min(gaps):+.4f} to {max(gaps):+.4f}",
            )
        )
    return {"bf16-training": table(("weights", "validation loss", "to float32, same seed", "over seeds"), lines)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the study and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--data", type=Path, help="folder of the corpus; default: the standard library's sources")
    made.add_argument("--seeds", type=int, default=3)
    args = parse(made, NAME, argv)
    plan = Plan(steps=2, batch=2, length=8, validation_windows=2, evaluations=1) if args.quick else Plan()
    text = corpus(args.data, 1 << 18 if args.quick else 1 << 40)
    runs = Runs(args.out, settings(plan, text), argv)
    values = {"rows": study(Bench(tiny_llama(), text, plan, compile=not args.quick), runs, args.seeds)}
    runs.write(**values)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
