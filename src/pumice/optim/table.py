"""The routing table: which parameter is trained by which rule, and why, for people to read."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Rule = Literal["sinkgd", "adamw", "frozen"]

_HEADER = ("parameter", "shape", "rule", "input", "reason")


@dataclass(frozen=True)
class Row:
    """How one parameter is trained.

    Attributes:
        name: Full name, as ``model.named_parameters()`` gives it (the first one, if it is shared).
        shape: Global shape.
        rule: ``"sinkgd"``, ``"adamw"`` or ``"frozen"``.
        reason: Why, in a few words.
        transposed: True if the matrix is stored as [in, out], so that its input dimension is the second last axis.
        decays: Whether weight decay applies.
        elements: Number of elements.
        bytes: Bytes of its elements.
        embedding: Whether it is an embedding or an output head.
    """

    name: str
    shape: tuple[int, ...]
    rule: Rule
    reason: str
    transposed: bool
    decays: bool
    elements: int
    bytes: int
    embedding: bool = False

    @property
    def input_dim(self) -> int | None:
        """Size of the input dimension of a balanced matrix; None for any other parameter."""
        return self.shape[-2 if self.transposed else -1] if self.rule == "sinkgd" else None


class Total(NamedTuple):
    """Sums over the parameters that one rule trains."""

    parameters: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Routing:
    """One row per parameter, in the model's order; ``print(routing)`` shows layers of like kind as one line.

    Attributes:
        rows: One row per distinct parameter, frozen ones included.
    """

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        """Return the row of the parameter called ``name``.

        Raises:
            KeyError: No parameter has this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def totals(self) -> dict[str, Total]:
        """Sums by rule, for those rules that have parameters."""
        sums: dict[str, Total] = {}
        for row in self.rows:
            old = sums.get(row.rule, Total(0, 0, 0))
            sums[row.rule] = Total(old.parameters + 1, old.elements + row.elements, old.bytes + row.bytes)
        return dict(sorted(sums.items(), reverse=True))  # sinkgd, frozen, adamw

    def __str__(self) -> str:
        likes: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            likes.setdefault(_cells(row), []).append(row)
        table = [
            _HEADER,
            *(
                (f"{len(rows)} x {name}" if len(rows) > 1 else rows[0].name, *rest)
                for (name, *rest), rows in likes.items()
            ),
        ]
        totals = [
            f"{rule}: {total.parameters:,} parameters, {total.elements:,} elements, {total.bytes / 2**30:.3f} GiB"
            for rule, total in self.totals.items()
        ]
        return "\n".join([*_aligned(table), "", *totals])


def _cells(row: Row) -> tuple[str, ...]:
    """The cells of a row, with layer numbers replaced by a star so that like layers read alike."""
    name, reason = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", text) for text in (row.name, row.reason))
    shape = " x ".join(map(str, row.shape)) or "scalar"
    rule = f"{row.rule}, no decay" if row.rule == "adamw" and not row.decays else row.rule
    return name, shape, rule, "-" if row.input_dim is None else str(row.input_dim), reason


def _aligned(table: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(table)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
