"""What 8-bit codes of AdamW's moments lose and cost: pumice's fourth powers against torchao's dynamic map."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from common import alternate, parse, parser, save, table
from torch import Tensor
from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor
from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

from pumice.optim import quantised

NAME = "moment_codes"
BLOCK = 256
Codec = Callable[[Tensor], Tensor]


def moments(blocks: int, tail: float) -> dict[str, Tensor]:
    """Return first and second moments of Gaussian gradients whose sizes differ by exp(tail · normal) in a block."""
    generator = torch.Generator().manual_seed(0)
    size = (tail * torch.randn(blocks, BLOCK, generator=generator)).exp()
    recent = torch.randn(10, blocks, BLOCK, generator=generator) * size
    return {"first": recent.mean(0), "second": recent.square().mean(0)}


def fourth_powers(signed: bool) -> Codec:
    """Return encoding and decoding by pumice."""
    uniform = torch.rand(BLOCK, generator=torch.Generator().manual_seed(1))

    def encode(values: Tensor, codes: Tensor, scale: Tensor) -> None:
        if signed:
            quantised.encode_signed(values, codes, scale)
        else:
            quantised.encode_unsigned(values, codes, scale, uniform)

    decode = quantised.decode_signed if signed else quantised.decode_unsigned

    def there_and_back(values: Tensor) -> Tensor:
        codes, scale = torch.empty_like(values, dtype=torch.uint8), torch.empty_like(values[:, 0])
        encode(values, codes, scale)
        return decode(codes, scale)

    return there_and_back


def dynamic_map(signed: bool) -> Codec:
    """Return encoding and decoding by torchao."""
    code_map = torch.tensor(get_qmap_signed() if signed else get_qmap_unsigned())

    def there_and_back(values: Tensor) -> Tensor:
        scaled, scale = scale_tensor(values, BLOCK)
        return dequant_with_qmap(quantize_8bit_with_qmap(scaled, code_map), code_map, scale)

    return there_and_back


def loss(values: Tensor, stored: Tensor) -> dict[str, float]:
    """Return error measures of stored values."""
    error = (stored - values).abs()
    return {
        "rms": float(error.norm() / values.norm()),
        "median_relative": float((error / values.abs()).median()),
        "stored_as_zero": float(((stored == 0) & (values != 0)).float().mean()),
    }


def tables(values: dict[str, Any]) -> dict[str, str]:
    """Return the tables of a result by name."""
    rows = [
        (
            f"{row['moment']}, sizes vary by e^{row['tail']:g}",
            row["codes"],
            f"{row['rms']:.2%}",
            f"{row['median_relative']:.2%}",
            f"{row['stored_as_zero']:.3%}",
            f"{row['nanoseconds']:.1f}",
        )
        for row in values["rows"]
    ]
    header = ("moment", "codes", "RMS error", "median relative error", "stored as zero", "ns per element")
    return {"moment-codes": table(header, rows)}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and save."""
    args = parse(parser(__doc__ or ""), NAME, argv)
    blocks, rounds = (16, 1) if args.quick else (4096, 9)
    rows = []
    for tail in (0.0, 1.0, 2.0):
        for moment, values in moments(blocks, tail).items():
            codecs = {
                "fourth powers": fourth_powers(moment == "first"),
                "dynamic map": dynamic_map(moment == "first"),
            }
            timed = codecs if args.quick else {name: torch.compile(codec) for name, codec in codecs.items()}
            seconds = alternate({name: partial(codec, values) for name, codec in timed.items()}, rounds)
            for name, codec in codecs.items():
                nanoseconds = median(seconds[name]) / values.numel() * 1e9
                row = {"moment": moment, "tail": tail, "codes": name, "nanoseconds": nanoseconds}
                rows.append({**row, **loss(values, codec(values))})
    values = {"rows": rows}
    save(args.out, {"block": BLOCK, "blocks": blocks, "rounds": rounds}, values, argv)
    print(*tables(values).values(), sep="\n\n")
    return values


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
