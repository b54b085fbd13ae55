"""An orderly stop when the process is told to go."""

import functools
import mmap
import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader
from transformers.trainer_callback import TrainerCallback

_GRACE = 30  # seconds that a data worker goes on after SIGTERM
_OVER = mmap.mmap(-1, 1)  # shared with forked data workers: 1 when they are needed no longer


class StopOnSignal(TrainerCallback):
    """On the first SIGINT or SIGTERM: finish the step, save a checkpoint and stop; on the second: stop at once.

    A context manager; the handlers are in place inside it.

    Attributes:
        received: Number of the signal that stopped the training, or 0.
    """

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        _OVER[0] = 0
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _OVER[0] = 1
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            _OVER[0] = 1
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            signal.raise_signal(number)
            return
        self.received = number
        name = signal.Signals(number).name
        told = f"{name}: finishing this step and saving a checkpoint; a second one stops at once\n"
        os.write(2, told.encode())  # not print or logging: the signal may have come in the middle of one

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for a log, a checkpoint and the end of training, on all processes alike."""
        if args.world_size > 1:
            received = torch.tensor(self.received, device=args.device)
            torch.distributed.all_reduce(received, op=torch.distributed.ReduceOp.MAX)
            self.received = int(received)
        if self.received:
            control.should_log = control.should_save = control.should_training_stop = True
            control.should_evaluate = False


def shielded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader whose workers outlive a signal to the whole process group until the last step is done.

    A terminal sends Ctrl-C, and a job scheduler SIGTERM, to the data workers too.
    """
    inner = getattr(loader, "base_dataloader", loader)  # accelerate's wrapper hands on reads, not writes
    inner.worker_init_fn = functools.partial(_shield, inner.worker_init_fn)
    return loader


def _shield(init: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _go_later)
    if init is not None:
        init(worker)


def _go_later(number: int, frame: FrameType | None) -> None:
    if _OVER[0]:
        os._exit(0)
    signal.alarm(_GRACE)
