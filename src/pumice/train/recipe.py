"""The recipe of a run: one tree of frozen dataclasses."""

import math
from dataclasses import dataclass, field
from typing import Any

from pumice.errors import UserError
from pumice.train.arguments import TrainerConfig


def is_hub_name(name: str) -> bool:
    """Tell whether a name has the form ``owner/name``; a file or folder of that name goes first."""
    return name.count("/") == 1 and not name.startswith((".", "~", "/")) and not any(c in name for c in "*?[")


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train, and what to set otherwise.

    Args:
        name: A bundled preset or a config.json, for new weights; or the folder or hub name of a pretrained model.
        config: Fields of the model's configuration class; of a pretrained model mostly dtype (float32 unless set).
    """

    name: str = "llama-quickstart"
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """Which text to train on, and how it is parted and cut.

    Args:
        path: A file (.txt, .jsonl, .parquet, .arrow; .txt and .jsonl also as .gz, .zst, .xz), a folder or a pattern of
            such files, a folder of ``Dataset.save_to_disk``, a hub name, or ``python-sources``.
        sources: Several of them instead, and the weight of each: the share of training documents drawn from it. All
            are drawn from until each is used up, so small ones repeat.
        text_column: The column with the text.
        subset: Configuration of a hub dataset.
        streaming: Read while training, in bounded memory; needs trainer.max_steps and a tokenizer.
        shuffle_buffer: Documents among which a stream is shuffled; 0 keeps its order.
        validation_documents: Documents held out, from the start of a stream; ``streaming`` only.
        seq_len: Tokens of a block.
        validation_fraction: Share of the documents held out.
        site_packages: Read the installed packages too; ``python-sources`` only.
        max_documents: Documents to keep at most, taken after the shuffle.
    """

    path: str = "python-sources"
    text_column: str = "text"
    seq_len: int = 256
    validation_fraction: float = 0.02
    sources: dict[str, float] | None = None
    subset: str | None = None
    streaming: bool = False
    shuffle_buffer: int = 10_000
    validation_documents: int = 1_000
    site_packages: bool = False
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise UserError(f"data.seq_len must be at least 2 (a token and the next one), got {self.seq_len}")
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"data.validation_fraction must be between 0 and 1, got {self.validation_fraction}")
        if self.max_documents is not None and self.max_documents < 2:
            raise UserError(
                f"data.max_documents must be at least 2 (one to train on, one held out), got {self.max_documents}"
            )
        for path, weight in (self.sources or {}).items():
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(f"the weight of '{path}' in data.sources must be a finite number above 0, got {weight}")
        if self.sources == {}:
            raise UserError("data.sources is empty: name a source and its weight, or use data.path")
        if self.shuffle_buffer < 0:
            raise UserError(f"data.shuffle_buffer must not be negative, got {self.shuffle_buffer}")
        if self.validation_documents < 1:
            raise UserError(f"data.validation_documents must be at least 1, got {self.validation_documents}")
        if self.streaming and self.max_documents is not None:
            raise UserError("data.max_documents does not apply to a stream: limit it by trainer.max_steps")


@dataclass(frozen=True)
class TokenizerConfig:
    """Where the tokenizer comes from.

    Args:
        path: A folder, hub name or tokenizer.json; if none, that of a pretrained model, and for new weights a
            byte-level BPE is trained on the training part.
        vocab_size: Size of the vocabulary to train; if none, the model's.
    """

    path: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class MethodConfig:
    """How the weights are trained.

    Args:
        name: Name of a training method.
        options: Options of that method.
    """

    name: str = "sinkgd"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputConfig:
    """What a run leaves behind.

    Args:
        dir: Folder of the run; if none, ``runs/`` and the recipe's name.
        prompt: Start of the text that the trained model continues at the end.
        sample_tokens: Length of that continuation in tokens; 0 for none.
    """

    dir: str | None = None
    prompt: str = "def "
    sample_tokens: int = 64

    def __post_init__(self) -> None:
        if self.sample_tokens < 0:
            raise UserError(f"output.sample_tokens must not be negative, got {self.sample_tokens}")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
