"""The quickstart learns more than which token follows which."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from pumice.cli import main
from pumice.train.data import load_documents, pack
from pumice.train.load import load
from pumice.train.tokenizer import load_tokenizer


def bigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    """Nats per token of the bigram model that predicts the held-out blocks best.

    Each of the usual ways of smoothing is given the constant that suits the held-out part, which no honest fit knows.

    Args:
        train: (blocks, length) token ids.
        held_out: The same; its first tokens, which nothing precedes, are not predicted.
    """
    size = int(max(train.max(), held_out.max())) + 1
    pairs = train[:, :-1].ravel().astype(np.int64) * size + train[:, 1:].ravel()
    counts = np.bincount(pairs, minlength=size * size).reshape(size, size)
    before, after = held_out[:, :-1].ravel(), held_out[:, 1:].ravel()
    seen, total = counts[before, after], np.maximum(counts.sum(1), 1)[before]
    unigram = ((counts.sum(0) + 1) / (counts.sum() + size))[after]
    followers = (counts > 0).sum(1)[before]
    continuation = ((counts > 0).sum(0) + 1) / ((counts > 0).sum() + size)
    probabilities = [(seen + k) / (counts.sum(1)[before] + k * size) for k in np.logspace(-4, 1, 21)]
    probabilities += [(seen + k * unigram) / (counts.sum(1)[before] + k) for k in np.logspace(-2, 4, 25)]
    for share in np.linspace(0.05, 0.95, 19):
        probabilities.append((1 - share) * seen / total + share * unigram)
        for lower in (unigram, continuation[after]):  # absolute discounting, and Kneser and Ney's
            rest = np.where(followers > 0, share * followers / total, 1)
            probabilities.append(np.maximum(seen - share, 0) / total + rest * lower)
    with np.errstate(divide="ignore"):
        return min(-np.log(probability).mean() for probability in probabilities)


def unigram_loss(train: np.ndarray, held_out: np.ndarray) -> float:
    counts = np.bincount(train.ravel(), minlength=int(held_out.max()) + 1) + 1
    return float(-np.log(counts / counts.sum())[held_out[:, 1:]].mean())


def blocks(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that the run in a folder was trained on, and those held out."""
    recipe = load(str(folder / "recipe.yaml"))
    documents, tokenizer = load_documents(recipe.data, recipe.trainer.seed), load_tokenizer(str(folder / "tokenizer"))
    packed: list[datasets.Dataset] = [pack(part, tokenizer, recipe.data.seq_len) for part in documents]
    train, held_out = (np.asarray(part.with_format("numpy")["input_ids"]) for part in packed)
    return train, held_out


def end_loss(folder: Path) -> float:
    figures: dict[str, float] = json.loads((folder / "summary.json").read_text())
    return figures["end_loss"]


def test_bigram_of_a_chain_is_as_good_as_the_chain() -> None:
    """Tokens drawn from a bigram model: no model can predict them better, and ours hardly worse, than itself."""
    draw = np.random.default_rng(0)
    transition = draw.dirichlet(np.full(8, 0.3), size=8)
    state, chain = 0, []
    for _ in range(40_000):
        state = int(draw.choice(8, p=transition[state]))
        chain.append(state)
    tokens = np.array(chain).reshape(-1, 100)
    entropy = -np.log(transition[tokens[300:, :-1], tokens[300:, 1:]]).mean()
    assert entropy - 1e-3 < bigram_loss(tokens[:300], tokens[300:]) < entropy + 0.01
    assert unigram_loss(tokens[:300], tokens[300:]) > entropy + 0.2


@pytest.mark.parametrize("method", ["sinkgd", "adamw"])
def test_a_few_steps_of_it(method: str, tmp_path: Path) -> None:
    words = ["--data.max_documents", "25", "--trainer.max_steps", "40", "--output.sample_tokens", "1"]
    assert main(["train", "quickstart", "--output.dir", str(tmp_path / "run"), "--method.name", method, *words]) == 0
    assert end_loss(tmp_path / "run") < unigram_loss(*blocks(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sinkgd", "adamw"])
def test_all_of_it_beats_the_bigram(method: str, tmp_path: Path) -> None:
    assert main(["train", "quickstart", "--output.dir", str(tmp_path / "run"), "--method.name", method]) == 0
    assert end_loss(tmp_path / "run") < bigram_loss(*blocks(tmp_path / "run"))
