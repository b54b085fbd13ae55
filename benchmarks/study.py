"""Training small models to compare methods: the same weights and batches for all, results kept run by run."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from common import commit, load, save
from models import Corpus, build
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig, PreTrainedModel

from pumice.optim import SinkGD

EMBEDDINGS = r"embed_tokens|lm_head"
Observer = Callable[[int, Optimizer], None]


@dataclass(frozen=True)
class Plan:
    """How a run trains; nothing here depends on the method."""

    steps: int = 240
    batch: int = 8  # windows a step
    length: int = 128  # tokens a window
    warmup: float = 0.1  # share of the steps, linear; then a cosine down to ``floor``
    floor: float = 0.1  # share of the peak learning rate
    validation_windows: int = 128  # fixed, evenly spaced over the validation text
    evaluations: int = 4  # evenly spaced over the run, the last one at its end

    def rate(self, step: int) -> float:
        """Return the share of the peak learning rate that update ``step``, from 0, uses."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return (step + 1) / warm
        progress = (step - warm) / max(1, self.steps - warm)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


def adamw(
    model: nn.Module,
    lr: float,
    betas: Sequence[float],
    embedding_lr: float | None = None,
) -> torch.optim.AdamW:
    """Make torch's fused AdamW, without weight decay, with another learning rate for embeddings and head if given."""
    apart = {id(p) for name, p in model.named_parameters() if re.search(EMBEDDINGS, name)}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if id(p) not in apart]},
        {"params": [p for p in model.parameters() if id(p) in apart], "lr": embedding_lr or lr},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), weight_decay=0.0, fused=True)


def optimizer(model: nn.Module, spec: Mapping[str, Any], compile: bool) -> Optimizer:
    """Make the optimizer that ``spec`` describes.

    "method" is "adamw" or "sinkgd", the rest are arguments of :func:`adamw` or ``SinkGD.from_model``. "embeddings"
    holds options of SinkGD for embeddings and head alone, which are balanced then.
    """
    options = {key: value for key, value in spec.items() if key != "method"}
    if spec["method"] == "adamw":
        return adamw(model, **options)
    return SinkGD.from_model(model, compile=compile, **options)


class Bench:
    """One architecture, compiled once and trained many times.

    Args:
        config: of the model.
        corpus: text to train on.
        plan: how.
        compile: whether to compile the model and the optimizers.
        convert: changes a new model of a seed in place, for example to a block-sparse one.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        corpus: Corpus,
        plan: Plan,
        compile: bool = True,
        convert: Callable[[nn.Module, int], object] = lambda model, seed: None,
    ) -> None:
        self.config, self.corpus, self.plan, self.compile, self._convert = config, corpus, plan, compile, convert
        self.model = self._new(seed=0)
        torch.compiler.reset()  # or the forms for other benches would count towards the limit of this one
        self._loss = torch.compile(self._plain_loss) if compile else self._plain_loss
        starts = torch.linspace(0, len(corpus.validation) - plan.length - 1, plan.validation_windows).long()
        self._validation = self._windows(corpus.validation, starts)

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        return text[starts.unsqueeze(-1) + torch.arange(self.plan.length + 1)].long()

    def _plain_loss(self, windows: Tensor) -> Tensor:
        logits = self.model(input_ids=windows[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def reset(self, seed: int) -> None:
        """Give the model the weights of ``seed``."""
        self.model.load_state_dict(self._new(seed).state_dict())
        self.model.zero_grad()

    def _new(self, seed: int) -> PreTrainedModel:
        model = build(self.config, seed)
        self._convert(model, seed)
        return model

    @torch.no_grad()
    def validate(self, windows: int | None = None) -> float:
        """Return the mean loss over all tokens of the first (or all) validation windows, in nats a byte."""
        total = tokens = 0.0
        for batch in self._validation[:windows].split(self.plan.batch):
            count = batch.shape[0] * self.plan.length
            total += float(self._loss(batch)) * count
            tokens += count
        return total / tokens

    def train(
        self,
        seed: int,
        make: Callable[[nn.Module], Optimizer],
        clip: float | None,
        observe: Observer | None = None,
        tick: Observer | None = None,
        plan: Plan | None = None,
    ) -> dict[str, Any]:
        """Train from the weights of ``seed`` on the batches of ``seed``.

        Args:
            seed: of weights and batches.
            make: makes the optimizer.
            clip: largest norm of all gradients together; None: no clipping.
            observe: called with the number of the update, from 0, and the optimizer before each update.
            tick: likewise after each, while the gradients are still there.
            plan: another than the bench's, with windows of the same length.

        Returns:
            loss: validation loss at the end, None if it is not finite; curve: pairs (update, validation loss);
            train_loss: mean over the last tenth; seconds.
        """
        plan, begin = plan or self.plan, time.perf_counter()
        self.reset(seed)
        made = make(self.model)
        schedule = LambdaLR(made, plan.rate)
        generator = torch.Generator().manual_seed(seed)
        marks = {round(plan.steps * (i + 1) / plan.evaluations) for i in range(plan.evaluations)}
        curve: list[tuple[int, float]] = []
        losses: list[float] = []
        for step in range(plan.steps):
            starts = torch.randint(len(self.corpus.train) - plan.length, (plan.batch,), generator=generator)
            loss = self._loss(self._windows(self.corpus.train, starts))
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            if observe is not None:
                observe(step, made)
            made.step()
            if tick is not None:
                tick(step, made)
            schedule.step()
            made.zero_grad()
            if step + 1 in marks:
                curve.append((step + 1, self.validate()))
        final = curve[-1][1] if curve and curve[-1][0] == plan.steps else math.nan
        tail = losses[-max(1, plan.steps // 10) :]
        return {
            "loss": final if math.isfinite(final) else None,
            "curve": curve,
            "train_loss": sum(tail) / len(tail) if math.isfinite(tail[-1]) else None,
            "seconds": round(time.perf_counter() - begin, 1),
        }


class Runs:
    """Results by the run's description, in a file that is written after every run; finished runs are not repeated."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], argv: Sequence[str] | None = None) -> None:
        self._path, self._settings, self._argv = path, settings, argv
        self.done: list[dict[str, Any]] = []
        if path is not None and path.exists():
            kept = load(path)
            if json.loads(json.dumps(settings)) != kept["settings"]:
                raise SystemExit(f"{path.name} holds runs with other settings: move it away or pass --out")
            self.done = kept["values"]["runs"]

    def get(self, description: Mapping[str, Any], work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a run: the stored one, or that of ``work``, which is stored."""
        wanted = json.loads(json.dumps(description))
        for run in self.done:
            if run["run"] == wanted:
                return run["result"]
        made = json.loads(json.dumps(work()))
        now = {"commit": commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        self.done.append({"run": wanted, "result": made, **now})
        self.write()
        print(json.dumps(wanted), "->", made.get("loss"), f"({made.get('seconds')} s)", flush=True)
        return made

    def write(self, **values: Any) -> None:
        """Write the file; ``values`` are further entries beside the runs."""
        save(self._path, self._settings, {**values, "runs": self.done}, self._argv)


def tune(
    loss: Callable[[float], float | None], start: Sequence[float], most: int = 8
) -> tuple[float, dict[float, float]]:
    """Find the best of a geometric grid, which grows by its own ratio for as long as the best lies at an edge.

    Args:
        loss: what to minimise, None standing for infinity.
        start: at least two values, ascending.
        most: values to try at most.

    Returns:
        The best value and the losses of all that were tried.
    """
    ratio = start[1] / start[0]
    grid = list(start)
    losses: dict[float, float] = {}
    while True:
        for value in grid:
            if value not in losses:
                found = loss(value)
                losses[value] = math.inf if found is None else found
        best = min(losses, key=lambda value: losses[value])
        if len(grid) >= most or best not in (grid[0], grid[-1]):
            return best, losses
        grid = [float(f"{grid[0] / ratio:.6g}"), *grid] if best == grid[0] else [*grid, float(f"{best * ratio:.6g}")]


def settings(plan: Plan, corpus: Corpus, **more: Any) -> dict[str, Any]:
    """Return the settings that a study's result file records."""
    return {
        "plan": asdict(plan),
        "data": {"name": corpus.name, "fingerprint": corpus.fingerprint()},
        "weight_decay": 0.0,
        "clip": {"sinkgd": None, "adamw": 1.0},
        **more,
    }
