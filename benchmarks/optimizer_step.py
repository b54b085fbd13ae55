"""What an optimizer step costs: time, state and scratch, of SinkGD and of others on the same tensors.

Weight shapes of llama-60m and of some layers of llama-350m, float32 and bfloat16, once the balanced matrices alone and
once all parameters, where every method treats embeddings, head and norms as it would in use. All methods of a case run
in turn, on the same weights and gradients, with the same threads; what is compiled has fullgraph and dynamic shapes,
but for torchao, which compiles for each shape.

The materialised loop is SR-Sinkhorn as other implementations have it: five times, the rows and then the columns of the
iterate itself are normalised, in the dtype of the gradient.
"""

import gc
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import alternate, parse, parser, save, summary, table
from models import build, llama_60m, llama_350m_stack, tiny_llama
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile
from torchao.optim import AdamW8bit

from pumice.optim import SinkGD, param_groups
from pumice.optim.compiling import compiled

NAME = "optimizer_step"
LEARNING_RATE = 1e-6  # the weights hardly move, so every round does the same work
BASE = "AdamW, torch fused"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Params = list[tuple[str, nn.Parameter]]
Step = Callable[[], object]


def materialised_step(weight: Tensor, gradient: Tensor, row_norm: Tensor, col_norm: Tensor, rate: Tensor) -> None:
    """Balance with L = 5 by normalising the iterate, and descend."""
    x = gradient
    for _ in range(5):
        x = x * (row_norm / torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=1e-8)).to(x.dtype)
        x = x * (col_norm / torch.linalg.vector_norm(x, dim=0, keepdim=True).clamp(min=1e-8)).to(x.dtype)
    weight.sub_(x * rate)


class Materialised(Optimizer):
    """SinkGD by the materialised loop."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"rate": torch.tensor(LEARNING_RATE * 0.05)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            for parameter in group["params"]:
                m, n = parameter.shape
                norms = torch.tensor(n**0.5), torch.tensor(m**0.5)
                arguments = (parameter.detach(), parameter.grad, *norms, group["rate"])
                compiled(materialised_step, *arguments)(*arguments)


def methods(model: nn.Module, whole: bool, dtype: torch.dtype) -> dict[str, list[Optimizer]]:
    """Return the optimizers of every method.

    Args:
        model: parameters have gradients.
        whole: all parameters, or the balanced matrices alone.
        dtype: of the parameters.
    """
    groups = param_groups(model)
    matrices = [p for group in groups if group["rule"] == "sinkgd" for _, p in group["params"]]
    rest = [p for group in groups if group["rule"] == "adamw" for _, p in group["params"]] if whole else []
    rounded = dtype == torch.bfloat16

    def sinkgd(**options: Any) -> list[Optimizer]:
        kept = [dict(group) for group in groups if whole or group["rule"] == "sinkgd"]
        return [SinkGD(kept, LEARNING_RATE, **{"compile": True, **options})]

    def adamw8bit(params: list[nn.Parameter]) -> list[Optimizer]:
        return [AdamW8bit(params, LEARNING_RATE, weight_decay=0.0, bf16_stochastic_round=rounded)] if params else []

    def adamw(params: list[nn.Parameter]) -> list[Optimizer]:
        return [torch.optim.AdamW(params, LEARNING_RATE, weight_decay=0.0, fused=True)] if params else []

    made = {
        BASE: adamw([*matrices, *rest]),
        "SinkGD": sinkgd(),
        "SinkGD, L = 5 cold": sinkgd(sinkhorn_iters=5, warm_start=False),
        "SinkGD, spectral": sinkgd(spectral_target="sqrt"),
        "SinkGD, not compiled": sinkgd(compile=False),
        "AdamW8bit, torchao": adamw8bit([*matrices, *rest]),
        "Muon, torch": [torch.optim.Muon(matrices, LEARNING_RATE, weight_decay=0.0), *adamw(rest)],
        "materialised, L = 5": [Materialised(matrices), *adamw8bit(rest)],
    }
    if rounded:
        made["SinkGD, rounded to nearest"] = sinkgd(stochastic_rounding=False)
    if whole:
        made["SinkGD, AdamW part in 32 bits"] = sinkgd(state_bits=32)
    return made


def storage(tensor: Tensor) -> int:
    """Return the bytes of a tensor or of the tensors that a subclass is made of."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(storage(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def state_bytes(optimizers: list[Optimizer]) -> int:
    """Return the bytes of optimizer state."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(storage(value) for state in states for value in state.values() if isinstance(value, Tensor))


def scratch_bytes(step: Step) -> int:
    """Return the most bytes that a step has allocated at once on the CPU, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    held = most = 0
    for _, change in changes:
        held += change
        most = max(most, held)
    return most


def bandwidth(megabytes: int = 256) -> float:
    """Return the bytes a second that copying a large float32 tensor reads and writes."""
    source = torch.ones(megabytes * 2**20 // 4)
    target = torch.empty_like(source)
    seconds = alternate({"copy": lambda: target.copy_(source)}, rounds=7)["copy"]
    return 2 * source.numel() * 4 / sorted(seconds)[len(seconds) // 2]


def measure(model: nn.Module, whole: bool, dtype: torch.dtype, rounds: int) -> list[dict[str, Any]]:
    """Return a row per method."""
    made = methods(model, whole, dtype)

    def stepper(optimizers: list[Optimizer]) -> Step:
        return lambda: [optimizer.step() for optimizer in optimizers]

    steps = {name: stepper(optimizers) for name, optimizers in made.items()}
    for step in steps.values():
        step()
    scratch = {name: scratch_bytes(step) for name, step in steps.items()}
    timings = {name: summary(seconds) for name, seconds in alternate(steps, rounds, warmup=0).items()}
    base = timings[BASE]["median_ms"]
    return [
        {
            "method": name,
            **timing,
            "ratio": timing["median_ms"] / base,
            "state_bytes": state_bytes(made[name]),
            "scratch_bytes": scratch[name],
        }
        for name, timing in timings.items()
    ]


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name: all ratios in one, and the details of each model and scope."""
    cases = values["cases"]
    names = list(dict.fromkeys(row["method"] for case in cases for row in case["rows"]))
    rows = {(id(case), row["method"]): row for case in cases for row in case["rows"]}
    ratios = [
        [name, *(f"{rows[id(case), name]['ratio']:.2f}" if (id(case), name) in rows else "" for case in cases)]
        for name in names
    ]
    labels = [f"{case['model']}, {case['dtype']}, {case['scope']}" for case in cases]
    made = {"optimizer-step": table(["time to AdamW's", *labels], ratios)}
    for model, scope in dict.fromkeys((case["model"], case["scope"]) for case in cases):
        chosen = [case for case in cases if (case["model"], case["scope"]) == (model, scope)]
        header = ["method"]
        for case in chosen:
            header += [f"{case['dtype']}, ms", "to AdamW", "state, MiB", "scratch, MiB"]
        lines = []
        for name in names:
            found = [rows.get((id(case), name)) for case in chosen]
            if any(found):
                lines.append([name, *(cell for row in found for cell in (cells(row) if row else [""] * 4))])
        made[f"optimizer-step-{model}-{scope}"] = table(header, lines)
    return made


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a method in a case."""
    mebibytes = [f"{row[key] / 2**20:.1f}" for key in ("state_bytes", "scratch_bytes")]
    return [f"{row['median_ms']:.0f}", f"{row['ratio']:.2f}", *mebibytes]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the comparison and save it."""
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=7)
    args = parse(made, NAME, argv)
    with torch.compiler.set_stance("force_eager" if args.quick else "default"):
        return compare(args, argv)


def compare(args: Namespace, argv: Sequence[str] | None) -> dict[str, Any]:
    """Measure all cases; save after each."""
    configs = (
        {"tiny": lambda: tiny_llama(layers=1)}
        if args.quick
        else {"llama-60m": llama_60m, "llama-350m-stack": llama_350m_stack}
    )
    rounds = 1 if args.quick else args.rounds
    values: dict[str, Any] = {"copy_bytes_per_second": bandwidth(1 if args.quick else 256), "cases": []}
    for name, config in configs.items():
        for label, dtype in DTYPES.items():
            model = build(config()).to(dtype)
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            for scope in ("matrices", "all"):
                rows = measure(model, scope == "all", dtype, rounds)
                gc.collect()
                case = {"model": name, "dtype": label, "scope": scope, "rows": rows}
                values["cases"].append(case)
                save(args.out, {"rounds": rounds, "lr": LEARNING_RATE}, values, argv)
                print(f"\n{name}, {label}, {scope}", flush=True)
                header = ("method", "ms", "to AdamW", "state, MiB", "scratch, MiB")
                print(table(header, [(row["method"], *cells(row)) for row in rows]), flush=True)
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
