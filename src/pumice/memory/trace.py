"""A training step on tensors without storage: which bytes come and go, in which order.

What planning needs of private parts of torch is in this file. The model runs forward and backward under FakeTensorMode
with a ledger (:mod:`pumice.memory.ledger`) on top of it. What C++ allocates inside an operator and frees before it
returns is not seen.

Of a model whose layers are alike, three run and the events of the middle one stand for all others.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from pumice.memory.ledger import Event, Ledger
from pumice.optim.base import MatrixOptimizer
from pumice.optim.release import step_alone
from pumice.sparse import linear as sparse_linear

_BOUNDED_ABOVE = 1 << 24  # elements: the updates of larger parameters by a MatrixOptimizer need no more scratch
_INSIDE = {  # operators that allocate much inside, and what they do
    operator._opoverload: operator._init_fn
    for operator in (sparse_linear._linear, sparse_linear._input_grad, sparse_linear._values_grad)
}


@dataclass(frozen=True)
class Timeline:
    """The events of a step by phases: ``forward``, ``loss`` and ``backward``, in order of time.

    Attributes:
        phases: Pairs of a phase and its events; a phase may come in several parts.
    """

    phases: list[tuple[str, list[Event]]]


class _Fake(Ledger):  # type: ignore[no-untyped-call]
    """A ledger of tensors without values that looks into the operators which allocate much."""

    def __init__(self) -> None:
        self.category = "weights"
        self.events: list[Event] = []
        super().__init__(self.events.append, lambda: self.category)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # a look at a value that does not exist
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func in _INSIDE:
            with self:
                return _INSIDE[func](*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events = list(self.events)
        self.events.clear()
        return events


def peak_of(events: list[Event]) -> tuple[int, int]:
    """Return the largest and the last sum of what comes and goes."""
    peak = now = 0
    for event in events:
        if event.becomes is None:
            now += event.size
            peak = max(peak, now)
    return peak, now


@contextmanager
def _fake() -> Iterator[_Fake]:
    ledger = _Fake()
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        yield ledger


def _without_storage(model: nn.Module) -> None:
    """Replace parameters and buffers in place by tensors of FakeTensorMode on the CPU; ties stay."""
    made: dict[int, Tensor] = {}

    def convert(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = convert(tensor)  # type: ignore[assignment]


def _layers(model: nn.Module) -> tuple[nn.ModuleList, int] | None:
    """Return the list of layers that are alike, and how many they are; None if there is none of more than three."""
    kinds = getattr(getattr(model, "config", None), "layer_types", None)
    if kinds and len(set(kinds)) > 1:
        return None
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 3]
    if not found:
        return None
    layers = max(found, key=lambda m: sum(p.numel() for p in m.parameters()))
    looks = {str([(n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters()]) for layer in layers}
    return (layers, len(layers)) if len(looks) == 1 else None


def record(model: nn.Module, forward: Callable[[nn.Module], Tensor], whole: bool = False) -> Timeline:
    """Run a step without storage.

    Args:
        model: On the meta device; it is not changed.
        forward: From such a model to the loss; tensors that it makes have no storage either.
        whole: Run all layers also if they are alike.

    Returns:
        The events of forward and backward, without weights, state and the optimizer's step. What the forward pass makes
        before its last layer ends counts as activations, from there to the backward pass of that layer as logits, and
        what the backward pass makes as transient until it is known to be a gradient.
    """
    model = copy.deepcopy(model)
    repeated = None if whole else _layers(model)
    repeats = 0
    if repeated is not None:
        layers, count = repeated
        del layers[3:]
        repeats = count - 3
    else:
        found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 0]
        layers = max(found, key=lambda m: sum(p.numel() for p in m.parameters()), default=nn.ModuleList())
    parts: list[tuple[str, list[Event]]] = []
    with _fake() as ledger:
        _without_storage(model)
        model.train()
        phase = "forward"

        def cut(following: str) -> None:
            nonlocal phase
            parts.append((phase, ledger.take()))
            phase = following
            ledger.category = {"forward": "activations", "loss": "logits", "backward": "transient"}[following]

        def watch(layer: nn.Module, is_first: bool, is_last: bool) -> None:
            def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
                if phase == "forward":  # not in a second forward pass of checkpointing
                    cut("forward")
                    if is_first and isinstance(args[0], Tensor) and args[0].requires_grad:
                        args[0].register_hook(lambda _: cut("backward"))  # type: ignore[no-untyped-call]

            def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                if phase == "forward":
                    tensor = output[0] if isinstance(output, tuple) else output
                    tensor.register_hook(lambda _: cut("backward"))
                    if is_last:
                        cut("loss")

            layer.register_forward_pre_hook(begin)
            layer.register_forward_hook(end)

        for position, layer in enumerate(layers):
            watch(layer, position == 0, position == len(layers) - 1)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda parameter, name=name: ledger.move(parameter.grad, "gradients", name)
                )
        ledger.take()
        ledger.category = "activations"
        loss = forward(model)
        if phase == "forward":
            cut("loss")
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        parts.append((phase, ledger.take()))
    if repeats:  # forward: before, three layers; loss; backward: of the loss is "loss", three layers, before
        assert len(parts) == 9, len(parts)
        parts[2:3] = parts[2:3] * (repeats + 1)
        parts[-3:-2] = parts[-3:-2] * (repeats + 1)
    return Timeline(parts)


@dataclass(frozen=True)
class Stored:
    """What is there throughout a step, and what an update needs besides.

    Attributes:
        weights: Bytes of parameters and buffers.
        state: Bytes of the optimizer's state.
        gradients: Bytes of all gradients.
        layer: Bytes of the parameters of the largest part that is gathered at a time if weights are sharded.
        step: Most bytes that the optimizer's step makes and frees.
        updates: The same for the update of one parameter, by name.
    """

    weights: int
    state: int
    gradients: int
    layer: int
    step: int
    updates: dict[str, int]


def stored(model: nn.Module, build: Callable[[nn.Module], Optimizer], on_gpu: bool) -> Stored:
    """Build a model's optimizer and let it step, without storage.

    Args:
        model: On the meta device; it is not changed.
        build: From such a model to its optimizer.
        on_gpu: Whether optimizers of torch choose as they do on a GPU: all parameters at once.
    """
    model = copy.deepcopy(model)
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with _fake() as ledger:
        _without_storage(model)
        optimizer = build(model)
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        ledger.take()
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.compile = False
            optimizer.step()  # makes the state of all
            _, state = peak_of(ledger.take())
            updates = _updates(optimizer, named, ledger)
            step = max(updates.values(), default=0)
        else:
            for group in optimizer.param_groups:
                if on_gpu and group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
            for _, parameter in named:
                parameter.grad = torch.empty_like(parameter)
            ledger.take()
            optimizer.step()
            _, state = peak_of(ledger.take())
            optimizer.step()
            step, _ = peak_of(ledger.take())
            updates = _updates(optimizer, named, ledger)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    units = [*(layer for layers in lists for layer in layers), *(m for m in model.modules() if not [*m.children()])]
    sizes = [sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in units]
    gradients = sum(p.numel() * p.element_size() for _, p in named)
    return Stored(weights, state, gradients, max(sizes, default=0), step, updates)


def _updates(optimizer: Optimizer, named: list[tuple[str, nn.Parameter]], ledger: _Fake) -> dict[str, int]:
    """Return the most bytes that the update of each parameter makes and frees."""
    names = {id(parameter): name for name, parameter in named}
    found: dict[str, int] = {}
    alike: dict[Any, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            key = (number, parameter.shape, parameter.dtype)
            if key not in alike:
                if isinstance(optimizer, MatrixOptimizer) and parameter.numel() > _BOUNDED_ABOVE:
                    continue
                parameter.grad = torch.empty_like(parameter)
                ledger.take()
                if isinstance(optimizer, MatrixOptimizer):
                    optimizer.step_parameter(number, index)
                else:
                    step_alone(optimizer, group, index)
                alike[key], _ = peak_of(ledger.take())
                parameter.grad = None
            found[names[id(parameter)]] = alike[key]
    most = max(found.values(), default=0)
    return {name: found.get(name, most) for name, _ in named}
