"""Fill the tables of the documentation from the saved results.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` in any Markdown file of docs/ or the README.
``--check`` changes nothing and fails if a table differs from what the results say; ``--list`` prints all tables.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from common import RESULTS, load

ROOT = Path(__file__).parents[1]
SCRIPTS = (
    "optimizer_step",
    "train_throughput",
    "sinkhorn_iterations",
    "sinkgd_variants",
    "bf16_training",
    "moment_codes",
    "sparse_memory",
    "sparse_throughput",
    "dst_stability",
    "stateless_sparse",
)
PLACE = re.compile(r"<!-- table: (?P<name>[\w.-]+) -->\n.*?<!-- end -->", re.DOTALL)


def tables() -> dict[str, str]:
    """Return all tables that the saved results give, by name, each with the machine and date below it."""
    made = {}
    for script in SCRIPTS:
        path = RESULTS / f"{script}.json"
        result = load(path) if path.exists() else {"values": {}}
        if not result["values"].keys() & {
            "rows",
            "cases",
            "parts",
            "measured",
        }:  # not run, or a study that is not finished
            continue
        machine, versions = result["machine"], result["versions"]
        processor = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} of {machine['cores']} cores"
        origin = f"`{result['command']}`, {processor}, torch {versions['torch']}, {result['date'][:10]}"
        for name, text in import_module(script).tables(result["values"]).items():
            made[name] = f"{text}\n\n{origin}"
    return made


def fill(text: str, known: dict[str, str]) -> str:
    """Return ``text`` with its tables replaced.

    Raises:
        SystemExit: a table is not known.
    """

    def filled(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in known:
            raise SystemExit(f"no result gives the table {name}; there are: {', '.join(known)}")
        return f"<!-- table: {name} -->\n{known[name]}\n<!-- end -->"

    return PLACE.sub(filled, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Fill, check or list; return 1 if a check fails."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--check", action="store_true", help="fail if a table is out of date")
    made.add_argument("--list", action="store_true", help="print all tables")
    args = made.parse_args(argv)
    known = tables()
    if args.list:
        print(*(f"<!-- table: {name} -->\n{text}" for name, text in known.items()), sep="\n\n")
        return 0
    stale = []
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]):
        text = path.read_text()
        if (new := fill(text, known)) != text:
            stale.append(path)
            if not args.check:
                path.write_text(new)
    if args.check and stale:
        print("tables out of date, run python benchmarks/tables.py:", *(path.relative_to(ROOT) for path in stale))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
