"""The folder of a run: what lies where, and whether a run may write there."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pumice.errors import UserError
from pumice.train import checkpoints
from pumice.train.load import differences, dump, load
from pumice.train.recipe import Recipe


@dataclass(frozen=True)
class RunFolder:
    """Paths in a run's folder.

    Args:
        path: The folder, which need not exist.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe; ``pumice train`` takes it as it is."""
        return self.path / "recipe.yaml"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer, kept from the first start of the run."""
        return self.path / "tokenizer"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        """The trained model and its tokenizer in the Hugging Face layout."""
        return self.path / "model"

    @property
    def loss_curve(self) -> Path:
        """Training and validation loss over steps."""
        return self.path / "loss.png"

    @property
    def topology(self) -> Path:
        """What topology updates did, drawn; of methods that move blocks."""
        return self.path / "topology.png"

    @property
    def density_map(self) -> Path:
        """Which blocks were active at the end, drawn; of sparse methods."""
        return self.path / "density.png"

    @property
    def summary(self) -> Path:
        """The numbers of the table at the end; it exists once the run is finished."""
        return self.path / "summary.json"

    def begun(self) -> bool:
        """Tell whether a run has begun to train here."""
        kept = (self.metrics, self.model, self.summary)
        return any(file.exists() for file in kept) or bool(checkpoints.checkpoints(self.path))

    def start(self, recipe: Recipe, resume: str) -> Path | None:
        """Check that this recipe may run here, and find the checkpoint it continues from. Changes nothing.

        Args:
            recipe: The resolved recipe.
            resume: ``never``, ``auto`` (continue the run in this folder if there is one) or a path (of a checkpoint,
                or of a run, whose last whole one is taken).

        Returns:
            The checkpoint folder, or None to begin at step 0.

        Raises:
            UserError: The folder holds a run that ``resume`` does not continue, or one of another recipe; or there
                is no whole checkpoint at the path given.
        """
        begun, given = self.begun(), None if resume in ("never", "auto") else Path(resume).expanduser().resolve()
        inside = resume == "auto" or given in (self.path, *checkpoints.checkpoints(self.path))
        if begun and not inside:
            raise UserError(
                f"output.dir '{self.path}' already holds a run: continue it with --resume auto, "
                "or choose another with --output.dir"
            )
        if begun and (changed := self._changed(recipe)):
            raise UserError(
                f"output.dir '{self.path}' holds a run of another recipe, which differs in {', '.join(changed)}: "
                "choose another with --output.dir"
            )
        if given is not None:
            return checkpoints.resolve(given)
        return checkpoints.last_whole(self.path) if resume == "auto" else None

    def finished(self) -> dict[str, Any] | None:
        """Return the summary of a finished run, or None."""
        return json.loads(self.summary.read_text(encoding="utf-8")) if self.summary.is_file() else None

    def conclude(self, figures: dict[str, Any]) -> None:
        """Write the summary, which marks the run as finished; a figure that is not finite becomes null."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
        partial = self.summary.with_name(f"{self.summary.name}.partial")
        partial.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.summary)

    def keep(self, recipe: Recipe) -> None:
        """Write the resolved recipe."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.recipe.write_text(dump(recipe), encoding="utf-8")

    def _changed(self, recipe: Recipe) -> list[str]:
        if not self.recipe.is_file():
            raise UserError(f"output.dir '{self.path}' holds a run without its recipe.yaml: choose another")
        return differences(load(str(self.recipe)), recipe)
