"""The end of a run: its figures as a table and as JSON, its loss curve, and a sample of what the model writes."""

from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pumice.integrations.topology import PREFIX
from pumice.sparse import BlockSparseLinear, Monitor

_GIB = 1 << 30


def adamw_state_bytes(model: nn.Module) -> int:
    """Return the bytes of torch.optim.AdamW's state for a model: two float32 moments a weight, a step a tensor."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum(8 * parameter.numel() + 4 for parameter in trained)


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, length: int, seed: int) -> str:
    """Return a prompt and its continuation by a model.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompt: The beginning; if empty, that of a document.
        length: Tokens to add at most; the model's positions may allow fewer.
        seed: Seed of the choice among likely tokens.
    """
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    ids = ids[-max(1, model.config.max_position_embeddings - length) :]
    room = min(length, model.config.max_position_embeddings - len(ids))
    inputs = torch.tensor([ids], device=model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        written = model.eval().generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=room,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            use_cache=True,
            pad_token_id=tokenizer.eos_token_id,
        )
    return f"{prompt}{tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)}"


def table(figures: dict[str, Any]) -> Table:
    """Return the figures of a finished run for the terminal; bytes in GiB."""
    made = Table(
        title=f"{figures['method']}, {figures['steps']:,} steps, {figures['tokens']:,} tokens", show_header=False
    )
    made.add_column()
    made.add_column(justify="right")
    of = "GPU" if figures["device"] == "cuda" else "process"
    for label, value, form in (
        ("validation perplexity at the start", figures["start_perplexity"], "{:,.2f}"),
        ("validation perplexity at the end", figures["end_perplexity"], "{:,.2f}"),
        ("tokens/s", figures["tokens_per_second"], "{:,.0f}"),
        (f"peak memory of the {of}, GiB", figures["peak_memory_bytes"] / _GIB, "{:,.3f}"),
        ("optimizer state, GiB", figures["optimizer_state_bytes"] / _GIB, "{:,.6f}"),
        ("the same with AdamW, GiB", figures["adamw_state_bytes"] / _GIB, "{:,.6f}"),
    ):
        made.add_row(label, "not measured" if value is None else form.format(value))
    return made


def topology_updates(metrics: list[dict[str, Any]], monitor: Monitor, path: Path) -> None:
    """Draw what the topology updates of a run did to it into a PNG file.

    Left: the training loss around each update, less that of the update's step, and their mean. Right: the RMS of
    updates to newborn weights over that to others, and the share of newborn blocks that survive.

    Args:
        metrics: Lines of a run's metrics.
        monitor: Of its topology.
        path: The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    around, after = figure.subplots(1, 2)
    full = [window for window in monitor.windows if len(window) == monitor.BEFORE + 1 + monitor.AFTER]
    steps = range(-monitor.BEFORE, monitor.AFTER + 1)
    shifted = [[loss - window[monitor.BEFORE] for loss in window] for window in full]
    for window in shifted:
        around.plot(steps, window, color="0.8", linewidth=0.8)
    if shifted:
        around.plot(steps, [fmean(at) for at in zip(*shifted, strict=True)], color="C0", linewidth=2, label="mean")
        around.legend()
    around.axvline(0.5, color="C3", linestyle="--", linewidth=1)
    around.set(xlabel="steps after a topology update", ylabel="training loss, less that of the update's step")
    updates = [line for line in metrics if f"{PREFIX}update" in line]
    for key, label in (
        ("newborn_ratio_1", "newborn to mature updates, first step"),
        ("newborn_ratio_5", "the same, fifth step"),
        ("survival_1", "newborn blocks kept for 1 update"),
        ("survival_past_grace", "… and past grace"),
        ("ever_active", "weights ever active"),
    ):
        points = [(line["step"], line[PREFIX + key]) for line in updates if line.get(PREFIX + key) is not None]
        if points:
            after.plot(*zip(*points, strict=True), ".-", label=label)
    after.set(xlabel="step", ylim=(0, None))
    after.legend()
    for axes in (around, after):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def density_map(model: nn.Module, path: Path, layers: int = 28, pixels: int = 64) -> None:
    """Draw which parts of the block-sparse layers of a model are active into a PNG file.

    Args:
        model: Has block-sparse layers.
        path: The file.
        layers: How many layers to show at most, evenly spaced.
        pixels: Rows and columns of a picture at most; each is the share of active entries in a part of the matrix.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [(name, module) for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)]
    found = found[:: -(-len(found) // layers)]
    columns = min(7, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(2.1 * columns, 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes in grid:
        axes.axis("off")
    for axes, (name, layer) in zip(grid, found, strict=False):
        active = torch.zeros(layer.grid.blocks)
        active[layer.ids[layer.ids < layer.grid.blocks].long().cpu()] = 1
        picture = active.view(1, 1, layer.grid.grid_rows, layer.grid.grid_cols)
        height, width = (min(pixels, length) for length in picture.shape[2:])
        picture = nn.functional.adaptive_avg_pool2d(picture, (height, width))
        axes.imshow(picture[0, 0].numpy(), vmin=0, vmax=1, aspect="auto", cmap="magma")
        axes.set_title(f"{'.'.join(name.split('.')[-3:])}\n{layer.density:.3f}", fontsize=6)
    figure.savefig(path, dpi=120)


def loss_curve(metrics: list[dict[str, Any]], path: Path) -> None:
    """Draw training and validation loss over steps into a PNG file.

    Args:
        metrics: Lines of a run's metrics.
        path: The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token")
    for key, label, style in (("loss", "training", "-"), ("eval_loss", "validation", "o-")):
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
