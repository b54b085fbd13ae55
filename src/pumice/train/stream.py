"""Training blocks that are read, shuffled and encoded while a model trains, in memory that does not grow with the data.

The order of blocks is a function of the data and the seed. Reading is done by one process: a second data worker would
have nothing to do. A resumed run reads again up to its position, which Trainer finds by counting batches.
"""

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import datasets
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast

from pumice.errors import UserError
from pumice.train.data import digest
from pumice.train.recipe import DataConfig, Recipe
from pumice.train.sources import read
from pumice.train.tokenizer import encode

_DOCUMENTS_AT_ONCE = 64


def check(recipe: Recipe, pretrained: bool) -> None:
    """Raise ``UserError`` if a recipe streams and something else in it does not allow that."""
    if not recipe.data.streaming:
        return
    if recipe.trainer.max_steps < 1:
        raise UserError("a stream has no length: set trainer.max_steps")
    if recipe.tokenizer.path is None and not pretrained:
        raise UserError("no tokenizer is trained on a stream: set tokenizer.path")
    if recipe.trainer.dataloader_num_workers > 1:
        raise UserError(
            "a stream is read by one process: "
            f"trainer.dataloader_num_workers must be 0 or 1, got {recipe.trainer.dataloader_num_workers}"
        )


class Held(NamedTuple):
    """The validation part of a stream: its documents, and their digests, by which copies are kept out of training."""

    documents: datasets.Dataset
    digests: frozenset[bytes]


def hold_out(config: DataConfig, seed: int) -> Held:
    """Take the first distinct documents of a stream for validation.

    Raises:
        UserError: A document cannot be read, or no other is left to train on.
    """
    texts: dict[bytes, str] = {}
    for text in _texts(config, seed):
        if len(texts) == config.validation_documents and digest(text) not in texts:
            return Held(datasets.Dataset.from_dict({"text": list(texts.values())}), frozenset(texts))
        texts.setdefault(digest(text), text)
    raise UserError(
        f"the stream has {len(texts)} documents, and data.validation_documents holds out {config.validation_documents} "
        "of them: lower it"
    )


class TokenStream(IterableDataset[dict[str, Tensor]]):
    """Blocks of token ids without an end: each pass over the data has an order of its own.

    Args:
        config: What to read.
        held: Left out.
        tokenizer: Encodes the documents, which are joined with its end-of-text token between.
        seed: Of the order.
    """

    def __init__(self, config: DataConfig, held: Held, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._config, self._held, self._tokenizer, self._seed = config, held.digests, tokenizer, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield ``input_ids`` of shape (seq_len,), int32."""
        if (worker := get_worker_info()) is not None and worker.id > 0:
            return
        length, rest = self._config.seq_len, torch.empty(0, dtype=torch.int32)
        texts = itertools.chain.from_iterable(map(self._pass, itertools.count()))
        while group := list(itertools.islice(texts, _DOCUMENTS_AT_ONCE)):
            new = [torch.tensor(ids, dtype=torch.int32) for ids in encode(self._tokenizer, group)]
            *blocks, rest = torch.split(torch.cat([rest, *new]), length)
            if len(rest) == length:
                blocks, rest = [*blocks, rest], rest[:0]
            for block in blocks:
                yield {"input_ids": block}

    def _pass(self, number: int) -> Iterator[str]:
        for text in _texts(self._config, self._seed + number, self._config.shuffle_buffer):
            if digest(text) not in self._held:
                yield text


def _texts(config: DataConfig, seed: int, shuffle_buffer: int = 0) -> Iterator[str]:
    """Yield the documents of one pass but those of white space, shuffled if there is a buffer.

    ``datasets`` would mix and shuffle too, but otherwise in a data worker than in the main process.
    """
    draw = random.Random(seed)
    texts = _mixed(config, draw)
    buffer = list(itertools.islice(texts, shuffle_buffer))
    for text in texts:
        if buffer:
            place = draw.randrange(len(buffer))
            text, buffer[place] = buffer[place], text  # noqa: PLW2901
        yield text
    draw.shuffle(buffer)
    yield from buffer


def _mixed(config: DataConfig, draw: random.Random) -> Iterator[str]:
    """Draw from the sources by their weights until each has been read to its end; a shorter one begins again."""
    sources = config.sources or {config.path: 1.0}
    paths, weights = list(sources), list(sources.values())
    readers = [_written(path, config) for path in paths]
    ended: set[int] = set()
    while True:
        (number,) = draw.choices(range(len(paths)), weights)
        if (text := next(readers[number], None)) is None:
            ended.add(number)
            if len(ended) == len(paths):
                return
            readers[number] = _written(paths[number], config)
            if (text := next(readers[number], None)) is None:
                raise UserError(f"data.sources: '{paths[number]}' holds no text")
        yield text


def _written(path: str, config: DataConfig) -> Iterator[str]:
    return (text for text in read(path, config) if text.strip())
