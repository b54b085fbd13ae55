"""Which blocks are active: drop those with the smallest weights, grow others, in the same slots.

One update of a layer with a active blocks, f free ones, and drop fraction p:

    candidates to drop  active blocks that are not in their grace
    n = min(round(p · a), candidates, f)
    drop the n candidates with the least mean |w|; grow the n free blocks with the highest score

The score is a random number (SET, arXiv 1707.04780) or the squared norm of the dense gradient (RigL, arXiv 1911.11134).
A block that was just dropped is not free, so none is dropped and grown at once; at density 1, nothing happens. Among
equal weights or scores the lowest id wins, wherever its slot is. A newborn block starts from zero and takes a slot that
a dropped block has left.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pumice.errors import UserError, nearest
from pumice.sparse.history import History, LayerUpdate, Update
from pumice.sparse.layout import mean_magnitudes
from pumice.sparse.linear import BlockSparseLinear
from pumice.sparse.schedule import Schedule
from pumice.sparse.selection import largest, random_scores
from pumice.sparse.sharding import fill_slots, summed

Grow = Literal["random", "gradient", "static"]


class Swap(NamedTuple):
    """Slots that get another block, ascending (int64), and what each holds from now on (int64)."""

    slots: Tensor
    ids: Tensor


def plan_swap(
    ids: Tensor, magnitudes: Tensor, scores: Tensor, protected: Tensor, drop_fraction: float, target: int
) -> Swap:
    """Decide which slots of a layer get which blocks.

    Args:
        ids: Integer, (slots,): the block of each slot; ``len(scores)`` for an empty one.
        magnitudes: float, (slots,): what is least is dropped.
        scores: float, (blocks,): what is highest is grown.
        protected: bool, (slots,): blocks that are not dropped.
        drop_fraction: Share of active blocks to swap.
        target: How many blocks should be active afterwards, if the topology is getting sparser. What is too much is
            dropped on top, and its slots become empty.

    Returns:
        The slots to change, all of them active until now, none twice.
    """
    blocks = scores.shape[0]
    active = ids < blocks
    droppable = active & ~protected
    count, candidates = int(active.sum()), int(droppable.sum())
    surplus = min(max(0, count - target), candidates)
    swapped = min(int(drop_fraction * (count - surplus) + 0.5), candidates - surplus, blocks - count)

    by_id = ids.argsort()
    least = torch.where(droppable, -magnitudes, -torch.inf)
    slots = by_id[largest(least[by_id], surplus + swapped)].sort().values
    free = scores.index_fill(0, ids[active].long(), -torch.inf)
    grown = largest(free, swapped)
    return Swap(slots, torch.cat((grown, grown.new_full((surplus,), blocks))))


def reset_slots(optimizer: Optimizer, parameter: nn.Parameter, slots: Tensor) -> None:
    """Start the optimizer's state of some slots afresh.

    An optimizer with a method ``reset_slots(parameter, slots)`` does it itself. Otherwise those slots are set to zero
    in every tensor of the parameter's state whose first axis has as many entries as the parameter's, but its ``step``.

    Args:
        optimizer: Any optimizer, or accelerate's wrapper of one.
        parameter: ``values`` of a layer, (slots, block rows, block cols).
        slots: int64.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if callable(reset := getattr(optimizer, "reset_slots", None)):
        reset(parameter, slots)
        return
    for name, state in optimizer.state.get(parameter, {}).items():
        if name != "step" and isinstance(state, Tensor) and state.shape[:1] == parameter.shape[:1]:
            fill_slots(state, slots)


_WRAPPERS = re.compile(r"^module\.|(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Topology:
    """Moves the active blocks of a model's block-sparse layers during training.

    Call :meth:`step` once after each step of the optimizer: backward, clip, ``optimizer.step()``,
    ``topology.step(optimizer)``, ``zero_grad()``. Its count of those calls is the clock of ages and updates. What it
    decides depends on (seed, name of the layer, number of the update), the weights, and gradients summed over ranks.
    Ids, birth steps and the record of what was ever active are buffers of the layers and part of the model's
    state_dict; the clock and the numbers of blocks grown are in :meth:`state_dict`.

    Args:
        model: A model with :class:`BlockSparseLinear` layers. Frozen layers (``values`` requires no gradient) stay as
            they are.
        interval: Optimizer steps between two updates, ΔT.
        drop_fraction: Share of a layer's active blocks to swap in the first update; it falls to
            ``final_drop_fraction`` along half a cosine wave.
        grow: ``"random"``; ``"gradient"``: by the squared norms of each block in the dense gradient, summed over the
            micro-batches and ranks of the update's step, for which every layer holds one float32 per block during that
            step (a layer without any gradient in it is left as it is); ``"static"``: no updates at all.
        grace: For how many updates after its birth a grown block cannot be dropped. Blocks that were there at the start
            have none.
        stop: Last step for updates: a fraction of the run if at most 1, else a whole step.
        total_steps: Optimizer steps of the run.
        start: First step for updates: a fraction of the run if at most 1, else a whole step.
        final_drop_fraction: Share to swap in an update at ``stop``.
        final_share: Share of each layer's slots that still hold a block at ``stop``; see :class:`Schedule`.
        seed: Of random growth.

    Attributes:
        layers: The layers, by full name without the prefixes of wrappers (DistributedDataParallel, torch.compile).
        steps: Optimizer steps so far.
        updates: Topology updates so far.
        updated_at: Value of ``steps`` at the latest topology update, 0 before the first.

    Raises:
        UserError: A setting is out of range, no update would ever happen, or the model has no block-sparse layer.
    """

    def __init__(
        self,
        model: nn.Module,
        interval: int,
        drop_fraction: float = 0.2,
        grow: Grow = "random",
        grace: int = 2,
        stop: float = 0.75,
        *,
        total_steps: int,
        start: float = 0.0,
        final_drop_fraction: float = 0.005,
        final_share: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.schedule = Schedule(interval, total_steps, drop_fraction, final_drop_fraction, start, stop, final_share)
        if grow not in (rules := ("random", "gradient", "static")):
            raise UserError(f"unknown growth rule '{grow}'; {nearest(str(grow), rules)}")
        if grow != "static" and not self.schedule.updates:
            raise UserError(
                f"no topology update would happen: interval={interval} has no multiple from step "
                f"{self.schedule.start_step} to {self.schedule.stop_step}; lower it, or use grow='static'"
            )
        if not isinstance(grace, int) or grace < 0:
            raise UserError(f"grace must be a whole number of updates, at least 0, got {grace}")
        self.grow, self.grace, self.seed = grow, grace, seed
        self.layers = {
            _WRAPPERS.sub("", name): module
            for name, module in model.named_modules()
            if isinstance(module, BlockSparseLinear)
        }
        if not self.layers:
            raise UserError("the model has no block-sparse layer; call sparsify first")
        self.steps = self.updates = self.updated_at = 0
        self._histories = {name: History(name, (1, 5, grace + 2)) for name in self.layers}
        self._record_if_due()

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> Update | None:
        """Count one optimizer step, and change the topology if it is time.

        Args:
            optimizer: The one that trains the layers; its state of the slots that get another block starts afresh.

        Returns:
            What changed; None if it was not time.
        """
        if not self.steps:  # births by the clock of an earlier topology say nothing on this one
            for layer in self.layers.values():
                layer.birth.zero_()
        self.steps += 1
        update = None
        if self._due(self.steps):
            self.updates += 1
            self.updated_at = self.steps
            layers = {name: layer for name, layer in self.layers.items() if layer.values.requires_grad}
            changes = tuple(self._update(name, layer, optimizer) for name, layer in layers.items())
            update = Update(self.steps, self.updates, self.grace, changes)
        self._record_if_due()
        return update

    def skip(self) -> None:
        """Forget the gradients of a step that the optimizer did not take, as when a gradient scaler skips it."""
        self._record_if_due()

    def state_dict(self) -> dict[str, Any]:
        """Clock and numbers of blocks grown, which JSON can hold; the rest is in the model's state_dict."""
        births = {name: [list(pair) for pair in history.births] for name, history in self._histories.items()}
        return {"steps": self.steps, "updates": self.updates, "updated_at": self.updated_at, "births": births}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another topology of the same layers stopped; load the model's state_dict as well.

        Raises:
            ValueError: The state belongs to other layers.
        """
        if other := state["births"].keys() ^ self._histories.keys():
            raise ValueError(f"the topology's state and the model differ in block-sparse layers: {sorted(other)}")
        for name, history in self._histories.items():
            history.births = [(int(step), int(grown)) for step, grown in state["births"][name]]
        self.steps, self.updates, self.updated_at = (int(state[key]) for key in ("steps", "updates", "updated_at"))
        self._record_if_due()

    def _due(self, step: int) -> bool:
        return self.grow != "static" and self.schedule.due(step)

    def _record_if_due(self) -> None:
        """Let the backward passes of the coming step record what growth by gradient will need, or forget it."""
        on = self.grow == "gradient" and self._due(self.steps + 1)
        for layer in self.layers.values():
            if layer.record_block_norms or on:
                layer.record_block_norms = on and layer.values.requires_grad

    def _update(self, name: str, layer: BlockSparseLinear, optimizer: Optimizer) -> LayerUpdate:
        before, slots = layer.ids.clone(), layer.ids.shape[0]
        scores = self._scores(name, layer)
        if scores is not None:
            age = self.steps - layer.birth
            swap = plan_swap(
                layer.ids,
                mean_magnitudes(layer.values.detach(), layer.ids, layer.grid),
                scores,
                (layer.birth > 0) & (age <= self.grace * self.schedule.interval),
                self.schedule.drop_fraction_at(self.steps),
                max(1, round(self.schedule.share_at(self.steps) * slots)),
            )
            layer.ids[swap.slots] = swap.ids.to(layer.ids.dtype)
            layer.birth[swap.slots] = self.steps
            fill_slots(layer.values.detach(), swap.slots)
            reset_slots(optimizer, layer.values, swap.slots)
        return self._histories[name].record(layer, before, self.steps)

    def _scores(self, name: str, layer: BlockSparseLinear) -> Tensor | None:
        """Score of each block for growth; None if there is nothing to go by."""
        if self.grow == "random":
            return random_scores(layer.grid.blocks, self.seed, name, self.updates).to(layer.ids.device)
        norms = layer.block_norms
        if norms is None:
            norms = torch.zeros(layer.grid.blocks, dtype=torch.float32, device=layer.ids.device)
        norms = summed(norms)  # by every rank, also by one whose layer had no gradient
        return norms if bool(norms.any()) else None
