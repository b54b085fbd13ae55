import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pumice.cli import main

TINY = ["plan", "llama-tiny", "--seq-len", "64"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.slow
def test_an_8b_model_on_a_card_of_24_gib(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan llama-3.1-8b --method sinkgd --release --checkpointing --seq-len 2048 --micro-batch 1 --gpu 24GiB"
    found = planned(capsys, *words.split())
    assert found["fits"] is True
    assert found["peak_bytes"] <= 22 << 30
    parts = found["breakdown_bytes"]
    assert set(parts) == {"weights", "gradients", "optimizer_state", "activations", "logits", "transient"}
    assert parts["weights"] == pytest.approx(14.96 * 2**30, rel=1e-3)
    assert sum(parts.values()) == found["peak_bytes"]
    peaks = {(row["method"], str(row["options"]), row["release"]): row for row in found["alternatives"]}
    eight_bits = peaks["adamw", "{'state_bits': 8}", False]
    assert eight_bits["fits"] is False
    assert found["peak_bytes"] < 0.45 * eight_bits["peak_bytes"]
    assert found["largest"]["micro_batch"] == 1
    assert found["largest"]["seq_len"] >= 2048


def test_the_same_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--gpu", "rtx4090"]) == 0
    text = capsys.readouterr().out
    for part in ("optimizer state", "logits and loss", "fits, with 22.", "largest that fits so", "what else", "adamw"):
        assert part in text


def test_a_config_file_and_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    peaks = [
        planned(capsys, "plan", str(model), "--seq-len", "64")["peak_bytes"]
        for model in ("llama-tiny", tmp_path, tmp_path / "config.json")
    ]
    assert peaks[0] == peaks[1] == peaks[2]


def test_options_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    def peak(*words: str) -> int:
        return int(planned(capsys, *TINY, *words)["peak_bytes"])

    dense = peak("--method", "adamw")
    assert peak("--method", "adamw", "--dtype", "float32") > 1.5 * dense
    quarter, half = (peak("--method", "smet", "--density", d, "--block-shape", "1,16") for d in ("0.25", "0.5"))
    assert quarter < half
    assert peak("--micro-batch", "16", "--loss-chunk", "16") < peak("--micro-batch", "16")
    assert peak("--micro-batch", "4") > peak()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan"], "the following arguments are required: model; pumice plan --help lists the options"),
        (["plan", "llama-tony"], "unknown model 'llama-tony': did you mean 'llama-tiny'?"),
        ([*TINY, "--gpu", "rtx4900"], "unknown card 'rtx4900': give a size like 24GiB or a name; did you mean"),
        ([*TINY, "--method", "sinkdg"], "unknown method 'sinkdg': did you mean 'sinkgd'?"),
        ([*TINY, "--gpus", "4", "--release"], "gradient release works on one device, got 4"),
        ([*TINY, "--gpus", "0"], "--gpus must be at least 1, got 0"),
        ([*TINY, "--gpus", "2", "--sharding", "zero3"], "sharding must be 'ddp' or 'fsdp', got 'zero3'"),
        ([*TINY, "--dtype", "int8"], "--dtype must be one of bfloat16, float32, float16, got 'int8'"),
        ([*TINY, "--density", "0.5"], "--density is not an option of method sinkgd"),
        ([*TINY, "--method", "smet", "--density", "1.5"], "density"),
        (
            [*TINY, "--method", "smet", "--block-shape", "4"],
            "--block-shape must be two whole numbers like 1,64, got '4'",
        ),
        ([*TINY, "--seq-len", "1024"], "--seq-len is 1024, more than the model's 256 positions"),
        ([*TINY, "--seq-len", "x"], "argument --seq-len: invalid int value: 'x'"),
        ([*TINY, "--state-bits", "7"], "state_bits must be 8 or 32, got 7"),
        ([*TINY, "--loss-chunk", "0"], "--loss-chunk must be at least 1, got 0"),
        ([*TINY, "--relase"], "unrecognized arguments: --relase"),
    ],
)
def test_wrong_words(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pumice: ")
    assert sentence in err
    assert err.count("\n") == 1, err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    assert "--checkpointing" in capsys.readouterr().out
