"""From text to token ids: a tokenizer that is trained on the data or loaded, and batched encoding with it."""

import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pumice.errors import UserError
from pumice.train.recipe import TokenizerConfig, is_hub_name

END_OF_TEXT = "<|endoftext|>"
_USUAL_END_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_SMALLEST_VOCABULARY = 257  # every byte and the end-of-text token

# A text is encoded in pieces, a few at a time: an encoding needs some hundred bytes a token while it is made.
_PIECE_CHARACTERS = 1 << 17
_PIECES_AT_ONCE = 64


def build_tokenizer(
    config: TokenizerConfig, train: datasets.Dataset, vocab_size: int, cache: Path, pretrained: str | None = None
) -> PreTrainedTokenizerFast:
    """Return the run's tokenizer: the one kept in ``cache``, else a loaded or newly trained one, which is then kept.

    Args:
        config: A path to load from, or the size of the vocabulary to train (default: ``vocab_size``).
        train: The training documents, one column ``text``; the validation part must not be in it.
        vocab_size: Rows of the model's embedding: the vocabulary may be smaller, not larger.
        cache: Folder that keeps the tokenizer. It appears whole or not at all, so that a killed run leaves no half.
        pretrained: Folder or hub name of the pretrained model, whose tokenizer is taken if ``config`` has no path.

    Raises:
        UserError: The vocabulary is larger than the model's or too small to train, or would be trained anew for a
            pretrained model, or the tokenizer cannot be loaded or has no end-of-text token.
    """
    if pretrained is not None and config.vocab_size is not None:
        raise UserError(
            "tokenizer.vocab_size would train a new tokenizer, but the weights of a pretrained model know its own"
        )
    if config.vocab_size is not None and config.vocab_size > vocab_size:
        raise UserError(
            f"tokenizer.vocab_size is {config.vocab_size}, more than the model's vocabulary of {vocab_size}: "
            "lower it or raise model.config.vocab_size"
        )
    if cache.is_dir():
        tokenizer = load_tokenizer(str(cache))
    elif config.path is not None:
        tokenizer = load_tokenizer(config.path)
    elif pretrained is not None:
        tokenizer = load_tokenizer(pretrained)
    else:
        texts = (text for batch in train.iter(batch_size=_PIECES_AT_ONCE) for text in batch["text"])
        tokenizer = train_tokenizer(texts, config.vocab_size or vocab_size)
    check_vocabulary(tokenizer, vocab_size)
    if not cache.is_dir():
        _save(tokenizer, cache)
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which encodes any text and decodes it to the same text.

    Args:
        texts: The training documents.
        vocab_size: Largest size of the vocabulary, at least 257 (all bytes and the end-of-text token); a small corpus
            may have too few pairs to reach it.

    Returns:
        A tokenizer whose end-of-text token ``<|endoftext|>`` is its start token too. It has no padding token: blocks
        are never padded, and a model does not train the embedding of the token that its configuration calls padding.

    Raises:
        UserError: ``vocab_size`` is below 257.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise UserError(
            f"a byte-level vocabulary needs at least {_SMALLEST_VOCABULARY} entries, got {vocab_size}: "
            "raise tokenizer.vocab_size and model.config.vocab_size"
        )
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(itertools.chain.from_iterable(map(_pieces, texts)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer: a folder in the Hugging Face layout, a hub name ``owner/model``, or a bare ``tokenizer.json``.

    A bare file does not say which token ends a text: the usual names are looked for in its vocabulary.

    Raises:
        UserError: Nothing is there, it cannot be read, or it has no end-of-text token.
    """
    path = Path(source).expanduser()
    on_hub = not path.exists() and is_hub_name(source)
    if not path.exists() and not on_hub:
        raise UserError(f"tokenizer.path '{path}' does not exist: expected a folder, a tokenizer.json or a hub name")
    try:
        if on_hub:
            tokenizer = AutoTokenizer.from_pretrained(source)
        elif path.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        else:
            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the parser of the tokenizers library raises bare Exception
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise UserError(f"no tokenizer can be loaded from '{path}': {reason}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"the tokenizer in '{path}' has no tokenizer.json: save it as a fast tokenizer first")
    if tokenizer.eos_token_id is None and path.is_file():
        tokenizer.eos_token = next((t for t in _USUAL_END_OF_TEXT if t in tokenizer.get_vocab()), None)
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer in '{path}' has no end-of-text token: name one as eos_token in its tokenizer_config.json"
        )
    return tokenizer


def check_vocabulary(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> None:
    """Raise ``UserError`` if the tokenizer has an id for which a model of ``vocab_size`` has no embedding."""
    needed = max(tokenizer.get_vocab().values()) + 1
    if needed > vocab_size:
        raise UserError(
            f"the tokenizer's vocabulary of {needed} exceeds the model's of {vocab_size}: "
            f"use a smaller tokenizer or set model.config.vocab_size to {needed} or more"
        )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> list[list[int]]:
    """Return the token ids of each text, with the end-of-text token after each and no other token added.

    What looks like a special token inside a text is encoded as ordinary characters, so that no text can end itself.
    Texts beyond 131,072 characters are encoded in pieces that end at line ends; no token spans two pieces.
    """
    ids: list[list[int]] = []
    pieces = ((number, piece) for number, text in enumerate(texts) for piece in _pieces(text))
    while group := list(itertools.islice(pieces, _PIECES_AT_ONCE)):
        encoded = tokenizer(
            [piece for _, piece in group],
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        for (number, _), piece_ids in zip(group, encoded, strict=True):
            if number == len(ids):
                ids.append([])
            ids[number].extend(piece_ids)
    for text_ids in ids:
        text_ids.append(tokenizer.eos_token_id)
    return ids


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE_CHARACTERS:
        stop = text.rfind("\n", start, start + _PIECE_CHARACTERS) + 1 or start + _PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]


def _save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
