"""transformers.Trainer with what a pumice run adds: whole checkpoints, undisturbed randomness, token counts."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from pumice.errors import UserError
from pumice.integrations.topology import TopologyCallback
from pumice.train import checkpoints
from pumice.train.meter import Meter
from pumice.train.signals import shielded


class RunTrainer(Trainer):
    """A Trainer whose checkpoints are sealed, whose evaluations do not change the training, and that is metered."""

    @property
    def meter(self) -> Meter:
        """The meter among the callbacks."""
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, Meter))

    @property
    def topology(self) -> TopologyCallback | None:
        """The callback that moves active blocks, if there is one."""
        callbacks = self.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, TopologyCallback)), None)

    def restore(self, checkpoint: Path) -> None:
        """Take on the weights, state and counts of a checkpoint without training from there."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = checkpoints.state_of(checkpoint)
        self.state.is_world_process_zero = self.is_world_process_zero()
        self.state.is_local_process_zero = self.is_local_process_zero()
        self.meter.restore(self.state)
        if self.topology is not None:
            self.topology.on_train_begin(self.args, self.state, self.control, model=self.model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the training loader, shielded from signals."""
        return shielded(super().get_train_dataloader())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the evaluation loader, shielded from signals."""
        return shielded(super().get_eval_dataloader(eval_dataset))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Count a micro-batch and train on it."""
        self.meter.see(inputs["input_ids"], self.args.world_size)
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        if self.topology is not None:
            self.topology.see(loss)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate, and leave the random state as it was: when and how often must not reach the weights."""
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            return super().evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the tokens seen and the speed since the last log."""
        super().log(self.meter.complete(logs), *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        assert self.model is not None
        checkpoints.check_weights(Path(resume_from_checkpoint), self.model)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        except ValueError as error:
            raise UserError(
                f"cannot resume from {checkpoint}: its optimizer state is that of another method ({error}); continue "
                "it with its own recipe"
            ) from error

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = Path(str(self.args.output_dir))
        folder = run / f"checkpoint-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None  # older ones go once this one is whole
        try:
            if self.args.should_save:
                checkpoints.unseal(folder)
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            checkpoints.seal(folder)
            best = self.state.best_model_checkpoint
            checkpoints.rotate(run, limit, None if best is None else Path(best))
