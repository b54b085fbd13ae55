import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from pumice.errors import UserError
from pumice.integrations.hosts import require
from pumice.integrations.transformers import OptimizerFactory, ReportOptimizer, describe, optimizer_cls_and_kwargs
from pumice.optim import SinkGD
from pumice.train.model import build_config, build_model
from pumice.train.recipe import ModelConfig


@pytest.fixture
def model() -> PreTrainedModel:
    return build_model(build_config(ModelConfig("llama-tiny")), seed=0)


def arguments(folder: Path, **values: Any) -> TrainingArguments:
    fixed = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no", "max_steps": 2}
    return TrainingArguments(output_dir=str(folder), **fixed, **values)


def test_in_trainer(model: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, learning_rate=0.02, weight_decay=0.1, adam_beta2=0.95, seed=7, warmup_steps=0)
    ids = torch.arange(64).reshape(8, 8).tolist()
    trainer = Trainer(
        model,
        args,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs("sinkgd", args, lr_scale=0.5),
        callbacks=[ReportOptimizer()],
    )
    with caplog.at_level(logging.INFO, logger="pumice"):
        trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, SinkGD)
    group = optimizer.param_groups[0]
    assert (group["rule"], group["initial_lr"], group["weight_decay"]) == ("sinkgd", 0.02, 0.1)
    assert (group["betas"], group["seed"], group["lr_scale"]) == ((0.9, 0.95), 7, 0.5)
    live, table = caplog.messages
    assert live.startswith(
        "optimizer pumice.optim.sinkgd.SinkGD (sinkgd: 14 tensors, 20,480 weights, 0.000 GiB, adamw: 7 tensors"
    )
    assert "2 x model.layers.*.self_attn.q_proj.weight" in table


def test_description_covers_every_weight(model: PreTrainedModel) -> None:
    text = describe(torch.optim.AdamW(model.parameters()))
    assert text == "optimizer torch.optim.adamw.AdamW (adamw: 21 tensors, 53,408 weights, 0.000 GiB)"


def test_called_as_axolotl_does(model: PreTrainedModel, tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=0.03, weight_decay=0.2)
    optimizer = OptimizerFactory()(model, args, method="adamw")
    assert optimizer.param_groups[0]["lr"] == 0.03
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


@pytest.mark.parametrize(
    ("values", "options", "sentence"),
    [
        ({}, {"lr": 0.1}, "method option lr is 0.1 but trainer.learning_rate is 0.02: set only the latter"),
        ({}, {"learning_rate": 0.1}, "method option learning_rate is 0.1 but trainer.learning_rate is 0.02"),
        ({"weight_decay": 0.1}, {"weight_decay": 0.0}, "weight_decay is 0.0 but trainer.weight_decay is 0.1"),
        ({"adam_beta2": 0.99}, {"betas": [0.9, 0.95]}, "but trainer.(adam_beta1, adam_beta2) is (0.9, 0.99)"),
        ({"adam_epsilon": 1e-6}, {"eps": 1e-7}, "eps is 1e-07 but trainer.adam_epsilon is 1e-06"),
    ],
)
def test_disagreement(values: dict[str, Any], options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        optimizer_cls_and_kwargs("sinkgd", arguments(tmp_path, learning_rate=0.02, **values), **options)
    assert sentence in str(error.value)


def test_agreement(tmp_path: Path) -> None:
    args = arguments(tmp_path, learning_rate=0.02, weight_decay=0.1, adam_beta2=0.95)
    same = {"lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95]}
    expected = {"method": "adamw", "lr": 0.02, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8}
    assert optimizer_cls_and_kwargs("adamw", args, **same) == (OptimizerFactory, expected)


def test_options_win_over_what_the_arguments_have_by_default(tmp_path: Path) -> None:
    _, kwargs = optimizer_cls_and_kwargs("adamw", arguments(tmp_path), betas=(0.8, 0.9))
    assert kwargs["betas"] == (0.8, 0.9)


def test_wrong_calls(model: PreTrainedModel) -> None:
    with pytest.raises(UserError, match=r"unknown option lr_scal of sinkgd: did you mean 'lr_scale'\?"):
        OptimizerFactory()(model, lr=0.1, lr_scal=1)
    with pytest.raises(UserError, match="the optimizer needs lr"):
        OptimizerFactory()(model)


@pytest.mark.parametrize("method", ["sinkgd", "adamw"])
def test_release_in_trainer(method: str, tmp_path: Path) -> None:
    """The same weights, schedule included, without a gradient left; after resume they go on moving."""
    ids = torch.arange(96).reshape(12, 8).tolist()
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    weights = []
    for release in (False, True):
        args = arguments(tmp_path, learning_rate=0.02, max_grad_norm=0.0, gradient_checkpointing=True)
        args.max_steps, args.warmup_steps, args.lr_scheduler_type = 6, 2, "cosine"
        model = build_model(build_config(ModelConfig("llama-tiny")), seed=0)
        trainer = Trainer(
            model,
            args,
            train_dataset=data,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(method, args, release=release),
        )
        trainer.train()
        assert all(parameter.grad is None for parameter in model.parameters())
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=0, msg=name)


def test_release_is_refused_before_training(tmp_path: Path) -> None:
    for values, sentence in (
        ({"gradient_accumulation_steps": 4}, "gradient release cannot accumulate gradients, got .* 4: set it to 1"),
        ({"fp16": True}, "does not work with fp16"),
    ):
        with pytest.raises(UserError, match=sentence):
            optimizer_cls_and_kwargs("sinkgd", SimpleNamespace(**{**vars(arguments(tmp_path)), **values}), release=True)


def test_clipping_of_released_gradients_comes_from_the_arguments(tmp_path: Path) -> None:
    _, kwargs = optimizer_cls_and_kwargs("sinkgd", arguments(tmp_path, max_grad_norm=0.5), release=True)
    assert (kwargs["release"], kwargs["clip"]) == (True, 0.5)
    _, kwargs = optimizer_cls_and_kwargs("sinkgd", arguments(tmp_path, max_grad_norm=0.0), release=True)
    assert kwargs["clip"] is None


def test_a_host_that_is_too_old() -> None:
    require("transformers", "5.2")
    with pytest.raises(UserError, match=r"^transformers [\d.]+ is too old for pumice: install transformers>=99$"):
        require("transformers", "99")
