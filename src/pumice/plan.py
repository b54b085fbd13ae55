"""``pumice plan MODEL``: will it fit, and what else would?"""

import argparse
import dataclasses
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from pumice import methods
from pumice.errors import UserError
from pumice.memory.cards import GIB, card_bytes
from pumice.memory.loss import use_chunked_loss
from pumice.memory.plan import Plan, Sharding, plan
from pumice.memory.trace import Stored, Timeline, record, stored
from pumice.train.load import method_options
from pumice.train.model import build_config, presets
from pumice.train.recipe import ModelConfig

RESERVE = GIB  # of the driver's context, libraries' workspaces and gaps between allocations
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_ALTERNATIVES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("adamw", {}),
    ("adamw", {"state_bits": 8}),
    ("sinkgd", {}),
    ("smet", {}),
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; pumice plan --help lists the options")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's words."""
    made = _Parser(
        prog="pumice plan",
        description="Peak memory of training, from the model's configuration alone; nothing is allocated.",
        allow_abbrev=False,
    )
    made.add_argument("model", help=f"a preset ({', '.join(presets())}), a config.json, a folder or a hub name")
    made.add_argument("--method", default="sinkgd", help=f"one of {', '.join(methods.METHODS)} (default sinkgd)")
    made.add_argument("--dtype", default="bfloat16", help=f"of the weights: {', '.join(_DTYPES)} (default bfloat16)")
    made.add_argument("--seq-len", type=int, default=2048, help="tokens of a sequence (default 2048)")
    made.add_argument("--micro-batch", type=int, default=1, help="sequences of a micro-batch (default 1)")
    made.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    made.add_argument("--release", action="store_true", help="update in the backward pass and free gradients")
    made.add_argument("--loss-chunk", type=int, help="tokens whose logits exist at a time (default: all)")
    made.add_argument("--state-bits", type=int, help="bits of AdamW's moments, 8 or 32 (default: the method's)")
    made.add_argument("--density", type=float, help="of sparse methods: share of weights that are active")
    made.add_argument("--block-shape", help="of sparse methods: ROWS,COLUMNS of a block")
    made.add_argument("--gpus", type=int, default=1, help="number of devices (default 1)")
    made.add_argument("--sharding", default="fsdp", help="with several devices: fsdp or ddp (default fsdp)")
    made.add_argument("--gpu", help="the card: a name like rtx4090 or h100-80g, or a size like 24GiB")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


@dataclasses.dataclass(frozen=True)
class _Case:
    """What is planned."""

    method: str
    options: dict[str, Any]
    release: bool
    checkpointing: bool
    micro_batch: int
    seq_len: int


class _Planner:
    """Plans cases of one model, tracing what they share once."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, chunk: int | None, shards: Sharding, gpu: bool):
        self._config, self._dtype, self._chunk, self._shards, self._gpu = config, dtype, chunk, shards, gpu
        self._models: dict[str, nn.Module] = {}
        self._stored: dict[str, Stored] = {}
        self._timelines: dict[Any, Timeline] = {}

    def __call__(self, case: _Case) -> Plan:
        chosen = methods.get(case.method)
        settings = chosen.settings(case.options)
        key = f"{case.method} {case.options}" if chosen.prepare else ""
        if key not in self._models:
            with torch.device("meta"):
                model: nn.Module = AutoModelForCausalLM.from_config(self._config, dtype=self._dtype)
            self._models[key] = chosen.prepare(model, settings, 0) if chosen.prepare else model
        of_method = f"{case.method} {case.options}"
        if of_method not in self._stored:
            build: Callable[[nn.Module], Any] = lambda model: chosen.build(model, 1e-3, 0.0, settings)  # noqa: E731
            self._stored[of_method] = stored(self._models[key], build, self._gpu)
        shape = (case.micro_batch, case.seq_len)
        of_step = (key, case.checkpointing, shape)
        if of_step not in self._timelines:
            self._timelines[of_step] = record(self._models[key], self._forward(case.checkpointing, shape))
        return plan(self._timelines[of_step], self._stored[of_method], release=case.release, sharding=self._shards)

    def _forward(self, checkpointing: bool, shape: tuple[int, int]) -> Callable[[nn.Module], Tensor]:
        def forward(model: nn.Module) -> Tensor:
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
            if self._chunk is not None:
                use_chunked_loss(model, self._chunk, check=False)
            ids = torch.zeros(shape, dtype=torch.long)
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        return forward


def run(words: Sequence[str]) -> int:
    """Plan as the words of the command say, and print the result.

    Raises:
        UserError: A word, the model, the card or the combination is wrong.
    """
    args = parser().parse_args(list(words))
    for name in ("seq_len", "micro_batch", "gpus"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.loss_chunk is not None and args.loss_chunk < 1:
        raise UserError(f"--loss-chunk must be at least 1, got {args.loss_chunk}")
    if args.dtype not in _DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(_DTYPES)}, got '{args.dtype}'")
    card = None if args.gpu is None else card_bytes(args.gpu)
    sharding = Sharding(args.gpus, args.sharding)
    options = _options(args)
    config = _config(args.model)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and args.seq_len > positions:
        raise UserError(f"--seq-len is {args.seq_len}, more than the model's {positions} positions")
    planner = _Planner(config, _DTYPES[args.dtype], args.loss_chunk, sharding, card is not None)
    case = _Case(args.method, options, args.release, args.checkpointing, args.micro_batch, args.seq_len)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of names, not of what they do
    try:
        found = planner(case)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error
    result: dict[str, Any] = {
        "model": args.model,
        **dataclasses.asdict(case),
        "peak_bytes": found.peak_bytes,
        "moment": found.moment,
        "breakdown_bytes": found.breakdown_bytes,
        "card_bytes": card,
        "reserve_bytes": RESERVE,
        "fits": None if card is None else found.peak_bytes + RESERVE <= card,
        "alternatives": _alternatives(planner, case, card, sharding),
        "largest": None if card is None else _largest(planner, case, card, positions),
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _show(result)
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {"state_bits": args.state_bits, "density": args.density}
    if args.block_shape is not None:
        sides = args.block_shape.replace("x", ",").split(",")
        if len(sides) != 2 or not all(side.strip().isdigit() for side in sides):
            raise UserError(f"--block-shape must be two whole numbers like 1,64, got '{args.block_shape}'")
        given["block_shape"] = [int(side) for side in sides]
    options = {key: value for key, value in given.items() if value is not None}
    known = {field.name for field in dataclasses.fields(methods.get(args.method).options)}
    for key in options:
        if key not in known:
            raise UserError(f"--{key.replace('_', '-')} is not an option of method {args.method}")
    made = method_options(args.method, options)
    return {key: getattr(made, key) for key in options}


def _config(name: str) -> PretrainedConfig:
    config = build_config(ModelConfig(name))
    config.use_cache = False
    return config


def _alternatives(planner: _Planner, case: _Case, card: int | None, sharding: Sharding) -> list[dict[str, Any]]:
    """Plan methods × release × checkpointing, smallest peak first; without methods that the model is too small for."""
    rows = []
    own = (case.method, case.options)
    for method, chosen in (own, *(other for other in _ALTERNATIVES if other != own)):
        for release in (False, True) if sharding.devices == 1 else (False,):
            for checkpointing in (False, True):
                other = dataclasses.replace(
                    case, method=method, options=chosen, release=release, checkpointing=checkpointing
                )
                try:
                    peak = planner(other).peak_bytes
                except UserError:  # the case asked for has been planned already; another method may not fit the model
                    continue
                rows.append(
                    {
                        "method": method,
                        "options": chosen,
                        "release": release,
                        "checkpointing": checkpointing,
                        "peak_bytes": peak,
                        "fits": None if card is None else peak + RESERVE <= card,
                    }
                )
    return sorted(rows, key=lambda row: row["peak_bytes"])


def _largest(planner: _Planner, case: _Case, card: int, positions: int | None) -> dict[str, int]:
    """Return the largest micro-batch at this sequence length that fits, and the largest length in steps of 256."""

    def most(fits: Callable[[int], bool], limit: int) -> int:
        low, high = 0, 1
        while high <= limit and fits(high):
            low, high = high, 2 * high
        high = min(high, limit + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def fits(**changes: int) -> bool:
        return planner(dataclasses.replace(case, **changes)).peak_bytes + RESERVE <= card  # type: ignore[arg-type]

    step = 256
    return {
        "micro_batch": most(lambda n: fits(micro_batch=n), 1024),
        "seq_len": step * most(lambda n: fits(seq_len=step * n), (positions or 1 << 20) // step),
    }


def _show(result: dict[str, Any]) -> None:
    console = Console()
    console.print(f"peak memory of {result['model']}, {_how(result)}", soft_wrap=True)
    table = Table(show_header=False)
    table.add_column()
    table.add_column("GiB", justify="right")
    for category, size in result["breakdown_bytes"].items():
        name = {"optimizer_state": "optimizer state", "logits": "logits and loss"}.get(category, category)
        table.add_row(name, f"{size / GIB:,.3f}")
    table.add_section()
    table.add_row(f"peak, GiB ({result['moment']})", f"{result['peak_bytes'] / GIB:,.3f}")
    console.print(table)
    if result["card_bytes"] is not None:
        card, left = result["card_bytes"] / GIB, result["card_bytes"] - RESERVE - result["peak_bytes"]
        verdict = (
            f"fits, with {left / GIB:.2f} GiB to spare" if left >= 0 else f"does not fit: {-left / GIB:.2f} GiB short"
        )
        console.print(
            f"{verdict}, of {card:.2f} GiB with {RESERVE / GIB:.0f} GiB reserved for driver and fragmentation"
        )
        largest = result["largest"]
        console.print(
            f"largest that fits so: micro-batch {largest['micro_batch']} at {result['seq_len']} tokens, "
            f"or {largest['seq_len']} tokens at micro-batch {result['micro_batch']}",
            soft_wrap=True,
        )
    others = Table(title="what else")
    for column in ("method", "release", "checkpointing", "peak GiB", "fits"):
        others.add_column(column, justify="right" if "GiB" in column else "left")
    for row in result["alternatives"]:
        fits = "" if row["fits"] is None else "yes" if row["fits"] else "no"
        flags = ["yes" if row[key] else "no" for key in ("release", "checkpointing")]
        others.add_row(_name(row), *flags, f"{row['peak_bytes'] / GIB:,.2f}", fits)
    console.print(others)


def _name(row: dict[str, Any]) -> str:
    return " ".join([row["method"], *(f"{key}={value}" for key, value in row["options"].items())])


def _how(result: dict[str, Any]) -> str:
    extras = [name for name in ("release", "checkpointing") if result[name]]
    return ", ".join([_name(result), f"micro-batch {result['micro_batch']}, {result['seq_len']} tokens", *extras])
