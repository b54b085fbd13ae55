import gzip
import json
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from pumice.errors import UserError
from pumice.train import data, sources
from pumice.train.data import fingerprint, load_documents, pack
from pumice.train.recipe import DataConfig
from pumice.train.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer([], vocab_size=257)  # one token a byte, so that counts can be made by hand
END = TOKENIZER.eos_token_id


def texts(dataset: datasets.Dataset) -> list[str]:
    return list(dataset["text"])


def everything(path: Path, **fields: object) -> list[str]:
    return sorted(text for part in load_documents(DataConfig(path=str(path), **fields), seed=0) for text in texts(part))


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_one_text_file_is_cut_at_a_line_end_and_loses_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {number}\r\n" for number in range(100))
    path = tmp_path / "book.md"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    train, validation = load_documents(DataConfig(path=str(path), validation_fraction=0.25), seed=0)
    assert texts(train)[0] + texts(validation)[0] == text  # line ends as in the file, the byte order mark gone
    assert texts(train)[0].endswith("\n")
    assert len(texts(validation)[0]) / len(text) == pytest.approx(0.25, abs=0.02)


def test_one_text_without_line_ends_is_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_text("x" * 80 + "y" * 20)
    assert everything(path, validation_fraction=0.2) == ["x" * 80, "y" * 20]


def test_a_folder_gives_its_text_and_jsonl_files_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "deep" / "er" / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    jsonl(tmp_path / "deep" / "c.jsonl", [{"text": "three"}, {"text": "four"}])
    for ignored in ("image.png", ".hidden/d.txt", "deep/.e.txt"):
        (tmp_path / ignored).write_text("ignored")
    assert everything(tmp_path) == ["four", "one", "three", "two"]


def test_jsonl_reads_the_named_column_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"body": "a\\nb", "text": 1}\n\n  \n{"body": "ü"}')
    assert everything(path, text_column="body") == ["a\nb", "ü"]


def test_documents_of_white_space_are_left_out(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": t} for t in ("a", "", " \n", "b")])
    assert everything(path) == ["a", "b"]


def test_python_sources_are_those_of_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "lib/z.py": b"z = 1\n",
        "lib/json/decoder.py": b"# decoder\n",
        "lib/latin.py": b"# -*- coding: latin-1 -*-\n# \xfc\n",
        "lib/broken.py": b"# \xfc\n",  # neither UTF-8 nor declared otherwise
        "lib/test/test_z.py": b"# a test\n",
        "lib/notes.txt": b"no source\n",
        "lib/site-packages/other/a.py": b"# installed\n",
        "lib/site-packages/other/tests/b.py": b"# a test\n",
    }
    orders = []
    for place in ("here", "elsewhere/zz"):
        for name, content in files.items():
            file = tmp_path / place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        lib = str(tmp_path / place / "lib")
        paths = {"stdlib": lib, "purelib": f"{lib}/site-packages", "platlib": f"{lib}/site-packages"}
        monkeypatch.setattr(sources.sysconfig, "get_paths", lambda paths=paths: paths)
        standard = ["# -*- coding: latin-1 -*-\n# ü\n", "# decoder\n", "z = 1\n"]
        assert everything(Path("python-sources")) == standard
        assert everything(Path("python-sources"), site_packages=True) == sorted([*standard, "# installed\n"])
        orders.append(texts(load_documents(DataConfig(), seed=3).train))
    assert orders[0] == orders[1]


def test_python_sources_hold_the_standard_library() -> None:
    train, validation = load_documents(DataConfig(), seed=0)
    read = {text for part in (train, validation) for text in texts(part)}
    assert Path(json.__file__).read_text() in read
    assert Path(pytest.__file__).read_text() not in read
    assert len(validation) == round(0.02 * len(read))


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.999])
def test_the_parts_are_disjoint_whole_and_never_empty(tmp_path: Path, fraction: float) -> None:
    rows = [f"document {number}" for number in range(50)]
    path = jsonl(tmp_path / "rows.jsonl", [{"text": row} for row in rows])
    train, validation = load_documents(DataConfig(path=str(path), validation_fraction=fraction), seed=1)
    assert sorted(texts(train) + texts(validation)) == sorted(rows)
    assert len(validation) == {0.001: 1, 0.3: 15, 0.999: 49}[fraction]


def test_copies_of_a_document_cannot_be_in_both_parts(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": f"document {number % 10}"} for number in range(200)])
    for seed in range(5):
        train, validation = load_documents(DataConfig(path=str(path), validation_fraction=0.5), seed)
        assert not set(texts(train)) & set(texts(validation))
        assert len(train) == len(validation) == 5


def test_order_and_parts_are_a_function_of_the_seed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": f"document {number}"} for number in range(50)])
    config = DataConfig(path=str(path), validation_fraction=0.2)
    first, again, other = (list(map(texts, load_documents(config, seed))) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != other[0]
    assert sorted(first[1]) != sorted(other[1])


def test_max_documents_caps_both_parts_together(tmp_path: Path) -> None:
    rows = [f"document {number:02d}" for number in range(50)]
    path = jsonl(tmp_path / "rows.jsonl", [{"text": row} for row in rows])
    kept = everything(path, max_documents=10)
    assert len(kept) == 10
    assert kept != rows[:10]  # taken after the shuffle
    assert everything(path, max_documents=100) == rows


def test_blocks_are_the_joined_documents_cut_without_regard_to_their_ends() -> None:
    documents = datasets.Dataset.from_dict({"text": ["abc", "", "defgh", "ij"]})
    a, b, c, d, e, f, g, h, i = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "abcdefghi")
    blocks = pack(documents, TOKENIZER, seq_len=4)
    assert blocks["input_ids"][:] == [[a, b, c, END], [END, d, e, f], [g, h, END, i]]  # [j, END] is no whole block


def test_blocks_do_not_depend_on_how_documents_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = datasets.Dataset.from_dict({"text": [f"document {number}\n" * (number % 7) for number in range(40)]})
    at_once = fingerprint(pack(documents, TOKENIZER, seq_len=16))
    monkeypatch.setattr(data, "_DOCUMENTS_AT_ONCE", 3)
    assert fingerprint(pack(documents, TOKENIZER, seq_len=16)) == at_once


def test_the_order_of_batches_does_not_depend_on_the_workers() -> None:
    documents = datasets.Dataset.from_dict({"text": [f"document {number}" for number in range(60)]})
    blocks = pack(documents, TOKENIZER, seq_len=16).with_format("torch")
    runs = []
    for workers in (0, 1, 2):
        sampler = RandomSampler(blocks, generator=torch.Generator().manual_seed(5))
        loader = DataLoader(blocks, batch_size=4, sampler=sampler, num_workers=workers)
        runs.append([batch["input_ids"].tolist() for batch in loader])
    assert runs[0] == runs[1] == runs[2]


def test_fingerprint_tells_contents_and_order() -> None:
    def blocks(rows: list[list[int]]) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"input_ids": rows})

    rows = [[1, 2], [3, 4], [5, 6]]
    assert fingerprint(blocks(rows)) == fingerprint(blocks(rows))
    assert fingerprint(blocks(rows)) == fingerprint(blocks(rows[::-1]).select([2, 1, 0]))
    assert len({fingerprint(blocks(other)) for other in (rows, rows[::-1], rows[:2], [[1, 2], [3, 4], [5, 7]])}) == 4


def test_nothing_is_written_and_a_silenced_bar_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": f"document {number}"} for number in range(50)])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", scratch)
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    datasets.disable_progress_bars()
    try:
        fingerprint(pack(load_documents(DataConfig(path=str(path)), seed=0).train, TOKENIZER, seq_len=8))
    finally:
        datasets.enable_progress_bars()
    assert list(scratch.iterdir()) == []
    assert capfd.readouterr() == ("", "")


ROWS = [{"text": "one"}, {"text": "two"}, {"text": "three"}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
LONG = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(5000)).encode()
TABLE = pa.table({"text": ["one", "two", "three"], "n": [1, 2, 3]})


def zst(data: bytes) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(data)
    return buffer.getvalue().to_pybytes()


def arrow(table: pa.Table, kind: Callable[..., Any]) -> bytes:
    buffer = pa.BufferOutputStream()
    with kind(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue().to_pybytes()


def parquet(table: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    pyarrow.parquet.write_table(table, buffer)
    return buffer.getvalue().to_pybytes()


FORMATS = {
    "a.jsonl": LINES,
    "a.ndjson": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.xz": lzma.compress(LINES),
    "a.jsonl.zst": zst(LINES),
    "a.parquet": parquet(TABLE),
    "a.arrow": arrow(TABLE, pa.ipc.new_file),
    "b.arrow": arrow(TABLE, pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_its_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FORMATS[name])
    assert everything(tmp_path / name) == everything(tmp_path) == ["one", "three", "two"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_text_files_may_be_compressed(suffix: str, tmp_path: Path) -> None:
    pack_bytes = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zst}[suffix]
    (tmp_path / f"a.txt{suffix}").write_bytes(pack_bytes("ü\nö".encode()))
    assert "".join(everything(tmp_path / f"a.txt{suffix}")) in ("ü\nö", "öü\n")


def test_a_folder_of_mixed_shards_an_empty_one_and_a_duplicate(tmp_path: Path) -> None:
    for name, content in FORMATS.items():
        (tmp_path / name).write_bytes(content)  # eight copies of the same three documents
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "empty.jsonl.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "empty.parquet").write_bytes(parquet(TABLE.slice(0, 0)))
    (tmp_path / "more.txt").write_text("four")
    assert everything(tmp_path) == ["four", "one", "three", "two"]
    jsonl(tmp_path / "more.jsonl", [{"text": "five"}, {"text": "six"}])
    assert everything(tmp_path / "m*.*") == ["five", "four", "six"]


def test_a_saved_dataset(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"text": ["one", "two"], "n": [1, 2]})
    saved.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "split")
    datasets.DatasetDict({"test": saved}).save_to_disk(tmp_path / "test")
    assert everything(tmp_path / "plain") == everything(tmp_path / "split") == ["one", "two"]
    with pytest.raises(UserError, match="no column 'body' among n, text"):
        everything(tmp_path / "plain", text_column="body")
    with pytest.raises(UserError, match="no split 'train' among test"):
        everything(tmp_path / "test")


def test_sources_are_drawn_by_their_weights_and_none_is_lost(tmp_path: Path) -> None:
    names = []
    for letter, count in (("a", 400), ("b", 100)):
        names.append(str(jsonl(tmp_path / f"{letter}.jsonl", [{"text": f"{letter}{n}"} for n in range(count)])))
    shared = jsonl(tmp_path / "c.jsonl", [{"text": "a1"}, {"text": "c"}, {"text": "d"}])
    config = DataConfig(sources={names[0]: 1, names[1]: 1}, validation_fraction=0.1)
    train, validation = load_documents(config, seed=0)
    kinds = [text[0] for text in texts(train)]
    assert kinds.count("a") / len(kinds) == pytest.approx(0.5, abs=0.06)
    assert not set(texts(train)) & set(texts(validation))
    assert len(set(texts(train))) == 450
    assert len(validation) == 50
    assert texts(load_documents(config, seed=0).train) == texts(train)
    both = load_documents(DataConfig(sources={names[0]: 1, str(shared): 1}), seed=0)
    assert texts(both.validation).count("a1") + ("a1" in texts(both.train)) == 1


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_must_be_above_zero(weight: float) -> None:
    with pytest.raises(UserError, match=r"the weight of 'a' in data\.sources must be a finite number above 0"):
        DataConfig(sources={"a": weight})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl.gz",
            gzip.compress(LONG)[:-200],
            "'{path}' is damaged or not what its name says: Compressed file ended",
        ),
        ("a.jsonl.gz", LINES, "'{path}' is damaged or not what its name says: Not a gzipped file"),
        (
            "a.jsonl.xz",
            lzma.compress(LONG)[:-200],
            "'{path}' is damaged or not what its name says: Compressed file ended",
        ),
        ("a.jsonl.xz", LINES, "'{path}' is damaged or not what its name says: Input format not supported"),
        ("a.jsonl.zst", zst(LONG)[:-200], "'{path}' cannot be read: Truncated compressed stream"),
        ("a.jsonl.zst", LINES, "'{path}' cannot be read: ZSTD"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "\xe9"}\n'), "'{path}' is not UTF-8 at byte 10 (0xe9)"),
        ("a.parquet", parquet(TABLE.drop_columns("text")), "'{path}': no column 'text' among n: set data.text_column"),
        ("a.parquet", parquet(TABLE)[:-20], "'{path}' is damaged or not what its name says: "),
        ("a.parquet", parquet(pa.table({"text": ["a", None]})), "'{path}', row 2: column 'text' must be a string"),
        ("a.parquet", parquet(pa.table({"text": [1, 2]})), "'{path}', row 1: column 'text' must be a string, got int"),
        ("a.arrow", arrow(TABLE.drop_columns("text"), pa.ipc.new_file), "'{path}': no column 'text' among n"),
        ("a.arrow", b"no arrow at all", "'{path}' is damaged or not what its name says: "),
        ("a.txt", b"", "'{path}' holds no text"),
        ("a.txt", b" \n\n", "'{path}' holds no text"),
        ("a.jsonl", b"\n", "'{path}' holds no text"),
        ("a.txt", b"caf\xe9", "'{path}' is not UTF-8 at byte 3 (0xe9)"),
        ("a.txt", b"\xef\xbb\xbfab\xff", "'{path}' is not UTF-8 at byte 5 (0xff)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', "'{path}' is not UTF-8 at byte 24 (0xe9)"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', "'{path}', line 3: not JSON: Expecting value at column"),
        ("a.jsonl", b'["text"]\n', "'{path}', line 1: expected a JSON object, got list"),
        ("a.jsonl", b"1" * 5000, "'{path}', line 1: JSON that cannot be read: Exceeds the limit"),
        ("a.jsonl", b"[" * 100_000, "'{path}', line 1: JSON that cannot be read: "),
        ("a.jsonl", b'{"text": "a"}\n{"b": 1, "a": 2}', "'{path}', line 2: no column 'text' among a, b:"),
        ("a.jsonl", b"{}", "'{path}', line 1: no column 'text' among none at all:"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}', "'{path}', line 2: column 'text' must be a string, got int"),
        ("a.jsonl", b'{"text": null}', "'{path}', line 1: column 'text' must be a string, got NoneType"),
        ("a.jsonl", b'{"text": "ab\\ud800"}', "'{path}', line 1: half a surrogate pair at character 2 of column"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_the_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_documents(DataConfig(path=str(path)), seed=0)
    assert message.format(path=path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_path_without_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent.txt' does not exist: expected a file"):
        load_documents(DataConfig(path=str(tmp_path / "absent.txt")), seed=0)
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"a folder without files that can be read"):
        load_documents(DataConfig(path=str(tmp_path)), seed=0)
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    with pytest.raises(UserError, match=r"loop\.txt' cannot be read: "):
        load_documents(DataConfig(path=str(tmp_path)), seed=0)


def test_less_than_one_block_is_said_with_the_part() -> None:
    documents = datasets.Dataset.from_dict({"text": ["abcd"]})
    assert len(pack(documents, TOKENIZER, seq_len=5)) == 1
    with pytest.raises(UserError, match=r"training part has 5 tokens, less than one block of data\.seq_len 6: give mo"):
        pack(documents, TOKENIZER, seq_len=6)
    with pytest.raises(UserError, match=r"validation part has 5 tokens.*larger data\.validation_fraction"):
        pack(documents, TOKENIZER, seq_len=6, part="validation")
