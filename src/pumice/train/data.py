"""From files to packed blocks of token ids: read documents, part them, encode, join and cut.

Everything is kept as arrow tables in memory: text once, tokens as 32-bit integers. Nothing is written to disk.
"""

import hashlib
import itertools
import json
import math
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
from transformers import PreTrainedTokenizerFast

from pumice.errors import UserError
from pumice.train.recipe import DataConfig
from pumice.train.tokenizer import encode

PYTHON_SOURCES = "python-sources"
_JSON_LINES = {".jsonl", ".json"}
_IN_FOLDERS = {".txt", ".jsonl"}
_TEST_FOLDERS = {"test", "tests", "idle_test"}
_DOCUMENTS_AT_ONCE = 64

_TEXT = datasets.Features({"text": datasets.Value("large_string")})  # 64-bit offsets: one file may exceed 2 GiB
_TOKENS = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int32"))})


class Documents(NamedTuple):
    """The two parts of a corpus, each with one column ``text``; no text is in both."""

    train: datasets.Dataset
    validation: datasets.Dataset


def load_documents(config: DataConfig, seed: int) -> Documents:
    """Read the corpus, put its documents in an order given by the seed, and hold out a validation part.

    A text file is one document, so is each line of a ``.jsonl`` (or ``.json``) file and each file of the
    ``python-sources``. A folder gives its ``.txt`` and ``.jsonl`` files, at any depth, except hidden ones. Documents
    of white space are left out, and of equal documents only one is kept: a copy of a training document in the
    validation part would be no validation. A corpus of one document is cut in two at a line end, and its last part
    is held out.

    Args:
        config: What to read and how much of it to hold out.
        seed: Seed of the order; it decides the validation part too.

    Returns:
        The training and validation documents.

    Raises:
        UserError: A file is missing, not UTF-8 (with the byte offset), or not JSON lines with the text column (with
            the line number), or there is no text at all.
    """
    documents = _to_dataset(_distinct(_read(config)))
    if len(documents) == 0:
        raise UserError(f"data.path '{config.path}' holds no text")
    if len(documents) == 1:
        return Documents(*(_to_dataset([part]) for part in _cut(documents[0]["text"], config.validation_fraction)))
    documents = documents.shuffle(seed=seed)
    count = min(len(documents), config.max_documents or len(documents))
    held_out = min(max(1, round(count * config.validation_fraction)), count - 1)
    return Documents(documents.select(range(held_out, count)), documents.select(range(held_out)))


def pack(
    documents: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, seq_len: int, part: str = "training"
) -> datasets.Dataset:
    """Encode documents, join them with the end-of-text token between, and cut the stream into blocks.

    The tokens after the last whole block are left out.

    Args:
        documents: A column ``text``; its order is the order of the blocks.
        tokenizer: Any fast tokenizer with an end-of-text token.
        seq_len: Tokens of a block.
        part: What the documents are to the run, for the error message.

    Returns:
        A dataset of blocks: ``input_ids`` of shape (seq_len,), int32.

    Raises:
        UserError: There are fewer than ``seq_len`` tokens.
    """
    encoded = documents.map(
        lambda batch: {"input_ids": encode(tokenizer, batch["text"])},
        batched=True,
        batch_size=_DOCUMENTS_AT_ONCE,
        remove_columns=documents.column_names,
        features=_TOKENS,
        new_fingerprint="tokens",  # in memory nothing is looked up by it, and hashing a tokenizer is slow
        desc=f"Encoding the {part} part",
    )
    tokens = np.concatenate([chunk.flatten().to_numpy() for chunk in encoded.data.column("input_ids").chunks])
    count = len(tokens) // seq_len
    if count == 0:
        remedy = "more text" if part == "training" else "a larger data.validation_fraction, more text"
        raise UserError(
            f"the {part} part has {len(tokens)} tokens, less than one block of data.seq_len {seq_len}: "
            f"give {remedy} or a smaller data.seq_len"
        )
    blocks = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=seq_len)})
    return datasets.Dataset.from_dict({"input_ids": tokens[: count * seq_len].reshape(count, seq_len)}, blocks)


def fingerprint(dataset: datasets.Dataset) -> str:
    """Return the SHA-256 of a dataset's blocks in their order, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for batch in dataset.with_format("numpy").iter(batch_size=1024):
        digest.update(np.asarray(batch["input_ids"], dtype="<i4").tobytes())
    return digest.hexdigest()


def _to_dataset(texts: Iterable[str]) -> datasets.Dataset:
    chunks = [datasets.Dataset.from_dict({"text": []}, _TEXT)]
    texts = iter(texts)
    while chunk := list(itertools.islice(texts, 4096)):
        chunks.append(datasets.Dataset.from_dict({"text": chunk}, _TEXT))
    return datasets.concatenate_datasets(chunks)


def _distinct(texts: Iterable[str]) -> Iterator[str]:
    seen: set[bytes] = set()
    for text in texts:
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if text.strip() and key not in seen:
            seen.add(key)
            yield text


def _cut(text: str, validation_fraction: float) -> tuple[str, str]:
    position = math.floor(len(text) * (1 - validation_fraction))
    position = text.rfind("\n", 0, position) + 1 or position
    return text[:position], text[position:]


def _read(config: DataConfig) -> Iterator[str]:
    if config.path == PYTHON_SOURCES:
        yield from _python_sources(config.site_packages)
        return
    path = Path(config.path).expanduser()
    if path.is_dir():
        files = sorted(
            (file for file in path.rglob("*") if file.suffix in _IN_FOLDERS and not _hidden(file.relative_to(path))),
            key=lambda file: file.relative_to(path).as_posix(),
        )
        if not files:
            raise UserError(f"data.path '{config.path}' is a folder without .txt and .jsonl files")
    elif path.exists():
        files = [path]
    else:
        raise UserError(
            f"data.path '{config.path}' does not exist: expected a text file, a .jsonl file, a folder of them "
            f"or '{PYTHON_SOURCES}'"
        )
    for file in files:
        try:
            yield from _json_lines(file, config.text_column) if file.suffix in _JSON_LINES else [_text(file)]
        except OSError as error:
            raise UserError(f"data.path: '{file}' cannot be read: {error.strerror}") from error


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text(file: Path) -> str:
    return _decode(file.read_bytes(), file).removeprefix("\ufeff")


def _decode(data: bytes, file: Path, offset: int = 0) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"'{file}' is not UTF-8 at byte {offset + error.start} (0x{data[error.start]:02x}): convert it first"
        ) from error


def _json_lines(file: Path, column: str) -> Iterator[str]:
    offset = 0
    with file.open("rb") as lines:
        for number, data in enumerate(lines, start=1):
            line = _decode(data, file, offset).removeprefix("\ufeff")
            offset += len(data)
            if line.strip():
                yield _field(line, column, where=f"'{file}', line {number}")


def _field(line: str, column: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets too deep
        raise UserError(f"{where}: JSON that cannot be read: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if column not in row:
        raise UserError(
            f"{where}: no column '{column}' among {', '.join(sorted(row)) or 'none at all'}: set data.text_column"
        )
    text = row[column]
    if not isinstance(text, str):
        raise UserError(f"{where}: column '{column}' must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: half a surrogate pair at character {error.start} of column '{column}'") from error
    return text


def _python_sources(site_packages: bool) -> Iterator[str]:
    """Yield the running interpreter's Python files, in an order that does not depend on where they lie.

    Test suites are left out, as some distributions leave them out; so are files that cannot be decoded, which are
    not the user's to mend.
    """
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("purelib", "platlib")}
    base = Path(paths["stdlib"]).resolve()
    roots = [base, *sorted(installed)] if site_packages else [base]
    for root in roots:
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
            inside = file.relative_to(root).parts
            if _TEST_FOLDERS.intersection(inside) or (root == base and "site-packages" in inside):
                continue
            try:
                with tokenize.open(file) as source:  # honours the encoding that a file declares
                    yield source.read()
            except (OSError, SyntaxError, UnicodeDecodeError):
                continue
