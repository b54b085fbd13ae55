"""Dynamic sparse training in ``transformers.Trainer``: the callback that moves the active blocks."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.trainer_callback import ExportableState, TrainerCallback

from pumice.errors import UserError
from pumice.sparse import Monitor, Topology

logger = logging.getLogger(__name__)

PREFIX = "topology/"  # of metrics


class TopologyCallback(TrainerCallback, ExportableState):
    """Changes the topology of a block-sparse model, once per optimizer step, and reports what that does.

    It ticks after the optimizer's step, whatever the gradient accumulation, and not for a step that a gradient scaler
    skipped. Its state is part of each checkpoint's ``trainer_state.json``.

    Args:
        make: From the model and the optimizer steps of the run to its topology.

    Attributes:
        monitor: The topology, and what is known of it; None before training.
        log: Takes the metrics of each update, by names that begin with ``topology/``: usually the trainer's ``log``.
            None logs them as text.
    """

    def __init__(self, make: Callable[[nn.Module, int], Topology]) -> None:
        self._make = make
        self.monitor: Monitor | None = None
        self.log: Callable[[dict[str, float]], None] | None = None
        self._losses: list[Tensor] = []
        self._finished: dict[str, float] | None = None

    def see(self, loss: Tensor) -> None:
        """Take in the loss of a micro-batch, as a share of its optimizer step's, for the jumps at updates."""
        self._losses.append(loss.detach())

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"args": {}, "attributes": {} if self.monitor is None else {"monitor": self.monitor.state_dict()}}

    def restore(self, state: Any) -> None:
        """Go on from a Trainer's state.

        Raises:
            UserError: It comes from a run without this callback.
        """
        saved: Mapping[str, Any] = state.stateful_callbacks.get(type(self).__name__, {})
        if "monitor" not in saved.get("attributes", {}):
            raise UserError(
                f"cannot resume at step {state.global_step}: the checkpoint holds no topology, so it was not saved by "
                "a run of a method that moves blocks; start anew in another output folder"
            )
        if self.monitor is not None:
            self.monitor.load_state_dict(saved["attributes"]["monitor"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the topology, and restore it if resumed."""
        self.monitor = Monitor(self._make(kwargs["model"], state.max_steps))
        self._losses, self._finished = [], None
        if state.global_step:
            self.restore(state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take a sample of the weights, if a topology update was not long ago."""
        if self.monitor is not None:
            self.monitor.before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tick."""
        losses, self._losses = self._losses, []
        if self.monitor is None:
            return
        if getattr(kwargs["optimizer"], "step_was_skipped", False):
            self.monitor.topology.skip()
        else:
            loss = float(sum(losses)) if losses else None
            self._finished = self.monitor.step(kwargs["optimizer"], loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report an update some steps later, when what it did is known."""
        self._report(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the last update, unless the run was stopped: who continues it will."""
        if self.monitor is not None and state.global_step >= state.max_steps:
            self._finished = self.monitor.finish()
            self._report(state)

    def _report(self, state: Any) -> None:
        record, self._finished = self._finished, None
        if record is None:
            return
        if self.log is not None:
            self.log({f"{PREFIX}{name}": value for name, value in record.items()})
        elif state.is_world_process_zero:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in record.items() if "/" not in name)
            logger.info("topology: %s", shown)
