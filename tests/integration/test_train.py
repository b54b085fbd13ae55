"""What a run does and leaves behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from pumice.cli import main
from pumice.train.callbacks import read_metrics
from pumice.train.load import load

# Small enough for the many runs below; the recipe's own steps are kept for the run that is looked at closely.
SHORT = ["--trainer.max_steps", "4", "--trainer.save_strategy", "no", "--trainer.dataloader_num_workers", "0"]


@pytest.fixture(scope="module")
def run(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ["--method.name", "sinkgd", "--trainer.save_total_limit", "2", "--trainer.per_device_eval_batch_size", "2"]
    assert main(["train", str(recipe), "--output.dir", str(folder), *words]) == 0
    return folder


def summary(folder: Path) -> dict[str, object]:
    figures: dict[str, object] = json.loads((folder / "summary.json").read_text())
    return figures


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_model_loads_and_is_the_one_that_was_evaluated(run: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    assert model.config.use_cache
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    last, saved = (load_file(run / name / "model.safetensors") for name in ("checkpoint-14", "model"))
    assert all(last[name].equal(saved[name]) for name in last)
    assert summary(run)["end_loss"] == pytest.approx(lines(run)[-1]["eval_loss"])
    assert lines(run)[-1]["eval_loss"] < lines(run)[0]["eval_loss"] - 1


def test_metrics(run: Path) -> None:
    logged = lines(run)
    assert [line["step"] for line in logged if "eval_loss" in line] == [0, 7, 14]
    assert [line["step"] for line in logged if "loss" in line] == [2, 4, 6, 8, 10, 12, 14]
    for line in logged:
        assert line.keys() >= {"step", "tokens", "epoch"}
        if "loss" in line:
            assert line.keys() >= {"lr", "grad_norm", "tokens_per_second"}
    assert {line["step"]: line["tokens"] for line in logged}[6] == 6 * 8 * 32


def test_tensorboard(run: Path) -> None:
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [2, 4, 6, 8, 10, 12, 14]
    assert [event.step for event in events.Scalars("eval/perplexity")] == [0, 7, 14]


def test_summary_and_the_files_beside_it(run: Path) -> None:
    figures = summary(run)
    assert figures["tokens"] == lines(run)[-1]["tokens"]
    assert figures["start_perplexity"] > figures["end_perplexity"]
    assert figures["adamw_state_bytes"] == 8 * 53408 + 4 * 21
    assert figures["optimizer_state_bytes"] < figures["adamw_state_bytes"] / 3
    assert figures["peak_memory_bytes"] > 50 << 20
    assert figures["sample"].startswith("the old")
    assert len(figures["sample"]) > len("the old")
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-12", "checkpoint-14"}


def test_table(run: Path, train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert train(folder, *SHORT) == 0
    out, err = capsys.readouterr()
    for label in ("perplexity at the start", "perplexity at the end", "tokens/s", "peak memory of the process, GiB"):
        assert label in out
    assert "optimizer state, GiB" in out
    assert "the same with AdamW, GiB" in out
    assert "the old" in out
    assert f"model: {folder / 'model'}" in out
    assert "optimizer torch.optim.adamw.AdamW (adamw: 21 tensors, 53,408 weights, " in err
    assert "step 4/4  loss" in err


@pytest.mark.filterwarnings("error")
def test_a_run_warns_of_nothing(train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", *SHORT, "--method.name", "sinkgd") == 0
    assert "arning" not in capsys.readouterr().err


def test_same_batches_whatever_the_method_and_the_workers(train: Callable[..., int], tmp_path: Path) -> None:
    variants = {
        "adamw": ["--method.name", "adamw"],
        "sinkgd": ["--method.name", "sinkgd"],
        "workers": ["--trainer.dataloader_num_workers", "2"],
        "accumulated": ["--trainer.per_device_train_batch_size", "4", "--trainer.gradient_accumulation_steps", "2"],
        "seed": ["--trainer.seed", "5"],
    }
    hashes = {}
    for name, words in variants.items():
        assert train(tmp_path / name, *SHORT, "--trainer.max_steps", "10", *words) == 0
        hashes[name] = summary(tmp_path / name)["batches_sha256"]
    assert hashes["adamw"] == hashes["sinkgd"] == hashes["workers"]
    assert len(set(hashes.values())) == 3
    starts = {name: lines(tmp_path / name)[0]["eval_loss"] for name in variants}
    assert starts["adamw"] == starts["sinkgd"], "the first weights do not depend on the method"
    assert starts["adamw"] != starts["seed"]
    assert summary(tmp_path / "adamw")["end_loss"] == summary(tmp_path / "workers")["end_loss"]


def test_saved_recipe_runs_again(train: Callable[..., int], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(first, *SHORT, "--method.options.betas", "[0.8, 0.9]") == 0
    saved = first / "recipe.yaml"
    assert load(str(saved)).output.dir == str(first)
    assert main(["train", str(saved), "--resume", "auto"]) == 0  # the same run, finished already
    assert main(["train", str(saved), "--output.dir", str(second)]) == 0
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (first, second))
    assert all(one[name].equal(other[name]) for name in one)


def test_without_evaluation_and_sample(train: Callable[..., int], tmp_path: Path) -> None:
    words = ["--trainer.eval_strategy", "no", "--trainer.eval_on_start", "false", "--output.sample_tokens", "0"]
    assert train(tmp_path / "run", *SHORT, *words) == 0
    figures = summary(tmp_path / "run")
    assert figures["start_perplexity"] is None
    assert figures["end_perplexity"] > 1
    assert figures["sample"] is None


def test_prompt_longer_than_the_model_and_none_at_all(train: Callable[..., int], tmp_path: Path) -> None:
    words = [*SHORT, "--model.config.max_position_embeddings", "32", "--output.sample_tokens", "40"]
    assert train(tmp_path / "long", *words, "--output.prompt", "stone " * 60) == 0
    assert train(tmp_path / "none", *words, "--output.prompt", "") == 0
    assert summary(tmp_path / "none")["sample"]


def test_a_gradient_that_is_not_finite_is_told_in_a_sentence(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--method.name", "sinkgd", "--trainer.learning_rate", "1e30", "--trainer.warmup_steps", "0"]
    assert train(tmp_path / "run", *SHORT, *words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("pumice: ")
    assert "finite" in last


def test_released_gradients_give_the_same_run(train: Callable[..., int], tmp_path: Path) -> None:
    """Losses, rates and the logged norm of gradients, also across a resume; without clipping."""
    words = ["--method.name", "sinkgd", "--trainer.max_grad_norm", "0", "--trainer.eval_strategy", "no"]
    words += ["--trainer.max_steps", "6", "--trainer.save_steps", "3"]
    assert train(tmp_path / "ordinary", *words) == 0
    assert train(tmp_path / "released", *words, "--memory.release", "true") == 0
    ordinary, released = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("ordinary", "released"))
    for left, right in zip(ordinary, released, strict=True):
        assert left.get("loss") == right.get("loss")
        assert left.get("lr") == right.get("lr")
        if "grad_norm" in left:
            assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-5)
    assert any(line.get("grad_norm", 0) > 0 for line in released)


def test_release_with_accumulation_is_refused(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--memory.release", "true", "--trainer.gradient_accumulation_steps", "2") == 2
    assert "gradient release cannot accumulate gradients" in capsys.readouterr().err


def test_a_chunked_loss_trains_alike(train: Callable[..., int], tmp_path: Path) -> None:
    words = [*SHORT, "--trainer.eval_steps", "2", "--model.config.attention_dropout", "0"]
    assert train(tmp_path / "whole", *words) == 0
    assert train(tmp_path / "chunked", *words, "--memory.loss_chunk", "50") == 0
    whole, chunked = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "chunked"))
    for left, right in zip(whole, chunked, strict=True):
        for key in {"loss", "eval_loss"} & left.keys():
            assert right[key] == pytest.approx(left[key], abs=1e-4)


def test_a_chunk_of_no_tokens_is_refused(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--memory.loss_chunk", "0") == 2
    assert "memory.loss_chunk must be at least 1 token, got 0" in capsys.readouterr().err
