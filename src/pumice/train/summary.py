"""The end of a run: its figures as a table and as JSON, its loss curve, and a sample of what the model writes."""

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

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
