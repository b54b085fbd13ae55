"""Tokens a second of a block-sparse model beside the dense one, for several numbers of tokens a step.

The dense matrix of a sparse layer exists during its forward and its backward only, and making it costs time that does
not depend on the number of tokens. Two layers of llama-60m with a small vocabulary, float32; forward and backward
alone, and whole steps with the optimizer that each would have (fused AdamW; SMET). All take turns.
"""

import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from common import alternate, parse, parser, save, table
from models import build
from sparse_memory import two_layers
from torch import nn
from torch.optim import Optimizer

from pumice.optim import SMET
from pumice.sparse import sparsify

NAME = "sparse_throughput"
TOKENS = (256, 1024, 4096, 8192)
SPARSE = {
    "1 × 64, d = 0.4": (0.4, (1, 64)),
    "1 × 64, d = 0.1": (0.1, (1, 64)),
    "1 × 16, d = 0.25": (0.25, (1, 16)),
    "1 × 1, d = 0.4": (0.4, (1, 1)),
    "64 × 64, d = 0.4": (0.4, (64, 64)),
}
LENGTH = 256


def measure(tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds by part of the step and by model."""
    length = min(LENGTH, tokens)
    ids = torch.arange(tokens).remainder(256).view(-1, length)
    models: dict[str, nn.Module] = {"dense": build(two_layers())}
    for name, (density, block) in SPARSE.items():
        models[name] = sparsify(build(two_layers()), density, block, keep="random")
    optimizers: dict[str, Optimizer] = {
        name: torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
        if name == "dense"
        else SMET.from_model(model, 1e-5, compile=True)
        for name, model in models.items()
    }

    def stepper(name: str, update: bool) -> Callable[[], None]:
        def step() -> None:
            models[name](input_ids=ids, labels=ids).loss.backward()
            if update:
                optimizers[name].step()
            models[name].zero_grad()

        return step

    return {
        part: alternate({name: stepper(name, update) for name in models}, rounds, warmup=1)
        for part, update in (("forward and backward", False), ("whole step", True))
    }


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    cases = values["cases"]
    header = ["time to dense", *(f"{case['tokens']:,} tokens" for case in cases)]
    rows = []
    for part in cases[0]["ratios"]:
        for name in cases[0]["ratios"][part]:
            rows.append((f"{part}, {name}", *(f"{case['ratios'][part][name]:.2f}" for case in cases)))
    return {"sparse-throughput": table(header, rows)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the comparison and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=7)
    args = parse(made, NAME, argv)
    values: dict[str, Any] = {"cases": []}
    for tokens in (16,) if args.quick else TOKENS:
        with torch.compiler.set_stance("force_eager" if args.quick else "default"):
            timings = measure(tokens, 1 if args.quick else args.rounds)
        seconds = {part: {name: median(t) for name, t in found.items()} for part, found in timings.items()}
        ratios = {
            part: {name: found / medians["dense"] for name, found in medians.items() if name != "dense"}
            for part, medians in seconds.items()
        }
        values["cases"].append({"tokens": tokens, "seconds": seconds, "ratios": ratios})
        save(args.out, {"rounds": args.rounds, "length": LENGTH}, values, argv)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
