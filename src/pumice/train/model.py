"""From a model's name to a configuration, without a weight, and to the model: new or pretrained."""

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pumice.errors import UserError, nearest
from pumice.train.recipe import ModelConfig, is_hub_name
from pumice.train.tokenizer import check_vocabulary

_PRESETS = resources.files("pumice") / "presets"
_FIXED = {"model_type", "transformers_version", "architectures"}  # say what a configuration is, not how large


def presets() -> list[str]:
    """Return the names of the bundled model presets, sorted."""
    return sorted(file.name.removesuffix(".json") for file in _PRESETS.iterdir() if file.name.endswith(".json"))


def is_pretrained(config: ModelConfig) -> bool:
    """Tell whether a model comes with weights: it is named by a folder or by a hub name, ``owner/model``."""
    if config.name in presets() or config.name.endswith(".json"):
        return False
    return "/" in config.name or Path(config.name).expanduser().is_dir()


def build_config(config: ModelConfig, tokenizer: PreTrainedTokenizerFast | None = None) -> PretrainedConfig:
    """Return the configuration of a model with the recipe's overrides; no weight is read or allocated.

    Args:
        config: A preset, a configuration file, or a folder or hub name of a pretrained model; and fields of its
            configuration class to set otherwise. A pretrained model's ``dtype`` is float32 unless set there.
        tokenizer: Its start and end-of-text tokens become those of the configuration, if given.

    Raises:
        UserError: Unknown model or field (with the nearest right one), a file that is not a configuration, a model
            that is no causal language model, a value that the configuration class refuses, or a tokenizer with a
            larger vocabulary than the model's.
    """
    fields = _fields(config)
    model_type = str(fields.pop("model_type"))
    known = {name for name in AutoConfig.for_model(model_type).to_dict() if not name.startswith("_")} - _FIXED
    for name in config.config:
        if name not in known:
            raise UserError(f"unknown field model.config.{name} of a {model_type} model: {nearest(name, known)}")
    if "num_hidden_layers" in config.config:
        fields.pop("layer_types", None)  # a saved list, derived from the number of layers
    try:
        built: PretrainedConfig = AutoConfig.for_model(model_type, **(fields | config.config))
    except Exception as error:  # which types a configuration class raises differs between releases of transformers
        reason = re.sub(r"^\w+: ", "", str(error).strip().splitlines()[-1].strip())
        where = "model.config" if config.config else f"the configuration of model '{config.name}'"
        raise UserError(f"{where} is not possible: {reason}") from error
    if tokenizer is not None:
        check_vocabulary(tokenizer, built.vocab_size)
        built.bos_token_id, built.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        built.pad_token_id = None  # blocks are never padded, and the embedding of a padding token does not train
    return built


def _fields(config: ModelConfig) -> dict[str, Any]:
    """Return a configuration's fields as its file has them, with a ``model_type`` of a causal language model."""
    name, path = config.name, Path(config.name).expanduser()
    if name in presets():
        fields = json.loads((_PRESETS / f"{name}.json").read_text(encoding="utf-8"))
    elif is_pretrained(config):
        fields = _pretrained_fields(name, path)
    elif path.is_file():
        fields = _read(path)
    elif path.suffix == ".json":
        raise UserError(f"model.name '{name}' does not exist: expected the config.json of a model")
    else:
        raise UserError(f"unknown model '{name}': {nearest(name, presets())}")
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise UserError(
            f"the configuration of model '{name}' has no model_type: expected a config.json of transformers"
        )
    if fields["model_type"] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"model '{name}' is of type {fields['model_type']}, which is no causal language model")
    return fields


def _pretrained_fields(name: str, path: Path) -> Any:
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"model.name '{name}' is a folder without config.json: expected a model as transformers saves it"
            )
        fields = _read(path / "config.json")
    elif not is_hub_name(name):
        raise UserError(
            f"model.name '{name}' does not exist: expected a folder with a model, or a hub name owner/model"
        )
    else:
        try:
            fields, _ = PretrainedConfig.get_config_dict(name)
        except OSError as error:
            raise UserError(
                f"model '{name}' is no folder, and as a hub name it cannot be had: {_first(error)}"
            ) from error
    if not isinstance(fields, dict):
        return fields
    return {key: value for key, value in fields.items() if key != "torch_dtype"} | {"dtype": "float32"}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"'{path}' is not JSON: {error}") from error


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def check_seq_len(config: PretrainedConfig, seq_len: int) -> None:
    """Raise ``UserError`` if blocks of ``seq_len`` tokens are longer than the model's positions."""
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"data.seq_len is {seq_len}, more than the model's {config.max_position_embeddings} positions: "
            "lower it or raise model.config.max_position_embeddings"
        )


def build_model(config: PretrainedConfig, seed: int, pretrained: str | None = None) -> PreTrainedModel:
    """Build a causal language model on the CPU.

    Args:
        config: The model's configuration.
        seed: New weights are a function of it and of ``config`` alone; the state of the global random generators is
            neither used nor changed.
        pretrained: Folder or hub name from which to load the weights; if none, they are new.

    Raises:
        UserError: The weights are missing, cannot be read, or are not those of this configuration.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed the GPUs too
        if pretrained is None:
            made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
            return made
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                Path(pretrained).expanduser() if Path(pretrained).expanduser().is_dir() else pretrained,
                config=config,
                dtype=config.dtype,
                output_loading_info=True,
            )
        except Exception as error:  # of files, of safetensors, of shapes: each library has its own
            raise UserError(f"the weights of model '{pretrained}' cannot be loaded: {_first(error)}") from error
    model: PreTrainedModel = loaded[0]
    if absent := sorted(loaded[1]["missing_keys"]):
        raise UserError(f"model '{pretrained}' has no weights for {absent[0]}" + _more(len(absent) - 1))
    return model


def _more(count: int) -> str:
    return f" and {count} more" if count else ""
