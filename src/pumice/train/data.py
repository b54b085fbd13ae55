"""From files to packed blocks of token ids: read documents, part them, encode, join and cut.

Everything is kept as arrow tables in memory: text once, tokens as 32-bit integers. Nothing is written to disk.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import datasets
import numpy as np
from transformers import PreTrainedTokenizerFast

from pumice.errors import UserError
from pumice.train.recipe import DataConfig
from pumice.train.sources import read
from pumice.train.tokenizer import encode

_DOCUMENTS_AT_ONCE = 64

_TEXT = datasets.Features({"text": datasets.Value("large_string")})  # 64-bit offsets: one file may exceed 2 GiB
_TOKENS = datasets.Features({"input_ids": datasets.LargeList(datasets.Value("int32"))})


class Documents(NamedTuple):
    """The two parts of a corpus, each with one column ``text``; no text is in both."""

    train: datasets.Dataset
    validation: datasets.Dataset


def load_documents(config: DataConfig, seed: int) -> Documents:
    """Read the corpus, put its documents in an order given by the seed, and hold out a validation part.

    A text file is one document, so is each line of a ``.jsonl`` file, each row of a table and each file of the
    ``python-sources``. Documents of white space are left out, and of equal documents, in whatever file or source, only
    one is kept: a copy of a training document in the validation part would be no validation. A source of one document
    is cut in two at a line end, and its last part is held out. Each source gives its share to the validation part.

    Args:
        config: What to read and how much of it to hold out.
        seed: Seed of the order; it decides the validation part too.

    Returns:
        The training and validation documents.

    Raises:
        UserError: A file is missing, not UTF-8 (with the byte offset), or not JSON lines with the text column (with
            the line number), or there is no text at all.
    """
    sources = config.sources or {config.path: 1.0}
    seen: set[bytes] = set()
    parts = [_part(_to_dataset(_distinct(read(path, config), seen)), path, config, seed) for path in sources]
    train, validation = ([part[number] for part in parts] for number in (0, 1))
    if len(parts) == 1:
        return parts[0]
    shares = [weight / sum(sources.values()) for weight in sources.values()]
    mixed = datasets.interleave_datasets(train, shares, seed=seed, stopping_strategy="all_exhausted")
    return Documents(mixed, datasets.concatenate_datasets(validation))


def _part(documents: datasets.Dataset, path: str, config: DataConfig, seed: int) -> Documents:
    if len(documents) == 0:
        raise UserError(f"data.path '{path}' holds no text" + (" that no other source has" if config.sources else ""))
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
    hashed = hashlib.sha256()
    for batch in dataset.with_format("numpy").iter(batch_size=1024):
        hashed.update(np.asarray(batch["input_ids"], dtype="<i4").tobytes())
    return hashed.hexdigest()


def _to_dataset(texts: Iterable[str]) -> datasets.Dataset:
    chunks = [datasets.Dataset.from_dict({"text": []}, _TEXT)]
    texts = iter(texts)
    while chunk := list(itertools.islice(texts, 4096)):
        chunks.append(datasets.Dataset.from_dict({"text": chunk}, _TEXT))
    return datasets.concatenate_datasets(chunks)


def digest(text: str) -> bytes:
    """Return 16 bytes by which equal texts are known."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _distinct(texts: Iterable[str], seen: set[bytes]) -> Iterator[str]:
    for text in texts:
        key = digest(text)
        if text.strip() and key not in seen:
            seen.add(key)
            yield text


def _cut(text: str, validation_fraction: float) -> tuple[str, str]:
    position = math.floor(len(text) * (1 - validation_fraction))
    position = text.rfind("\n", 0, position) + 1 or position
    return text[:position], text[position:]
