"""Tokens a second of whole training steps: forward, backward, update.

SinkGD, torch's fused AdamW and torchao's 8-bit AdamW take turns, step by step, on one model.
"""

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from common import alternate, parse, parser, save, table
from models import build, llama_60m, tiny_llama
from torch.optim import Optimizer
from torchao.optim import AdamW8bit
from transformers import PretrainedConfig

from pumice.optim import SinkGD

NAME = "train_throughput"
LEARNING_RATE = 1e-5
CASES: dict[str, tuple[Callable[[], PretrainedConfig], int, int]] = {
    # model: windows and tokens a window
    "llama-60m": (llama_60m, 4, 256),
    "tiny": (tiny_llama, 8, 128),
}


def measure(config: PretrainedConfig, batch: int, length: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds a step by method."""
    model = build(config)
    tokens = torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    optimizers: dict[str, Optimizer] = {
        "AdamW, torch fused": torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True),
        "AdamW8bit, torchao": AdamW8bit(model.parameters(), LEARNING_RATE, weight_decay=0.0),
        "SinkGD": SinkGD.from_model(model, LEARNING_RATE),
        "SinkGD, compiled": SinkGD.from_model(model, LEARNING_RATE, compile=True),
    }

    def stepper(optimizer: Optimizer) -> Callable[[], None]:
        def step() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return alternate({name: stepper(optimizer) for name, optimizer in optimizers.items()}, rounds)


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    lines = [
        (f"{case['model']}, {name}", f"{row['tokens_per_second']:.0f}", f"{row['to_adamw']:.3f}")
        for case in values["cases"]
        for name, row in case["methods"].items()
    ]
    return {"train-throughput": table(("model and method", "tokens/s", "to fused AdamW"), lines)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the comparison and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=15)
    args = parse(made, NAME, argv)
    values: dict[str, Any] = {"cases": []}
    cases = {"tiny": (tiny_llama, 1, 16)} if args.quick else CASES
    rounds = 1 if args.quick else args.rounds
    for name, (config, batch, length) in cases.items():
        with torch.compiler.set_stance("force_eager" if args.quick else "default"):
            timings = measure(config(), batch, length, rounds)
        seconds = {method: median(found) for method, found in timings.items()}
        base = seconds["AdamW, torch fused"]
        methods = {
            method: {"tokens_per_second": batch * length / found, "step_ms": found * 1e3, "to_adamw": base / found}
            for method, found in seconds.items()
        }
        values["cases"].append({"model": name, "batch": batch, "length": length, "methods": methods})
        save(args.out, {"rounds": rounds, "lr": LEARNING_RATE}, values, argv)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
