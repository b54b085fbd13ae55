"""Bytes of sparse training by category, measured on real tensors, beside dense AdamW.

Two decoder layers of llama-60m's shapes in bfloat16 go through forward, backward and update. What persists is read off
the tensors. Transient is the most that was allocated at once besides, by torch's profiler: in forward and backward, the
activations included, and in the update. The same reading of models without storage, of one and two layers, gives the
rows of LLaMA-1B.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import parse, parser, save, table
from models import build, llama_60m
from optimizer_step import scratch_bytes, storage
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from pumice.optim import SMET
from pumice.sparse import BlockSparseLinear, sparsify

NAME = "sparse_memory"
BLOCKS = ((1, 1), (1, 16), (1, 64), (16, 16), (64, 64))
DENSITIES = (0.5, 0.4, 0.25, 0.1)
GB = 1e9
HOLDERS = {"values": ("values",), "ids": ("ids",), "birth": ("birth",), "ever active": ("ever_active",)}


@dataclass(frozen=True)
class Case:
    """A model to train: dense if it has no block."""

    density: float = 1.0
    block: tuple[int, int] | None = None
    state_bits: int = 32

    def make(self, model: nn.Module) -> Optimizer:
        """Make the model sparse, and the optimizer for it."""
        if self.block is None:
            return torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        sparsify(model, self.density, self.block, keep="random")
        return SMET.from_model(model, 1e-3, state_bits=self.state_bits, compile=False)


def llama_1b() -> LlamaConfig:
    """Return the model of 1.3 billion parameters that SMET's paper trains."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5461,
        num_hidden_layers=24,
        num_attention_heads=32,
        tie_word_embeddings=False,
    )


def two_layers() -> PretrainedConfig:
    """Return two layers of llama-60m with a vocabulary that hardly counts."""
    config = llama_60m()
    config.update({"num_hidden_layers": 2, "vocab_size": 256})
    return config


def persistent(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return bytes by category; gradients as they are in a step."""
    sparse = [module for module in model.modules() if isinstance(module, BlockSparseLinear)]
    found = {name: sum(storage(getattr(m, key)) for m in sparse for key in keys) for name, keys in HOLDERS.items()}
    parameters = list(model.parameters())
    values = {id(module.values) for module in sparse}
    states = list(optimizer.state.values())
    return {
        **found,
        "dense weights": sum(storage(p) for p in parameters if id(p) not in values),
        "gradients": sum(storage(p) for p in parameters),
        "moments": sum(storage(value) for state in states for value in state.values() if isinstance(value, Tensor)),
    }


def bound(model: nn.Module, density: float, block: tuple[int, int] | None, bits: int) -> int:
    """Return what the design allows, from the dense model alone.

    density · entries · (weight + gradient + moments), 8 bytes per active block, a bit per block; in bfloat16. Moments
    of 8 bits take 2 bytes an entry and their scales 8 bytes for up to 256 entries of a slot; slots of fewer than 16
    entries keep 32 bits.
    """
    total = 0.0
    for name, parameter in model.named_parameters():
        entries = parameter.numel()
        if block is None or parameter.ndim < 2 or "embed" in name or "lm_head" in name:
            eight = bits == 8 and parameter.ndim == 2 and entries >= 4096
            total += entries * (4 + (2 + 8 / 256 if eight else 8))
            continue
        rows, cols = parameter.shape
        size = block[0] * block[1]
        grid = -(-rows // block[0]) * -(-cols // block[1])
        moments = 2 + 8 / min(256, size) if bits == 8 and size >= 16 else 8
        total += density * entries * (4 + moments) + 8 * density * grid + grid / 8
    return round(total)


def steps(model: nn.Module, optimizer: Optimizer, tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return forward and backward, and the update, of a training step."""
    ids = torch.arange(tokens).remainder(256).view(1, -1)

    def forward_and_backward() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()

    return forward_and_backward, optimizer.step


def measured(case: Case, tokens: int) -> dict[str, Any]:
    """Measure a case on real tensors."""
    model = build(two_layers()).to(torch.bfloat16)
    allowed = bound(model, case.density, case.block, case.state_bits)
    optimizer = case.make(model)
    forward_and_backward, update = steps(model, optimizer, tokens)
    forward_and_backward()
    update()
    found = persistent(model, optimizer)
    optimizer.zero_grad()
    return {
        **row_of(case, found, allowed),
        "transient_backward": scratch_bytes(forward_and_backward) - found["gradients"],
        "transient_update": scratch_bytes(update),
    }


def row_of(case: Case, found: dict[str, int], allowed: int) -> dict[str, Any]:
    """Return what persists in a case."""
    described = {"block": case.block, "density": case.density, "state_bits": case.state_bits}
    return {**described, "bytes": found, "persistent": sum(found.values()), "bound": allowed}


def extrapolated(case: Case, config: PretrainedConfig) -> dict[str, Any]:
    """Return what a model takes, from such a model of one layer and of two: choosing blocks of all takes long."""
    layers = config.num_hidden_layers
    one, two = (arithmetic(case, type(config)(**{**config.to_dict(), "num_hidden_layers": n})) for n in (1, 2))

    def at(first: int, second: int) -> int:
        return first + (layers - 1) * (second - first)

    found = {name: at(size, two["bytes"][name]) for name, size in one["bytes"].items()}
    return row_of(case, found, at(one["bound"], two["bound"]))


def arithmetic(case: Case, config: PretrainedConfig) -> dict[str, Any]:
    """Return what a model takes, without storage."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    allowed = bound(model, case.density, case.block, case.state_bits)
    optimizer = case.make(model)
    if isinstance(optimizer, SMET):
        optimizer.make_state()
    else:  # moments in bfloat16, as torch keeps them in such a model
        for parameter in model.parameters():
            optimizer.state[parameter] = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
    return row_of(case, persistent(model, optimizer), allowed)


def describe(row: dict[str, Any]) -> str:
    """Return the name of a row."""
    if row["block"] is None:
        return "dense AdamW"
    return f"{row['block'][0]} × {row['block'][1]}, d = {row['density']:g}, {row['state_bits']} bits"


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    header = ["blocks, density, state", *HOLDERS, "dense weights", "gradients", "moments"]
    made = {}
    for name, unit, label in (("measured", 2**20, "MiB"), ("llama_1b", GB, "GB")):
        rows = []
        for row in values[name]:
            default = row["density"] == 0.4 or row["block"] in (None, [1, 64], (1, 64))
            if not default or (name == "measured" and row["density"] not in (0.4, 1.0)):
                continue  # the file has all
            cells = [f"{row['bytes'][key] / unit:.2f}" for key in header[1:]]
            share = "" if row["block"] is None else f"{row['persistent'] / row['bound']:.3f}"
            cells += [f"{row['persistent'] / unit:.2f}", share]
            if name == "measured":
                cells += [f"{row[key] / unit:.2f}" for key in ("transient_backward", "transient_update")]
            rows.append((describe(row), *cells))
        columns = [*header, f"sum, {label}", "of the bound"]
        made[f"sparse-memory-{name.replace('_', '-')}"] = table(
            [*columns, "transient: backward", "update"] if name == "measured" else columns, rows
        )
    return made


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and save."""
    args = parse(parser(__doc__ or ""), NAME, argv)
    tokens, shapes, densities = (16, BLOCKS[2:3], DENSITIES[:1]) if args.quick else (256, BLOCKS, DENSITIES)
    cases = [Case(d, block, bits) for block in shapes for d in densities for bits in (32, 8)]
    rows = [measured(case, tokens) for case in [Case(), *cases]]
    large = [extrapolated(case, two_layers() if args.quick else llama_1b()) for case in [Case(), *cases]]
    check = [arithmetic(case, two_layers()) for case in cases]
    for found, row in zip(check, rows[1:], strict=True):
        if found["persistent"] != row["persistent"]:
            raise SystemExit(f"arithmetic and measurement differ for {describe(row)}: {found} and {row}")
    values = {"measured": rows, "llama_1b": large}
    save(args.out, {"tokens": tokens, "dtype": "bfloat16"}, values, argv)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
