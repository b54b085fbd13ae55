"""From a preset's name to a model: presets are configuration files, sizes are overrides of their fields."""

import json
import re
from importlib import resources

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from pumice.errors import UserError, nearest
from pumice.train.recipe import ModelConfig
from pumice.train.tokenizer import check_vocabulary

_PRESETS = resources.files("pumice") / "presets"
_FIXED = {"model_type", "transformers_version", "architectures"}  # say what a configuration is, not how large


def presets() -> list[str]:
    """Return the names of the bundled model presets, sorted."""
    return sorted(file.name.removesuffix(".json") for file in _PRESETS.iterdir() if file.name.endswith(".json"))


def build_config(config: ModelConfig, tokenizer: PreTrainedTokenizerFast | None = None) -> PretrainedConfig:
    """Return the model configuration of a preset with the recipe's overrides.

    Args:
        config: Name of the preset, and fields of its configuration class to set otherwise.
        tokenizer: Its start and end-of-text tokens become those of the configuration, if given.

    Raises:
        UserError: Unknown preset or field (with the nearest right one), a value that the configuration class refuses,
            or a tokenizer with a larger vocabulary than the model's.
    """
    if config.name not in presets():
        raise UserError(f"unknown model '{config.name}': {nearest(config.name, presets())}")
    fields = json.loads((_PRESETS / f"{config.name}.json").read_text(encoding="utf-8"))
    model_type = fields.pop("model_type")
    known = {name for name in AutoConfig.for_model(model_type).to_dict() if not name.startswith("_")} - _FIXED
    for name in config.config:
        if name not in known:
            raise UserError(f"unknown field model.config.{name} of a {model_type} model: {nearest(name, known)}")
    try:
        built: PretrainedConfig = AutoConfig.for_model(model_type, **(fields | config.config))
    except Exception as error:  # which types a configuration class raises differs between releases of transformers
        reason = re.sub(r"^\w+: ", "", str(error).strip().splitlines()[-1].strip())
        raise UserError(f"model.config is not possible: {reason}") from error
    if tokenizer is not None:
        check_vocabulary(tokenizer, built.vocab_size)
        built.bos_token_id, built.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        built.pad_token_id = None  # blocks are never padded, and the embedding of a padding token does not train
    return built


def check_seq_len(config: PretrainedConfig, seq_len: int) -> None:
    """Raise ``UserError`` if blocks of ``seq_len`` tokens are longer than the model's positions."""
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"data.seq_len is {seq_len}, more than the model's {config.max_position_embeddings} positions: "
            "lower it or raise model.config.max_position_embeddings"
        )


def build_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """Build a causal language model with new weights on the CPU.

    Args:
        config: The model's configuration.
        seed: The weights are a function of it and of ``config`` alone; the state of the global random generators is
            neither used nor changed.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed the GPUs too
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model
