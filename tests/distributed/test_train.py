"""A run of two processes, as torchrun starts it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForCausalLM


def test_two_processes(recipe: Path, train: Callable[..., int], tmp_path: Path) -> None:
    """The validation part has seven blocks: one process is given one of them twice, and it must count once."""
    words = ["--trainer.max_steps", "4", "--trainer.eval_steps", "4", "--trainer.per_device_eval_batch_size", "2"]
    words += ["--trainer.use_cpu", "true", "--trainer.dataloader_num_workers", "0", "--method.name", "sinkgd"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    ran = subprocess.run(
        [*torchrun, "-m", "pumice", "train", str(recipe), "--output.dir", str(tmp_path / "two"), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("validation perplexity at the end") == 1
    assert ran.stderr.count("step 4/4  loss") == 1
    assert train(tmp_path / "one", *words) == 0
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert abs(one[0]["eval_loss"] - two[0]["eval_loss"]) < 1e-6
    assert (one[-1]["tokens"], two[-1]["tokens"]) == (4 * 8 * 32, 2 * 4 * 8 * 32)
    assert two[-1]["eval_loss"] < one[0]["eval_loss"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "model").config.model_type == "llama"
