"""The plugin in the released Axolotl, without a GPU: `make test-axolotl` makes an environment and runs this.

What it executes of Axolotl: ``cli.config.load_cfg`` (plugins registered, our arguments merged into its pydantic
classes, validation, normalisation), ``common.datasets.load_datasets``, and ``cli.train.do_train``, which is
``train.train`` with ``loaders.ModelLoader.load`` (``post_model_build``), ``core.builders.HFCausalTrainerBuilder.build``
(``add_callbacks_post_trainer``), ``post_trainer_create``, ``AxolotlTrainer.create_optimizer`` and ``train``,
checkpoints, resuming, ``post_train`` and ``save_trained_model``. Not executed: CUDA, packing, FSDP2,
adapters, RL.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.cli.train import do_train
from axolotl.utils.dict import DictDefault
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pumice.errors import UserError
from pumice.integrations.axolotl import chosen
from pumice.train.model import build_config, build_model
from pumice.train.recipe import ModelConfig
from pumice.train.tokenizer import train_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
END = "<|endoftext|>"
Configure = Callable[..., Path]


@pytest.fixture
def configure(corpus: Path, tmp_path: Path) -> Configure:
    """An example's YAML for a tiny model on this machine, with changes; None removes a key."""
    tokenizer = train_tokenizer(corpus.read_text(encoding="utf-8").splitlines(), 300)
    tokenizer.save_pretrained(tmp_path / "tiny")
    model = build_model(build_config(ModelConfig("llama-tiny"), tokenizer), seed=0)
    model.save_pretrained(tmp_path / "tiny")

    def write(example: str, **changes: Any) -> Path:
        tree = yaml.safe_load((EXAMPLES / example).read_text(encoding="utf-8"))
        tree["datasets"][0]["path"] = str(corpus)
        tree |= {"base_model": str(tmp_path / "tiny"), "output_dir": str(tmp_path / "whole"), "sequence_len": 64}
        tree |= {"sample_packing": False, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 6}
        tree |= {"save_steps": 3, "logging_steps": 3, "bf16": False, "gradient_checkpointing": False, "seed": 1}
        tree |= {"dataset_prepared_path": str(tmp_path / "prepared"), "num_dataset_shards_to_save": 1}
        tree |= {"dataset_num_proc": 1, "attn_implementation": "sdpa", "special_tokens": {"pad_token": END}, **changes}
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
        return path

    return write


def train(path: Path) -> Any:
    """Train as ``axolotl train`` does; return the checked configuration."""
    config = load_cfg(str(path))
    do_train(config, TrainerCliArgs())
    return config


@pytest.mark.parametrize(
    ("example", "changes", "live"),
    [
        ("axolotl_sinkgd.yaml", {"sinkhorn_iters": 2}, "pumice.optim.sinkgd.SinkGD (sinkgd: 14 tensors"),
        ("axolotl_smet.yaml", {"pumice": {"method": "smet", "density": 0.5, "block_shape": [1, 16], "interval": 2}},
         "pumice.optim.smet.SMET ("),
    ],
)  # fmt: skip
def test_trains_and_resumes(
    example: str, changes: dict[str, Any], live: str, configure: Configure, tmp_path: Path, capfd: Any
) -> None:
    train(configure(example, learning_rate=0.01, **changes))
    assert f"optimizer {live}" in capfd.readouterr().err
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    again = {"output_dir": str(tmp_path / "again"), "resume_from_checkpoint": checkpoint}
    train(configure(example, learning_rate=0.01, **changes, **again))
    one, other = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    weight = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").model.layers[0].mlp.up_proj.weight
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny").model.layers[0].mlp.up_proj.weight
    assert not torch.equal(weight, start)
    assert 0.4 < (weight == 0).float().mean() < 0.6 if "smet" in example else (weight != 0).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pumice": {"densty": 0.5}}, "unknown option densty of sinkgd"),
        ({"pumice": {"method": "smett"}}, "unknown method 'smett': did you mean 'smet'?"),
        ({"optim_args": {"sinkhorn_iterations": 3}}, "unknown option sinkhorn_iterations of sinkgd: did you mean"),
        ({"pumice": {"sinkhorn_iters": 3}}, "sinkhorn_iters is 1, but pumice: sinkhorn_iters is 3: set one of them"),
        ({"optimizer": "adamw_torch"}, "the pumice plugin has nothing to do with optimizer: adamw_torch"),
        ({"pumice": {"method": "smet"}}, "pumice: method is smet, but optimizer: sinkgd belongs to sinkgd"),
        ({"embedding_lr": 0.1}, "pumice does not follow embedding_lr: remove it"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], sentence: str, configure: Configure) -> None:
    with pytest.raises((ValidationError, UserError)) as error:
        load_cfg(str(configure("axolotl_sinkgd.yaml", **changes)))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}, "remove the adapter"),
        ({"load_in_8bit": True}, "load_in_8bit and load_in_4bit are not supported without"),  # Axolotl's own
    ],
)
def test_sparse_training_of_weights_that_do_not_train(
    changes: dict[str, Any], sentence: str, configure: Configure
) -> None:
    with pytest.raises((ValidationError, UserError)) as error:
        load_cfg(str(configure("axolotl_smet.yaml", **changes)))
    assert sentence in str(error.value)


def test_options_by_axolotls_names() -> None:
    asked = DictDefault({"optimizer": "sinkgd", "optim_args": {"sinkgd_lr_scale": 0.1, "sinkgd_base_width": 64}})
    assert chosen(asked) == ("sinkgd", {"lr_scale": 0.1, "base_width": 64})
