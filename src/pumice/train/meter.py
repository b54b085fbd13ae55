"""What a run has trained on, and how fast: kept in checkpoints, so that a resumed run counts on."""

import hashlib
import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers.trainer_callback import ExportableState, TrainerCallback

_KEPT = ("tokens", "seconds", "batches", "peak_memory", "optimizer_state")


class Meter(TrainerCallback, ExportableState):
    """Counts tokens and the seconds spent on training (not on evaluating or saving) and hashes the batches.

    Attributes:
        tokens: Tokens trained on, over all devices.
        seconds: Seconds spent on training steps, loading of batches included.
        batches: SHA-256 over the batches of this process in their order, chained: each digest covers the one before.
        peak_memory: Bytes; on a GPU the most that was allocated, else the most that the process held.
        optimizer_state: Bytes of the optimizer's state on this process.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds = 0.0
        self.batches = hashlib.sha256().hexdigest()
        self.peak_memory = 0
        self.optimizer_state = 0
        self._optimizer: Optimizer | None = None
        self._clock = 0.0
        self._logged = (0, 0.0)

    @property
    def tokens_per_second(self) -> float | None:
        """Average over the run, or None before the first step."""
        return self.tokens / self.seconds if self.seconds else None

    def see(self, input_ids: Tensor, world_size: int) -> None:
        """Take in a batch of this process; the other processes are taken to have batches of the same size."""
        self.tokens += input_ids.numel() * world_size
        data = input_ids.to("cpu", torch.int64).contiguous().numpy().tobytes()
        self.batches = hashlib.sha256(bytes.fromhex(self.batches) + data).hexdigest()

    def complete(self, logs: dict[str, float]) -> dict[str, float]:
        """Add ``tokens`` and, to a training log, ``tokens_per_second`` since the last one."""
        tokens, seconds = self._logged
        if "loss" in logs and self.seconds > seconds:
            logs["tokens_per_second"] = (self.tokens - tokens) / (self.seconds - seconds)
            self._logged = (self.tokens, self.seconds)
        logs["tokens"] = self.tokens
        return logs

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        self.measure()
        return {"args": {}, "attributes": {name: getattr(self, name) for name in _KEPT}}

    def measure(self) -> None:
        """Bring the measures of memory up to date."""
        self.peak_memory = max(self.peak_memory, _peak_memory())
        if self._optimizer is not None:
            self.optimizer_state = state_bytes(self._optimizer)

    def restore(self, state: Any) -> None:
        """Count on from a Trainer's state."""
        vars(self).update(state.stateful_callbacks.get("Meter", {}).get("attributes", {}))
        self._logged = (self.tokens, self.seconds)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the counts, if resumed, and start the clock."""
        self.restore(state)
        self._optimizer = kwargs["optimizer"]
        self._clock = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock of this step and start that of the next."""
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock anew."""
        self._clock = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock anew."""
        self._clock = time.perf_counter()


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in an optimizer's state, quantised ones by what they store."""
    states = optimizer.state.values()
    return sum(_bytes(value) for state in states for value in state.values() if isinstance(value, Tensor))


def _bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that wraps other tensors
        return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()
