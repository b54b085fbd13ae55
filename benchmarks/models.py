"""Small byte-level language models and the text that they are trained on."""

import json
import lzma
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

VOCABULARY = 256  # a token is a byte; documents end with byte 0


def tiny_llama(layers: int = 4) -> LlamaConfig:
    """Return a model of 0.5 million parameters: four layers of width 96."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def tiny_qwen3() -> Qwen3Config:
    """Return a model of 0.3 million parameters: six layers of width 64, grouped queries, tied embeddings."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )


def llama_60m() -> LlamaConfig:
    """Return a model of 58 million parameters, as in the SinkGD paper: 8 layers of width 512."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )


def llama_350m_stack(layers: int = 4) -> LlamaConfig:
    """Return some layers of the SinkGD paper's 350-million-parameter model, whole embeddings included."""
    return LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2736,
        num_hidden_layers=layers,
        num_attention_heads=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )


def build(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Make a model with random weights that depend on the seed alone."""
    torch.manual_seed(seed)
    config.use_cache = False
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, split in two."""

    name: str
    train: Tensor  # uint8, (bytes,)
    validation: Tensor  # uint8, (bytes,)

    def fingerprint(self) -> str:
        """Hash both parts."""
        digest = sha256(self.train.numpy().tobytes())
        digest.update(self.validation.numpy().tobytes())
        return digest.hexdigest()[:16]


def corpus(folder: Path | None, limit: int = 40_000_000) -> Corpus:
    """Read a corpus.

    Args:
        folder: holds ``*train*.jsonl.xz`` and ``*val*.jsonl.xz`` with a column "text"; None: the Python sources of the
            standard library, each twentieth held out.
        limit: bytes of training text to read at most.
    """
    if folder is None:
        library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        held_out = library[::20]
        return Corpus(
            "python-stdlib",
            _bytes((path.read_text(errors="replace") for path in library if path not in held_out), limit),
            _bytes((path.read_text(errors="replace") for path in held_out), limit),
        )
    parts = []
    for pattern in ("*train*.jsonl.xz", "*val*.jsonl.xz"):
        found = sorted(folder.glob(pattern))
        if len(found) != 1:
            raise SystemExit(f"--data must hold one file {pattern}, found {len(found)} in {folder}")
        parts.append(_bytes(_documents(found[0]), limit))
    return Corpus("prose", *parts)


def _documents(path: Path) -> Iterator[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def _bytes(documents: Iterator[str], limit: int) -> Tensor:
    data = bytearray()
    for document in documents:
        data += document.encode() + b"\0"
        if len(data) >= limit:
            break
    return torch.frombuffer(data[:limit], dtype=torch.uint8)
