"""TRL's trainers with pumice's methods: SFT and DPO as the examples do it, KTO and GRPO, and LoRA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from pumice.errors import UserError
from pumice.integrations.transformers import optimizer_cls_and_kwargs, prepare_model
from pumice.optim import SinkGD

PLAIN = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 2, "bf16": False, "save_strategy": "no"}
Rows = Callable[..., Path]


def conversation(text: str, number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text}]}


@pytest.mark.parametrize("how", ["--assistant_only_loss", "--packing"])
def test_sft_resumes(how: str, resumes: Callable[..., dict[str, Any]], model_folder: Path, rows_of: Rows) -> None:
    words = ["--model", model_folder, "--conversations", rows_of("sft", conversation), "--max_length", 64]
    run = resumes("trl_sft.py", *words, "--bf16", "false", how, "true")
    assert isinstance(run["trainer"].optimizer.optimizer, SinkGD)


def test_dpo_resumes(resumes: Callable[..., dict[str, Any]], model_folder: Path, rows_of: Rows) -> None:
    rows = rows_of("dpo", lambda text, n: {"prompt": text[:20], "chosen": text[20:], "rejected": text[40:]})
    run = resumes("trl_dpo.py", "--model", model_folder, "--preferences", rows, "--bf16", "false")
    assert isinstance(run["trainer"].optimizer.optimizer, SinkGD)


def moved(trainer: Any) -> set[str]:
    """Train, and name the weights that changed."""
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, SinkGD)
    return {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}


def assigned(trainer: Any) -> Any:
    trainer.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs("sinkgd", trainer.args)
    return trainer


def test_kto(model_folder: Path, rows_of: Rows, tmp_path: Path) -> None:
    rows = rows_of("kto", lambda text, n: {"prompt": text[:20], "completion": text[20:], "label": n % 2 == 0})
    trainer = KTOTrainer(
        AutoModelForCausalLM.from_pretrained(model_folder),
        args=KTOConfig(str(tmp_path), per_device_train_batch_size=4, learning_rate=0.01, **PLAIN),
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    assert len(moved(assigned(trainer))) == 21


def test_grpo(model_folder: Path, rows_of: Rows, tmp_path: Path) -> None:
    args = GRPOConfig(
        str(tmp_path), num_generations=4, per_device_train_batch_size=4, max_completion_length=4, learning_rate=0.01,
        **PLAIN,
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(model_folder),
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions],
        args=args,
        train_dataset=load_dataset(
            "json", data_files=str(rows_of("grpo", lambda text, n: {"prompt": text[:20]})), split="train"
        ),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
    )
    assert len(moved(assigned(trainer))) == 21


def sft(model: Any, folder: Path, model_folder: Path, rows: Path, **more: Any) -> SFTTrainer:
    args = SFTConfig(str(folder), learning_rate=0.01, max_length=64, **PLAIN)
    return SFTTrainer(
        model,
        args,
        train_dataset=load_dataset("json", data_files=str(rows), split="train"),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs("sinkgd", args),
        **more,
    )


def test_lora(model_folder: Path, rows_of: Rows, tmp_path: Path) -> None:
    """Adapters' A and B are balanced, a head that is trained with them is not, and the base stays."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    trainer = sft(model, tmp_path, model_folder, rows_of("lora", conversation), peft_config=lora)
    changed = moved(trainer)
    assert all("lora_" in name or "modules_to_save" in name for name in changed)
    groups = {group["rule"]: group["param_names"] for group in trainer.optimizer.optimizer.param_groups}
    assert len(groups["sinkgd"]) == 2 * 2 * 2  # A and B of two layers' two matrices
    assert all("lora_A" in name or "lora_B" in name for name in groups["sinkgd"])
    assert groups["adamw"] == ["base_model.model.lm_head.modules_to_save.default.weight"]


def test_adapters_and_sparse_layers(model_folder: Path, rows_of: Rows, tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    args = SFTConfig(str(tmp_path), **PLAIN)
    trainer = sft(model, tmp_path, model_folder, rows_of("both", conversation), peft_config=lora)
    with pytest.raises(UserError, match=r"q_proj' is an adapter \(Linear\) around a layer; merge or remove"):
        prepare_model("smet", trainer.model, args, block_shape=(1, 16))
    with pytest.raises(UserError, match="all of them are frozen: unfreeze them, or train an adapter without"):
        prepare_model("smet", trainer.model, args, block_shape=(1, 16), targets=["up_proj"], interval=1)
