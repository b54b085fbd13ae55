"""transformers.Trainer with pumice's methods: the examples, as a user runs them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from pumice.optim import SMET, SinkGD


def test_trainer_resumes(resumes: Callable[..., dict[str, Any]], model_folder: Path, corpus: Path, capsys: Any) -> None:
    run = resumes(
        "trainer.py",
        *("--model", model_folder, "--texts", corpus, "--gradient_accumulation_steps", 2, "--weight_decay", 0.1),
        *("--torch_compile", "true", "--torch_compile_backend", "aot_eager", "--bf16", "true"),
    )
    assert isinstance(run["trainer"].optimizer.optimizer, SinkGD)
    (line, *_) = [line for line in capsys.readouterr().err.splitlines() if "optimizer" in line]
    assert line.startswith("optimizer pumice.optim.sinkgd.SinkGD (sinkgd: 14 tensors, 20,480 weights, 0.000 GiB, adamw")


def test_sparse_trainer_resumes(resumes: Callable[..., dict[str, Any]], model_folder: Path, corpus: Path) -> None:
    """Blocks have moved before the checkpoint and after it; the saved model is dense."""
    run = resumes("trainer_sparse.py", "--model", model_folder, "--texts", corpus, "--interval", 2, "--density", 0.5)
    assert isinstance(run["trainer"].optimizer.optimizer, SMET)
    (callback,) = run["callbacks"]
    assert callback.monitor.topology.updates == 2
    model = AutoModelForCausalLM.from_pretrained(run["args"].output_dir)
    zeros = (model.model.layers[0].mlp.up_proj.weight == 0).float().mean()
    assert 0.4 < zeros < 0.6


@pytest.mark.parametrize("name", ["trainer.py", "trainer_sparse.py"])
def test_weights_alone(
    name: str, run_example: Callable[..., dict[str, Any]], model_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    words = "--use_cpu true --report_to none --disable_tqdm true --max_steps 2 --save_steps 1 --save_only_model true"
    run_example(
        name,
        "--model",
        model_folder,
        "--texts",
        corpus,
        "--output_dir",
        tmp_path,
        *words.split(),
        *(("--interval", 1) if "sparse" in name else ()),
    )
    saved = {file.name for file in (tmp_path / "checkpoint-2").iterdir()}
    assert "model.safetensors" in saved
    assert "optimizer.pt" not in saved
