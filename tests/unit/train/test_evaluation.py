"""The validation loss is an average over tokens, whatever the batches."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from pumice.train.evaluation import sequence_losses, token_average
from pumice.train.meter import Meter
from pumice.train.model import build_config, build_model
from pumice.train.recipe import ModelConfig
from pumice.train.trainer import RunTrainer

LENGTHS = (12, 3, 9, 2, 5)  # targets of the sequences: with batches of two, unequal batches and a last one of one


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = build_model(build_config(ModelConfig("llama-tiny")), seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # new weights give every token nearly the same loss
    return model


@pytest.fixture(scope="module")
def sequences() -> Dataset:
    ids = torch.randint(0, 512, (len(LENGTHS), 13), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for row, length in enumerate(LENGTHS):
        labels[row, 1 + length :] = -100
    return Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist()}).with_format("torch")


def evaluate(
    trainer_class: type[Trainer], model: PreTrainedModel, sequences: Dataset, folder: Path
) -> dict[str, float]:
    args = TrainingArguments(
        output_dir=str(folder), per_device_eval_batch_size=2, use_cpu=True, disable_tqdm=True, report_to=[]
    )
    hooks = {"compute_metrics": token_average, "preprocess_logits_for_metrics": sequence_losses, "callbacks": [Meter()]}
    trainer = trainer_class(model, args, eval_dataset=sequences, **(hooks if trainer_class is RunTrainer else {}))
    return trainer.evaluate()


def per_token(model: PreTrainedModel, sequences: Dataset) -> list[float]:
    model.double().eval()
    losses = []
    for row, length in zip(sequences, LENGTHS, strict=True):
        with torch.no_grad():
            logits = model(input_ids=row["input_ids"][None]).logits[0].double()
        for position in range(length):
            probabilities = torch.softmax(logits[position], dim=0)
            losses.append(-math.log(probabilities[row["input_ids"][position + 1]].item()))
    model.float()
    return losses


def test_average_over_tokens(model: PreTrainedModel, sequences: Dataset, tmp_path: Path) -> None:
    losses = per_token(model, sequences)
    assert len(losses) == sum(LENGTHS)
    expected = sum(losses) / len(losses)
    metrics = evaluate(RunTrainer, model, sequences, tmp_path)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_trainer_itself_averages_batches(model: PreTrainedModel, sequences: Dataset, tmp_path: Path) -> None:
    """If this fails, transformers has changed, and our hooks may have become superfluous."""
    losses = per_token(model, sequences)
    theirs = evaluate(Trainer, model, sequences, tmp_path)["eval_loss"]
    assert abs(theirs - sum(losses) / len(losses)) > 1e-3


def test_evaluation_leaves_the_random_state(model: PreTrainedModel, sequences: Dataset, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, disable_tqdm=True, report_to=[])
    trainer = RunTrainer(model, args, eval_dataset=sequences, callbacks=[Meter()])
    before = torch.random.get_rng_state()
    trainer.evaluate()
    assert torch.random.get_rng_state().equal(before)


def test_sequence_losses_of_a_tuple_of_outputs() -> None:
    logits = torch.zeros(2, 3, 4)
    labels = torch.tensor([[0, 1, 2], [0, 3, -100]])
    expected = [[2 * math.log(4), 2.0], [math.log(4), 1.0]]
    assert sequence_losses((logits, torch.zeros(1)), labels).tolist() == [pytest.approx(row) for row in expected]
