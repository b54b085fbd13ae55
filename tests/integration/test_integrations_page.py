"""The page on integrations shows what the tested examples contain."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"`examples/([\w.]+)`\n\n```\w+\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_every_example_is_shown_and_short() -> None:
    files = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
    assert {name for name, _ in SHOWN} == files
    assert all(len((ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()) < 40 for name in files)


@pytest.mark.parametrize(("name", "lines"), SHOWN, ids=[name for name, _ in SHOWN])
def test_shown_lines_are_the_examples(name: str, lines: str) -> None:
    example = [line.strip() for line in (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()]
    assert [line for line in lines.splitlines() if line.strip() not in example] == []
