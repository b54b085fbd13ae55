"""Routing: which rule trains which parameter, decided by what its module *is*, not by what it is called.

A parameter takes the first line of this list that fits it. A shared parameter is one parameter, and a line fits it
if it fits any of the places that use it: a head tied to an embedding is an embedding.

1.  fewer than two dimensions → AdamW, no weight decay
2.  embeddings: every ``nn.Embedding``, and whatever a (sub)model returns from ``get_input_embeddings()``, which in
    a vision tower is the patch embedding → AdamW
3.  output heads → AdamW. A head is what a (sub)model returns from ``get_output_embeddings()``; in a transformers
    model with a task on top, each Linear outside the base model with ``config.num_labels`` outputs (``score``,
    ``classifier``, ``qa_outputs``); in any model its last Linear, if it has as many outputs as the first
    ``nn.Embedding`` has rows. Any other head cannot be told from a hidden layer: name it in ``overrides``
4.  routers of experts: the parameters of a module whose class says so (``MixtralTopKRouter``, ``MoEGate``), or of a
    module that stands beside E experts and has a matrix of E rows → AdamW
5.  biases stored as matrices: the parameter is registered under a name with "bias" in it → AdamW, no weight decay
6.  convolutions → AdamW, with a 1 × 1 kernel too: the last two axes, those that SinkGD balances, are not output and
    input there
7.  one row or one column, like a gate of shape (1, d): balanced, its update would be the gradient's sign → AdamW
8.  matrices of linear layers → SinkGD. ``nn.Linear`` and other modules with ``in_features`` and ``out_features``
    store [out, in] (so do LoRA's A and B); transformers' ``Conv1D`` stores [in, out]; ``nn.MultiheadAttention`` and
    ``nn.RNNBase`` stack several matrices along the output axis and are balanced as the one matrix they are stored as
9.  fused experts → SinkGD, each expert a matrix of its own. A module holds fused experts if transformers marks it
    with ``is_transposed``, or if its class name contains "Expert" and its parameters have three dimensions. Without
    the mark they are taken as [E, out, in] unless their shapes rule it out. A matrix [E, out] beside them is a bias
10. packed values of block-sparse layers → SinkGD, as the matrix [out, in] that they are blocks of
11. anything else with two or more dimensions, like Mamba's ``A_log``, class tokens, position tables and LoRA on
    embeddings: a bare parameter does not say which axis is its input, or whether it has one → AdamW

Nothing made here outlives the call but the groups themselves, whose ``params`` are ordinary entries that FSDP2 may
replace.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from pumice.errors import UserError, nearest
from pumice.optim.table import Routing, Row, Rule
from pumice.sparse.linear import BlockSparseLinear

_RULES: tuple[Rule, ...] = ("sinkgd", "adamw")


def param_groups(
    model: nn.Module,
    weight_decay: float = 0.0,
    overrides: Mapping[str, str] | None = None,
    embeddings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Sort the trainable parameters of a model into groups for :class:`pumice.optim.SinkGD`.

    Args:
        model: Any module, wrapped (DistributedDataParallel, torch.compile, PEFT, FSDP2) or not, on any device.
        weight_decay: Decoupled weight decay of the parameters that decay: all but those of fewer than two dimensions
            and biases stored as matrices.
        overrides: Regular expression to rule (``"sinkgd"`` or ``"adamw"``). An expression is searched for
            (``re.search``) in the full parameter names, and in every name of a shared parameter; anchor it with ``^``
            and ``$`` to match whole names. The first that matches wins. Overridden to ``"sinkgd"``, a parameter is
            balanced over its last two axes.
        embeddings: If given, embeddings and output heads (lines 2 and 3) are balanced too, in groups of their own with
            these options of :class:`pumice.optim.SinkGD`.

    Returns:
        Groups, none empty: balanced, balanced and stored as [in, out], embeddings and heads if they are balanced,
        packed values of block-sparse layers (with ``layers``), AdamW, AdamW without decay. Each has ``params`` (list of
        (name, parameter)), ``rule``, ``transposed`` (True: the input dimension is the second last axis; False: the
        last) and ``weight_decay``.

    Raises:
        UserError: An override is not a regular expression, matches no parameter, names an unknown rule, or balances a
            parameter of fewer than two dimensions; or ``weight_decay`` is negative or not finite.
        TypeError: ``model`` is not a module.
        ValueError: A trainable parameter is listed by the model twice or not at all, or is a flattened shard.
    """
    if not (math.isfinite(weight_decay) and weight_decay >= 0):
        raise UserError(f"weight_decay must be finite and not negative, got {weight_decay}")
    groups: dict[tuple[bool, bool, bool, bool, bool], dict[str, Any]] = {}
    assigned = _assign(model, overrides, embeddings is not None)
    packed = {id(module.values): module for module in model.modules() if isinstance(module, BlockSparseLinear)}
    for parameter, row in assigned:
        if row.rule == "frozen":
            continue
        own = embeddings if row.embedding and row.rule == "sinkgd" else None
        layer = packed.get(id(parameter)) if row.rule == "sinkgd" else None
        key = (row.rule == "adamw", layer is not None, own is not None, row.transposed, not row.decays)
        group = groups.setdefault(key, {"params": [], "rule": row.rule, "transposed": row.transposed, **(own or {})})
        group.setdefault("weight_decay", weight_decay if row.decays else 0.0)
        group["params"].append((row.name, parameter))
        if layer is not None:
            group.setdefault("layers", []).append(layer)
    return [groups[key] for key in sorted(groups)]


def routing(
    model: nn.Module, overrides: Mapping[str, str] | None = None, embeddings: Mapping[str, Any] | None = None
) -> Routing:
    """Tell how :func:`param_groups` would sort the parameters of a model, and why.

    Args:
        model: Any module, on any device, the meta device included.
        overrides: As in :func:`param_groups`.
        embeddings: As in :func:`param_groups`.

    Returns:
        A table with one row per parameter, frozen ones included; print it.

    Raises:
        UserError, TypeError, ValueError: As :func:`param_groups`.
    """
    return Routing(tuple(row for _, row in _assign(model, overrides, embeddings is not None)))


class _Use(NamedTuple):
    """One place where a parameter is registered."""

    name: str
    attribute: str
    module: nn.Module


class _Route(NamedTuple):
    rule: Rule
    reason: str
    transposed: bool = False
    decays: bool = True


def _assign(
    model: nn.Module, overrides: Mapping[str, str] | None, balance_embeddings: bool
) -> list[tuple[nn.Parameter, Row]]:
    """Route each distinct parameter, in the model's order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to route, got {type(model).__name__}")
    uses = _uses(model)
    chosen = _parse(overrides or {}, [use.name for places in uses.values() for use in places])
    special: dict[int, str] = {}
    for module, reason in _special(model):
        for parameter in module.parameters():
            special.setdefault(id(parameter), reason)

    assigned = []
    for name, parameter in _listed_once(model, uses):
        places = uses[id(parameter)]
        kind = special.get(id(parameter), "")
        route = _route(parameter, places, kind)
        embedding = kind not in ("", _ROUTER) and parameter.ndim >= 2
        if not parameter.requires_grad:
            route = _Route("frozen", "does not require a gradient", decays=False)
        elif override := next((o for o in chosen if any(o[0].search(use.name) for use in places)), None):
            route = _overridden(parameter, places, route, override)
        elif embedding and balance_embeddings:
            route = _Route("sinkgd", f"{kind}, balanced", transposed=_route(parameter, places, "").transposed)
        aliases = ", ".join(use.name for use in places if use.name != name)
        row = Row(
            name=name,
            shape=tuple(parameter.shape),
            rule=route.rule,
            reason=route.reason + (f", shared with {aliases}" if aliases else ""),
            transposed=route.transposed,
            decays=route.decays,
            embedding=embedding,
            elements=parameter.numel(),
            bytes=parameter.numel() * parameter.element_size(),
        )
        assigned.append((parameter, row))
    return assigned


def _uses(model: nn.Module) -> dict[int, list[_Use]]:
    """Every place of every parameter, by id: for use within one call only."""
    uses: dict[int, list[_Use]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                name = f"{path}.{attribute}" if path else attribute
                uses.setdefault(id(parameter), []).append(_Use(name, attribute, module))
    return uses


def _listed_once(model: nn.Module, uses: dict[int, list[_Use]]) -> list[tuple[str, nn.Parameter]]:
    """The model's own list of parameters, after checking that it holds each trainable one once, and whole."""
    listed = list(model.named_parameters())
    seen: set[int] = set()
    for name, parameter in listed:
        if id(parameter) in seen:
            raise ValueError(f"parameter '{name}' is listed twice by the model's named_parameters()")
        if id(parameter) not in uses:
            raise ValueError(f"parameter '{name}' is listed by named_parameters() but registered in no module")
        seen.add(id(parameter))
        _, attribute, module = uses[id(parameter)][0]
        whole = attribute != "weight" or not isinstance(module, nn.Linear | nn.Embedding) or parameter.ndim == 2
        if parameter.requires_grad and (not whole or attribute == "_flat_param"):
            raise ValueError(
                f"parameter '{name}' of {_class(module)} is a flattened shard of shape {tuple(parameter.shape)}, with "
                "no rows and columns to balance; use FSDP2 instead of FSDP1 or DeepSpeed ZeRO-3"
            )
    for key, ((name, attribute, module), *_) in uses.items():
        if key not in seen and getattr(module, attribute).requires_grad:
            raise ValueError(f"parameter '{name}' is trainable but missing from the model's named_parameters()")
    return listed


_Override = tuple[re.Pattern[str], Rule]


def _parse(overrides: Mapping[str, str], names: list[str]) -> list[_Override]:
    chosen: list[_Override] = []
    for expression, wanted in overrides.items():
        rule = next((rule for rule in _RULES if rule == wanted), None)
        if rule is None:
            raise UserError(f"override '{expression}': unknown rule '{wanted}'; {nearest(wanted, _RULES)}")
        try:
            pattern = re.compile(expression)
        except re.error as error:
            raise UserError(f"override '{expression}' is not a regular expression: {error}") from error
        if not any(map(pattern.search, names)):
            raise UserError(f"override '{expression}' matches no parameter; print routing(model) to see the names")
        chosen.append((pattern, rule))
    return chosen


def _overridden(parameter: nn.Parameter, places: list[_Use], route: _Route, override: _Override) -> _Route:
    expression, rule = override[0].pattern, override[1]
    reason = f"override '{expression}'"
    if rule == "adamw":
        return _Route(rule, reason, decays=route.decays)
    if parameter.ndim < 2:
        name, shape = places[0].name, tuple(parameter.shape)
        raise UserError(
            f"override '{expression}' gives '{name}' of shape {shape} to sinkgd, which needs two or more dimensions; "
            "narrow the expression or give it to adamw"
        )
    layout = _route(parameter, places, special="")  # to balance a head does not turn it around
    return _Route(rule, reason, transposed=layout.transposed)


# --- lines 2 to 4: what a parameter is to the model around it -----------------------------------------------------


def _special(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Embeddings, heads and routers, each with what it is."""
    modules = list(model.modules())
    embeddings = [module for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    yield from ((embedding, "embedding") for embedding in embeddings)
    yield from _returned(modules, "get_input_embeddings", "input embedding")
    yield from _returned(modules, "get_output_embeddings", "output head")
    for module in modules:
        yield from ((head, "output head, one row per label") for head in _label_heads(module))
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    if embeddings and linears and linears[-1].out_features == embeddings[0].num_embeddings:
        yield linears[-1], "output head, as many outputs as the embedding has rows"
    for module in modules:
        yield from ((router, _ROUTER) for router in _routers(module))


def _returned(modules: list[nn.Module], getter: str, kind: str) -> Iterator[tuple[nn.Module, str]]:
    for module in modules:
        if callable(get := getattr(module, getter, None)):
            try:
                found = get()
            except (NotImplementedError, AttributeError):  # transformers: a (sub)model without one
                continue
            if isinstance(found, nn.Module):
                yield found, f"{kind} of {_class(getattr(get, '__self__', module))}"  # not of a forwarding wrapper


def _label_heads(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers with one output per label outside the base of a transformers model."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    if isinstance(base, nn.Module) and labels is not None:
        inside = set(base.modules())
        for module in model.modules():
            if isinstance(module, nn.Linear) and module not in inside and module.out_features == labels:
                yield module


_ROUTER = "router of experts"
_ROUTER_CLASS = re.compile(r"Router|(TopK|MoE)\w*Gat(e|ing)$")


def _routers(module: nn.Module) -> Iterator[nn.Module]:
    """The module itself if its class is a router's, and those of its children that choose among experts beside them."""
    if _ROUTER_CLASS.search(_class(module)):
        yield module
    experts = {child: _expert_count(name, child) for name, child in module.named_children()}
    counts = set(experts.values()) - {0}
    for child, count in experts.items():
        own = [p for p in child._parameters.values() if p is not None and p.ndim == 2]
        if not count and any(p.shape[0] in counts for p in own):
            yield child


def _expert_count(name: str, module: nn.Module) -> int:
    """How many experts a module holds, side by side or fused; 0 if none."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and "expert" in (name + _class(module)).lower():
        return len(module)
    return next((int(p.shape[0]) for p in _fused(module)), 0)


# --- lines 1 and 5 to 11: what a module says of its own parameters -------------------------------------------------


def _route(parameter: nn.Parameter, places: list[_Use], special: str) -> _Route:
    """The first line of the list that fits in any of the parameter's places."""
    if parameter.ndim < 2:
        return _Route("adamw", "fewer than two dimensions", decays=False)
    if special:
        return _Route("adamw", special)
    for line in (_packed, _bias, _convolution, _single, _linear, _expert):
        for use in places:
            if route := line(parameter, use):
                return route
    return _Route("adamw", f"bare parameter of {_class(places[0].module)}: input axis unknown")


def _packed(parameter: nn.Parameter, use: _Use) -> _Route | None:
    if not isinstance(use.module, BlockSparseLinear) or use.attribute != "values":
        return None
    return _Route("sinkgd", "packed blocks of BlockSparseLinear, balanced as the matrix that they are part of")


def _bias(parameter: nn.Parameter, use: _Use) -> _Route | None:
    return _Route("adamw", "bias stored as a matrix", decays=False) if "bias" in use.attribute else None


def _convolution(parameter: nn.Parameter, use: _Use) -> _Route | None:
    return _Route("adamw", "convolution kernel") if isinstance(use.module, _ConvNd) else None


def _single(parameter: nn.Parameter, use: _Use) -> _Route | None:
    rows, columns = parameter.shape[-2:]
    if min(rows, columns) > 1:
        return None
    return _Route("adamw", "one row" if rows == 1 else "one column" if columns == 1 else "no elements")


def _linear(parameter: nn.Parameter, use: _Use) -> _Route | None:
    module, shape = use.module, tuple(parameter.shape)
    if shape == (getattr(module, "out_features", None), getattr(module, "in_features", None)):
        return _Route("sinkgd", f"matrix of {_class(module)}, stored [out, in]")
    if shape == (getattr(module, "nx", None), getattr(module, "nf", None)):  # transformers' Conv1D
        return _Route("sinkgd", f"matrix of {_class(module)}, stored [in, out]", transposed=True)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase | nn.RNNCellBase) and parameter.ndim == 2:
        return _Route("sinkgd", f"matrices of {_class(module)}, stacked [out, in]")
    return None


def _expert(parameter: nn.Parameter, use: _Use) -> _Route | None:
    if not (fused := _fused(use.module)):
        return None
    if parameter.ndim == 2 and parameter.shape[0] == fused[0].shape[0]:
        return _Route("adamw", "bias of fused experts", decays=False)
    if parameter.ndim != 3:
        return None
    transposed = getattr(use.module, "is_transposed", None)
    if transposed is None:
        # Up feeds down. Stored [E, in, out] they are (d, k f) and (f, d), with k = 2 where a gate is fused into up. If
        # k = 1, the shapes fit either way, and the usual layout is taken.
        up, down = fused[0].shape, fused[-1].shape
        transposed = up[-2] == down[-1] and up[-1] != down[-2]
    layout = "[E, in, out]" if transposed else "[E, out, in]"
    return _Route("sinkgd", f"fused experts, stored {layout}", transposed=bool(transposed))


def _fused(module: nn.Module) -> list[nn.Parameter]:
    """The matrices of a module of fused experts, in order of declaration; empty for any other module."""
    if "Expert" not in _class(module) and not hasattr(module, "is_transposed"):
        return []
    return [p for p in module._parameters.values() if p is not None and p.ndim == 3]


def _class(module: nn.Module) -> str:
    return type(module).__name__
