import gzip
import itertools
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from pumice.errors import UserError
from pumice.train.recipe import DataConfig
from pumice.train.stream import TokenStream, hold_out
from pumice.train.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([], vocab_size=257)


def config(path: Path, count: int = 60, **fields: object) -> DataConfig:
    rows = [json.dumps({"text": f"document {number:03d}"}) for number in [*range(count), 0, 1]]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    options = {"seq_len": 13, "shuffle_buffer": 20, "validation_documents": 5, **fields}
    return DataConfig(path=str(path), streaming=True, **options)


def blocks(made: TokenStream, count: int, workers: int = 0) -> list[str]:
    loader = DataLoader(made, batch_size=None, num_workers=workers)
    return [TOKENIZER.decode(block["input_ids"]) for block in itertools.islice(loader, count)]


def test_passes_are_shuffled_anew_hold_every_document_once_and_none_that_is_held_out(tmp_path: Path) -> None:
    """A block is exactly one document with its end-of-text token; copies of the first two lie at the end."""
    made = config(tmp_path / "a.jsonl.gz")
    held = hold_out(made, seed=0)
    assert held.documents["text"][:] == [f"document {number:03d}" for number in range(5)]
    read = blocks(TokenStream(made, held, TOKENIZER, seed=0), 110)
    wanted = [f"document {number:03d}<|endoftext|>" for number in range(5, 60)]
    first, second = read[:55], read[55:]
    assert sorted(first) == sorted(second) == wanted
    assert first != wanted
    assert first != second
    assert blocks(TokenStream(made, held, TOKENIZER, seed=0), 110, workers=1) == read
    assert blocks(TokenStream(made, held, TOKENIZER, seed=0), 110, workers=2) == read
    assert blocks(TokenStream(made, held, TOKENIZER, seed=1), 55) != first


def test_documents_longer_and_shorter_than_a_block_lose_no_token(tmp_path: Path) -> None:
    whole = config(tmp_path / "a.jsonl.gz", shuffle_buffer=0)
    held = hold_out(whole, seed=0)
    joined = "".join(blocks(TokenStream(whole, held, TOKENIZER, seed=0), 55))
    for length in (5, 50):
        cut = config(tmp_path / "a.jsonl.gz", shuffle_buffer=0, seq_len=length)
        made = TokenStream(cut, held, TOKENIZER, seed=0)
        assert "".join(blocks(made, 55 * 13 // length)) == joined[: len("".join(blocks(made, 55 * 13 // length)))]
        assert next(iter(made))["input_ids"].dtype == torch.int32


def test_weights_of_streams(tmp_path: Path) -> None:
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (one, other):
        path.write_text("".join(json.dumps({"text": f"{path.stem}{number:04d}"}) + "\n" for number in range(500)))
    mixed = DataConfig(
        sources={str(one): 3, str(other): 1}, streaming=True, seq_len=6, shuffle_buffer=0, validation_documents=2
    )
    read = blocks(TokenStream(mixed, hold_out(mixed, seed=0), TOKENIZER, seed=0), 600)
    assert sum(text.startswith("a") for text in read) / 600 == pytest.approx(0.75, abs=0.06)


def test_a_stream_of_nothing_but_what_is_held_out_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 60 documents, and data\.validation_documents holds out 60 of them"):
        hold_out(config(tmp_path / "a.jsonl.gz", validation_documents=60), seed=0)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{')
    bad = DataConfig(path=str(tmp_path / "bad.jsonl"), streaming=True)
    with pytest.raises(UserError, match=r"bad\.jsonl', line 2: not JSON"):
        hold_out(bad, seed=0)
