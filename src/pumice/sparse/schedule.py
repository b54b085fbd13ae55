"""When the topology changes, and how much of it."""

import math
from dataclasses import dataclass

from pumice.errors import UserError


@dataclass(frozen=True)
class Schedule:
    """Topology updates every ``interval`` optimizer steps from ``start`` to ``stop``, with less to drop each time.

    Steps are counted from 1: at step s, s optimizer steps have been taken.

    Attributes:
        interval: Optimizer steps between two updates, ΔT; they fall on its multiples.
        total_steps: Optimizer steps of the run.
        drop_fraction: Share of active blocks to drop at ``start``, in [0, 1].
        final_drop_fraction: The same at ``stop``; in between it follows half a cosine wave (arXiv 1911.11134).
        start: First step at which an update may fall: a fraction of the run if at most 1, else a whole step.
        stop: Last step at which an update may fall: a fraction of the run if at most 1, else a whole step.
        final_share: Share of each layer's slots that hold an active block at ``stop``, in (0, 1]; it falls from 1 at
            ``start`` with the cube of the time left (arXiv 1710.01878). Slots that hold none remain as padding.

    Raises:
        UserError: A setting is out of range, or stop is not after start.
    """

    interval: int
    total_steps: int
    drop_fraction: float = 0.2
    final_drop_fraction: float = 0.005
    start: float = 0.0
    stop: float = 0.75
    final_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("interval", "total_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} must be a whole number of optimizer steps, at least 1, got {value}")
        if not 0 <= self.drop_fraction <= 1:
            raise UserError(f"drop_fraction must be in [0, 1], got {self.drop_fraction}")
        if not 0 <= self.final_drop_fraction <= self.drop_fraction:
            raise UserError(
                f"final_drop_fraction must be in [0, drop_fraction={self.drop_fraction}], "
                f"got {self.final_drop_fraction}"
            )
        if not 0 < self.final_share <= 1:
            raise UserError(f"final_share must be in (0, 1], got {self.final_share}")
        for name in ("start", "stop"):
            value = getattr(self, name)
            if not (0 <= value <= 1 or (value > 1 and value == int(value))):
                raise UserError(f"{name} must be a fraction of the run in [0, 1] or a whole step, got {value}")
        if self.stop_step <= self.start_step:
            raise UserError(
                f"stop must come after start, got start={self.start} (step {self.start_step}) and stop={self.stop} "
                f"(step {self.stop_step} of {self.total_steps})"
            )

    @property
    def start_step(self) -> int:
        """First step at which an update may fall."""
        return self._step(self.start)

    @property
    def stop_step(self) -> int:
        """Last step at which an update may fall."""
        return self._step(self.stop)

    def _step(self, moment: float) -> int:
        return round(moment * self.total_steps) if moment <= 1 else int(moment)

    @property
    def updates(self) -> int:
        """Number of updates of the whole run."""
        return self.stop_step // self.interval - (max(self.start_step, 1) - 1) // self.interval

    def due(self, step: int) -> bool:
        """Whether the topology changes after optimizer step ``step``."""
        return step > 0 and step % self.interval == 0 and self.start_step <= step <= self.stop_step

    def drop_fraction_at(self, step: int) -> float:
        """Share of active blocks to drop in an update at ``step``."""
        wave = 0.5 * (1 + math.cos(math.pi * self._progress(step)))
        return self.final_drop_fraction + (self.drop_fraction - self.final_drop_fraction) * wave

    def share_at(self, step: int) -> float:
        """Share of the slots that hold an active block after an update at ``step``."""
        return self.final_share + (1 - self.final_share) * (1 - self._progress(step)) ** 3

    def _progress(self, step: int) -> float:
        return min(1.0, max(0.0, (step - self.start_step) / (self.stop_step - self.start_step)))
