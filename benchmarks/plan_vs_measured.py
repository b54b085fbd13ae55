"""The planner's peak against that of a real step.

Measured is the largest running sum of torch.profiler's allocation events in one training step, above the bytes of the
weights, the optimizer's state and the inputs that are there when it begins. None of it is code of pumice's planner.
"""

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from common import parse, parser, save, table
from models import build, llama_60m, tiny_llama, tiny_qwen3
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import LlamaConfig, PretrainedConfig

from pumice import methods
from pumice.memory import plan
from pumice.memory.trace import record, stored
from pumice.optim import GradientRelease

NAME = "plan_vs_measured"
GIB = 1 << 30
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sinkgd": {"compile": False},
    "smet": {"compile": False, "density": 0.25},
}


def llama_130m() -> LlamaConfig:
    """Return a model of 134 million parameters, as in the SinkGD paper: 12 layers of width 768."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )


def prepared(config: PretrainedConfig, method: str, checkpointing: bool, meta: bool) -> nn.Module:
    """Make a model as a method trains it."""
    with torch.device("meta" if meta else "cpu"):
        model: nn.Module = build(config)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    chosen = methods.get(method)
    return chosen.prepare(model, chosen.settings(OPTIONS[method]), 0) if chosen.prepare else model


def optimizer_of(model: nn.Module, method: str) -> Optimizer:
    """Make a method's optimizer."""
    chosen = methods.get(method)
    return chosen.build(model, 1e-5, 0.0, chosen.settings(OPTIONS[method]))


def bytes_of(tensors: Any) -> int:
    """Return the bytes of the distinct storages of tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def measured_peak(
    config: PretrainedConfig, method: str, release: bool, checkpointing: bool, shape: tuple[int, int]
) -> int:
    """Return the most bytes that are allocated in the third step."""
    model = prepared(config, method, checkpointing, meta=False).train()
    optimizer = optimizer_of(model, method)
    if release:
        GradientRelease(optimizer)
    ids = torch.randint(config.vocab_size, shape)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    present = bytes_of([*model.parameters(), *model.buffers(), *state, ids])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    now = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return present + peak


def planned_peak(
    config: PretrainedConfig, method: str, release: bool, checkpointing: bool, shape: tuple[int, int]
) -> tuple[int, str]:
    """Return the planner's peak and its moment."""
    model = prepared(config, method, checkpointing, meta=True)

    def forward(model: nn.Module) -> Tensor:
        ids = torch.zeros(shape, dtype=torch.long)
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    made = stored(model, lambda model: optimizer_of(model, method), on_gpu=False)
    found = plan(record(model, forward), made, release=release)
    return found.peak_bytes, found.moment


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    lines = [
        (
            f"{row['model']}, {row['method']}",
            "yes" if row["release"] else "no",
            "yes" if row["checkpointing"] else "no",
            f"{row['planned'] / GIB:.3f}",
            f"{row['measured'] / GIB:.3f}",
            f"{100 * (row['planned'] / row['measured'] - 1):+.1f} %",
        )
        for row in values["rows"]
    ]
    header = ("model and method", "release", "checkpointing", "planned GiB", "measured GiB", "difference")
    return {"plan-vs-measured": table(header, lines)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run all combinations and save them."""
    args = parse(parser(__doc__ or ""), NAME, argv)
    shape = (1, 16) if args.quick else (1, 128)
    configs: dict[str, PretrainedConfig]
    configs = {"llama-60m": llama_60m(), "llama-130m": llama_130m()}
    if args.quick:
        configs = {"tiny llama": tiny_llama(), "tiny qwen3": tiny_qwen3()}
    values: dict[str, Any] = {"rows": []}
    for name, config in configs.items():
        for method in OPTIONS:
            for checkpointing in (False, True):
                for release in (False, True):
                    how = (config, method, release, checkpointing, shape)
                    planned, moment = planned_peak(*how)
                    row = {"model": name, "method": method, "release": release, "checkpointing": checkpointing}
                    row |= {"planned": planned, "moment": moment, "measured": measured_peak(*how)}
                    values["rows"].append(row)
                    save(args.out, {"batch": shape[0], "seq_len": shape[1], "options": OPTIONS}, values, argv)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
