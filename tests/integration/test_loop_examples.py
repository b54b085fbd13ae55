"""Training loops of the user's own, and Lightning's: the examples, whole and resumed."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = Path(__file__).parents[2] / "examples"
Run = Callable[..., dict[str, Any]]


def same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_plain_pytorch(run_example: Run, tmp_path: Path) -> None:
    run_example("plain_pytorch.py", tmp_path / "whole", 6)
    run_example("plain_pytorch.py", tmp_path / "parts", 3)
    run_example("plain_pytorch.py", tmp_path / "parts", 6)
    one, other = (torch.load(tmp_path / run / "checkpoint.pt") for run in ("whole", "parts"))
    assert one.keys() == other.keys()
    for part in ("model", "topology"):
        same(one[part], other[part])
    same(one["optimizer"]["state"], other["optimizer"]["state"])
    assert one["topology"]["updates"] == 3
    assert one["step"] == 6


def test_lightning(run_example: Run, tmp_path: Path) -> None:
    """It trains by the rules of its modules, and weights and state come back from its checkpoint."""
    trained = run_example("lightning_module.py", tmp_path / "whole", 20)
    again = run_example("lightning_module.py", tmp_path / "again", 20, tmp_path / "whole" / "last.ckpt")
    optimizers = [run["trainer"].optimizers[0] for run in (trained, again)]
    assert {group["rule"] for group in optimizers[0].param_groups} == {"sinkgd", "adamw"}
    assert {float(state["step"]) for state in optimizers[0].state.values()} == {20.0}
    same(trained["module"].state_dict(), again["module"].state_dict())
    same(*(optimizer.state_dict()["state"] for optimizer in optimizers))


def test_fsdp2(tmp_path: Path) -> None:
    """On two processes, which a launcher starts."""

    def launch(folder: str, steps: int) -> None:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words += [str(EXAMPLES / "fsdp2.py"), str(tmp_path / folder), str(steps)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
        assert ended.returncode == 0, ended.stderr

    launch("whole", 6)
    launch("parts", 3)
    launch("parts", 6)
    states = []
    for run in ("whole", "parts"):
        dcp_to_torch_save(tmp_path / run / "checkpoint", tmp_path / f"{run}.pt")
        states.append(torch.load(tmp_path / f"{run}.pt"))
    for part in ("weights", "step"):
        same(states[0][part], states[1][part])
    same(states[0]["state"]["state"], states[1]["state"]["state"])
    assert "1.weight" in states[0]["weights"]
    assert dcp.FileSystemReader(tmp_path / "whole" / "checkpoint").read_metadata().state_dict_metadata
