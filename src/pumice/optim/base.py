"""The manners of a torch optimizer, written once for all optimizers here: groups, state, closures, unfit gradients."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from pumice.optim.batch import DENSITY_EXPONENTS, Batch, Member, apply_all, batches, measure_all, remeasure_all
from pumice.optim.compiling import compiler_works
from pumice.optim.sharding import any_rank, to_local
from pumice.sparse.linear import BlockSparseLinear

COMPILE_FROM = 1 << 23  # parameters: below, compiling takes longer than it saves


def check_number(name: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    """Raise TypeError or ValueError unless ``value`` is a number in [low, high), or in (low, high) if ``open_low``."""
    bounds = f"{'(' if open_low else '['}{low}, {high})"
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_number or isinstance(value, bool):
        raise TypeError(f"{name} must be a number in {bounds}, got {value!r}")
    number = float(value)
    if not (number > low or (number == low and not open_low)) or not number < high:
        raise ValueError(f"{name} must be in {bounds}, got {number}")


def check_whole(name: str, value: Any, low: int) -> None:
    """Raise TypeError or ValueError unless ``value`` is a whole number of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name} must be a whole number of at least {low}, got {value}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


class MatrixOptimizer(Optimizer):
    """Base of the optimizers: subclasses say which update a parameter gets and what state it keeps.

    Attributes:
        nonfinite: ``"error"`` or ``"skip"``.
        compile: whether kernels are compiled; None decides by size and by whether a compiler is at hand.
        skipped: number of skipped updates by parameter name, since construction.
    """

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, nonfinite: str = "error", compile: bool | None = None
    ) -> None:
        if nonfinite not in ("error", "skip"):
            raise ValueError(f"nonfinite must be 'error' or 'skip', got {nonfinite!r}")
        if compile is not None:
            check_flag("compile", compile)
        self.nonfinite = nonfinite
        self.compile = compile
        self.skipped: dict[str, int] = {}
        self._layers: dict[int, BlockSparseLinear] = {}  # by position: parameters are swapped when they are sharded
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise ValueError or TypeError if an option of ``group`` is out of range: here those that all have."""
        check_number("lr", group["lr"], 0)
        check_number("weight_decay", group["weight_decay"], 0)
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise TypeError(f"betas must be two numbers, got {group['betas']!r}")
        for index, beta in enumerate(group["betas"]):
            check_number(f"betas[{index}]", beta, 0, 1)
        check_number("eps", group["eps"], 0, open_low=True)
        if group["state_bits"] not in (8, 32):
            raise ValueError(f"state_bits must be 8 or 32, got {group['state_bits']!r}")
        check_whole("seed", group["seed"], 0)
        for name in ("stochastic_rounding", "maximize"):
            check_flag(name, group[name])
        check_whole("warmup_steps", group["warmup_steps"], 0)
        if group["density_scaling"] not in DENSITY_EXPONENTS:
            raise ValueError(f"density_scaling must be 'sqrt', 'linear' or 'none', got {group['density_scaling']!r}")

    def _check_layers(self, group: dict[str, Any], layers: list[BlockSparseLinear]) -> None:
        """Raise ValueError if ``layers`` cannot be those of a group."""
        if layers and len(layers) != len(group["params"]):
            raise ValueError(f"a group of {len(group['params'])} parameters needs as many layers, got {len(layers)}")

    def _forget(self, state: dict[str, Any], slots: Tensor) -> None:
        """Set the state of slots that have got another block to what it is at the start."""

    def _check_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Raise ValueError or TypeError if ``parameter`` of ``group`` cannot be trained."""
        if parameter.is_complex():
            raise TypeError(f"{type(self).__name__} trains real parameters only, got one of {parameter.dtype}")

    @abstractmethod
    def _prepare(self, member: Member) -> type[Batch]:
        """Create the state that ``member`` lacks and return the kind of its update."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, its options and parameters checked.

        Args:
            param_group: Parameters and their options; for packed values also ``layers``, the
                :class:`pumice.sparse.BlockSparseLinear` of each, in the same order.
        """
        param_group = dict(param_group)
        layers = list(param_group.pop("layers", []))
        first = sum(len(group["params"]) for group in self.param_groups)
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            self._check_layers(self.param_groups[-1], layers)
            for parameter in self.param_groups[-1]["params"]:
                self._check_parameter(parameter, self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._layers.update(enumerate(layers, first))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # saved before an option existed
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __getstate__(self) -> dict[str, Any]:
        own = {
            "nonfinite": self.nonfinite,
            "compile": self.compile,
            "skipped": dict(self.skipped),
            "_layers": self._layers,
        }
        return {**super().__getstate__(), **own}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss; called once, with gradients enabled.

        Returns:
            The loss of ``closure``, or None.

        Raises:
            FloatingPointError: a gradient is not finite and ``nonfinite`` is ``"error"``; no parameter has changed.
            ValueError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kinds = [(self._prepare(member), member) for member in self._members()]
        present = [pair for pair in kinds if pair[1].parameter.grad is not None and pair[1].parameter.numel() > 0]
        if present and not self._only_makes_state([member for _, member in present]):
            self._update(present)
        return loss

    @torch.no_grad()
    def make_state(self) -> None:
        """Create the state that parameters lack, without an update; also on the meta device, to know its size."""
        for member in self._members():
            self._prepare(member)

    def _members(self) -> Iterator[Member]:
        """Yield every parameter that can train, with or without a gradient: each gets state, as checkpoints expect."""
        for number, (name, parameter, group) in enumerate(self._named()):
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ValueError(
                    f"{type(self).__name__} needs dense gradients, got a sparse one for {name}; "
                    "set sparse=False where the module is made"
                )
            if parameter.requires_grad:
                state, layer = self.state[parameter], self._layers.get(number)
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
                if layer is not None and "lag" not in state:  # to new state, all blocks are of one age
                    oldest = 0.0 if layer.birth.is_meta else float(layer.birth.max())
                    state["lag"] = torch.tensor(oldest, dtype=torch.float32)
                yield Member(parameter, group, state, name, number, group.get("transposed", False), layer)

    def _named(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Yield every parameter with its name, for messages, and its group."""
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                yield name, parameter, group

    def _only_makes_state(self, members: list[Member]) -> bool:
        """Recognise the step with zero gradients and lr 0 by which torch.distributed.checkpoint creates state."""
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        return not any(bool(any_rank(member.gradient.any(), member.parameter)) for member in members)

    def _compiles(self, members: list[Member]) -> bool:
        if self.compile is not None:
            return self.compile
        size = sum(member.weight.numel() for member in members)
        return size >= COMPILE_FROM and compiler_works(members[0].weight.device)

    def _update(self, kinds: list[tuple[type[Batch], Member]]) -> None:
        work = list(batches(kinds, self._compiles([member for _, member in kinds])))
        flagged = self._flagged(work, measure_all(work))
        if flagged:
            work = [batch for batch in work if batch not in flagged]
            for batch in flagged:
                work += self._fit(batch.split())
        apply_all(work)

    def _flagged(self, work: list[Batch], measured: list[Tensor]) -> list[Batch]:
        """Return the batches with a flag on any rank; one reduction per mesh and one look per device."""
        by_place: dict[Any, list[tuple[Batch, Tensor]]] = {}
        for batch, flags in zip(work, measured, strict=True):
            parameter = batch.members[0].parameter
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_place.setdefault((mesh, flags.device), []).append((batch, flags))
        flagged: list[Batch] = []
        for pairs in by_place.values():
            found = iter(any_rank(torch.cat([flags for _, flags in pairs]), pairs[0][0].members[0].parameter).tolist())
            flagged += [batch for batch, _ in pairs if sum(islice(found, len(batch.members)))]
        return flagged

    def _fit(self, singles: list[Batch]) -> list[Batch]:
        """Return those batches of one member whose gradient is finite; raise or count the others."""
        unfit = self._flagged(singles, remeasure_all(singles))
        for batch in unfit:
            (member,) = batch.members
            message = f"the gradient of {member.name}, shape {tuple(member.parameter.shape)}, is not finite"
            if self.nonfinite == "error":
                raise FloatingPointError(
                    f"{message} (update {member.step}); no parameter was changed. Lower the learning rate, or pass "
                    "nonfinite='skip' to leave such a parameter out of an update"
                )
            self.skipped[member.name] = self.skipped.get(member.name, 0) + 1
            warnings.warn(f"{message}: its update is skipped", stacklevel=5)
        return [batch for batch in singles if batch not in unfit]

    @torch.no_grad()
    def reset_slots(self, parameter: Tensor, slots: Tensor) -> None:
        """Forget the state of slots that have got another block; a topology calls it when it changes.

        Args:
            parameter: ``values`` of a layer, as it stands in a parameter group.
            slots: int64: numbers of slots of the whole parameter, whose births in the layer are set already.

        Raises:
            ValueError: the optimizer does not know the layer of ``parameter``.
        """
        every = (one for group in self.param_groups for one in group["params"])
        layer = next((self._layers.get(i) for i, one in enumerate(every) if one is parameter), None)
        if layer is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} does not know the layer of these values; make it with {name}.from_model(model, lr)"
            )
        state = self.state.get(parameter, {})
        if state and slots.numel():
            self._forget(state, slots)
            state["lag"].fill_(int(layer.birth[slots[0]]) - int(state["step"]))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; unlike torch's, state keeps the dtype that it was saved in.

        Raises:
            ValueError: It comes from other parameters; nothing has changed.
        """
        given: dict[str, Any] = {}  # after other hooks have changed it
        hooks = [
            self.register_load_state_dict_pre_hook(lambda _, final: given.update(self._fitting(final))),
            self.register_load_state_dict_post_hook(lambda _: self._restore(given), prepend=True),
        ]
        try:
            super().load_state_dict(dict(state_dict))
        finally:
            for hook in hooks:
                hook.remove()

    def _fitting(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return ``state_dict``, of which torch checks no shapes, or raise ValueError."""
        saved_ids = (i for group in state_dict["param_groups"] for i in group["params"])
        for saved_id, (name, parameter, _) in zip(saved_ids, self._named(), strict=False):  # torch compares the counts
            moment = state_dict["state"].get(saved_id, {}).get("exp_avg")
            if moment is not None and to_local(moment).shape != to_local(parameter).shape:
                raise ValueError(
                    f"the state to load has moments of shape {tuple(moment.shape)} for {name}, whose shape is "
                    f"{tuple(parameter.shape)}; load it into an optimizer of the same model, sparse in the same way"
                )
        return state_dict

    @torch.no_grad()
    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Replace state that torch has cast to the parameter's dtype, or taken without a copy."""
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for saved_id, parameter in zip(saved_ids, own, strict=True):
            for key, value in state_dict["state"].get(saved_id, {}).items():
                device = value.device if value.ndim == 0 else to_local(parameter).device  # counters stay
                self.state[parameter][key] = value.detach().clone().to(device)
