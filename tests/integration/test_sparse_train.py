"""Block-sparse training by the command and in a plain Trainer: what moves, what is kept, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from pumice.cli import main
from pumice.errors import UserError
from pumice.integrations.topology import TopologyCallback
from pumice.integrations.transformers import optimizer_cls_and_kwargs, prepare_model
from pumice.optim import SMET
from pumice.sparse import BlockSparseLinear, Topology, sparsify
from pumice.train.model import build_config, build_model
from pumice.train.recipe import ModelConfig

MOVING = {"density": 0.4, "block_shape": [1, 8], "interval": 3, "stop": 1.0}


def options(**changes: Any) -> list[str]:
    return ["--method.options", json.dumps({**MOVING, **changes})]


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(folder: Path) -> list[dict[str, float]]:
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines(folder)]


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 14 steps with four topology updates, at steps 3, 6, 9 and 12, and a checkpoint every 4."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    words = ["--method.name", "smet", *options(), "--trainer.gradient_accumulation_steps", "2"]
    words += ["--trainer.per_device_train_batch_size", "4"]
    assert main(["train", str(recipe), "--output.dir", str(folder), *words]) == 0
    return folder


def test_the_saved_model_is_dense_and_what_is_inactive_is_zero(whole: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(whole / "model")
    shares = [
        float((module.weight != 0).float().mean())
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]
    assert len(shares) == 14
    assert all(0.25 < share < 0.45 for share in shares)  # a newborn block that no step followed is zero, too
    checkpoint = load_file(whole / "checkpoint-14" / "model.safetensors")
    assert {"model.layers.0.self_attn.q_proj.values", "model.layers.0.self_attn.q_proj.ids"} <= checkpoint.keys()
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["stored_parameters"] < summary["parameters"] == model.num_parameters()
    for name in ("topology.png", "density.png", "loss.png"):
        assert (whole / name).read_bytes().startswith(b"\x89PNG"), name


def test_updates_are_counted_in_optimizer_steps_and_told_in_the_metrics(whole: Path) -> None:
    told = [line for line in lines(whole) if "topology/update" in line]
    assert [(line["step"], line["topology/update"]) for line in told] == [(6, 1), (9, 2), (12, 3), (14, 4)]
    assert told[0]["topology/grown"] == told[0]["topology/dropped"] > 0
    assert 0 < told[0]["topology/newborn_ratio_1"] < 1
    assert told[1]["topology/survival_1"] == 1.0  # the default grace
    assert 0.4 < told[0]["topology/ever_active"] < told[-1]["topology/ever_active"] < 1
    assert all("topology/spike_height" in line for line in told[1:-1])
    assert "topology/density/model.layers.1.mlp.down_proj" in told[0]


def test_resumed_across_an_update_bit_for_bit(whole: Path, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", str(whole / "recipe.yaml"), "--output.dir", str(folder)]
    assert main([*words, "--trainer.max_steps", "14"]) == 0
    for name in ("model", "summary.json", "checkpoint-14", "checkpoint-12"):
        path = folder / name
        _ = [child.unlink() for child in path.glob("*")] if path.is_dir() else path.unlink()
        if path.is_dir():
            path.rmdir()
    assert main([*words, "--resume", "auto"]) == 0
    assert figures(folder) == figures(whole)
    left, right = (load_file(run / "model" / "model.safetensors") for run in (folder, whole))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("method", ["set", "rigl", "static-sparse", "smet", "sinkgd-sparse"])
def test_every_method_trains(method: str, train: Callable[..., int], tmp_path: Path) -> None:
    own = {"density": 0.4, "block_shape": [2, 8]} if method == "static-sparse" else {**MOVING, "distribution": "erk"}
    if method == "smet":
        own |= {"grow": "gradient", "state_bits": 8, "warmup_steps": 4, "final_share": 0.5}
    folder = tmp_path / "run"
    words = ["--trainer.max_steps", "8", "--trainer.save_strategy", "no", "--trainer.dataloader_num_workers", "0"]
    assert train(folder, "--method.name", method, "--method.options", json.dumps(own), *words) == 0
    losses = [line["eval_loss"] for line in lines(folder) if "eval_loss" in line]
    assert losses[-1] < losses[0]
    told = [line for line in lines(folder) if "topology/update" in line]
    assert len(told) == (0 if method == "static-sparse" else 2)
    if method == "smet":
        assert told[-1]["topology/density"] < told[0]["topology/density"] < 0.4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"density": 1.5}, "density must be in (0, 1], got 1.5"),
        ({"density": 0}, "density must be in (0, 1], got 0"),
        ({"block_shape": [64, 64]}, "block (64, 64) is larger than the matrix (32, 32); choose a smaller block_shape"),
        ({"block_shape": [8]}, "method.options.block_shape must be tuple[int, int], got [8]"),
        ({"interval": 0}, "interval must be a whole number of optimizer steps, at least 1, got 0"),
        ({"start": 0.9, "stop": 0.5}, "stop must come after start"),
        ({"interval": 100}, "no topology update would happen: interval=100 has no multiple from step 0 to 14"),
        ({"targets": ["expert"]}, "'expert' matches no layer to sparsify"),
        (
            {"distribution": "gaussian"},
            "method.options.distribution must be one of uniform, erk or dict[str, float], got gaussian",
        ),
        ({"keep": "smallest"}, "method.options.keep must be one of magnitude, random or none, got smallest"),
        ({"grow": "gradients"}, "method.options.grow must be one of random, gradient, got gradients"),
        ({"drop_fraction": 2}, "drop_fraction must be in [0, 1], got 2"),
        ({"warmup_steps": -1}, "warmup_steps must be a whole number of at least 0, got -1"),
        ({"densty": 0.5}, "unknown option method.options.densty of smet: did you mean 'density'?"),
    ],
)
def test_wrong_options(
    changes: dict[str, Any],
    sentence: str,
    train: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(tmp_path / "run", "--method.name", "smet", *options(**changes)) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --- a plain Trainer ---------------------------------------------------------------------------------------------


def trainer_of(folder: Path, method: str = "smet", **values: Any) -> tuple[Trainer, TopologyCallback]:
    args = TrainingArguments(
        str(folder), use_cpu=True, disable_tqdm=True, report_to=[], save_steps=4, learning_rate=1e-2, **values
    )
    model = build_model(build_config(ModelConfig("llama-tiny")), seed=0)
    model, callbacks = prepare_model(method, model, args, **MOVING)
    ids = torch.arange(256).reshape(32, 8).tolist()
    trainer = Trainer(
        model,
        args,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": ids}),
        optimizer_cls_and_kwargs=optimizer_cls_and_kwargs(method, args, **MOVING),
        callbacks=callbacks,
    )
    return trainer, callbacks[0]


def test_in_a_plain_trainer_and_resumed(tmp_path: Path) -> None:
    trainer, callback = trainer_of(tmp_path / "whole", max_steps=8)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, SMET)
    assert callback.monitor is not None
    assert (callback.monitor.topology.steps, callback.monitor.topology.updates) == (8, 2)
    resumed, again = trainer_of(tmp_path / "whole", max_steps=8)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert again.monitor is not None
    assert again.monitor.topology.state_dict() == callback.monitor.topology.state_dict()
    left, right = trainer.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_without_topology_is_refused(tmp_path: Path) -> None:
    trainer, callback = trainer_of(tmp_path, max_steps=8)
    trainer.remove_callback(callback)
    trainer.train()
    resumed, _ = trainer_of(tmp_path, max_steps=8)
    with pytest.raises(UserError, match="cannot resume at step 4: the checkpoint holds no topology"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_epochs_give_the_number_of_steps(tmp_path: Path) -> None:
    trainer, callback = trainer_of(tmp_path, num_train_epochs=2, per_device_train_batch_size=8)
    trainer.train()
    assert callback.monitor is not None
    assert callback.monitor.topology.schedule.total_steps == 8


def test_a_step_that_a_scaler_skipped_does_not_tick() -> None:
    torch.manual_seed(0)
    model = sparsify(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)), 0.5, (1, 4))
    callback = TopologyCallback(lambda model, steps: Topology(model, 2, 0.5, total_steps=steps))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class State:
        max_steps, global_step, stateful_callbacks, is_world_process_zero = 10, 0, {}, True

    callback.on_train_begin(None, State, None, model=model)
    for skipped in (False, True, True, False):
        optimizer.step_was_skipped = skipped
        callback.on_optimizer_step(None, State, None, optimizer=optimizer)
    assert callback.monitor is not None
    assert (callback.monitor.topology.steps, callback.monitor.topology.updates) == (2, 1)


def test_a_dense_method_needs_no_preparation(tmp_path: Path) -> None:
    model = build_model(build_config(ModelConfig("llama-tiny")), seed=0)
    args = TrainingArguments(str(tmp_path), use_cpu=True)
    assert prepare_model("sinkgd", model, args, lr_scale=0.5) == (model, [])
    static, callbacks = prepare_model("static-sparse", model, args, density=0.5, block_shape=(1, 8))
    assert callbacks == []
    assert any(isinstance(module, BlockSparseLinear) for module in static.modules())


def test_what_no_run_can_have_is_refused_also_where_its_length_is_not_known(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, num_train_epochs=2)
    model = build_model(build_config(ModelConfig("llama-tiny")), seed=0)
    with pytest.raises(UserError, match="interval must be a whole number of optimizer steps, at least 1, got 0"):
        prepare_model("rigl", model, args, **{**MOVING, "interval": 0})
