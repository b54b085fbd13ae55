"""Two gloo processes for all checks of a file: starting them takes longer than the checks do."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 180  # seconds, for a busy machine; ordinarily 15
Check = Callable[[int, str], None]


def _run(rank: int, folder: str, checks: Sequence[Check]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{folder}/store")
    for check in checks:
        check(rank, folder)
        dist.barrier()
    dist.destroy_process_group()


def on_two_processes(checks: Sequence[Check], folder: Path) -> None:
    """Call every check with the rank and a folder, on each of two processes; fail if one fails or takes too long."""
    processes = torch.multiprocessing.spawn(_run, (str(folder), tuple(checks)), nprocs=2, join=False)
    assert processes is not None
    until = time.monotonic() + TIMEOUT
    while not processes.join(timeout=max(0.0, until - time.monotonic())):  # raises what a process raised
        if time.monotonic() > until:
            for process in processes.processes:
                process.kill()
            pytest.fail(f"the two processes took more than {TIMEOUT} seconds")
