import dataclasses
import inspect

import pytest
import torch
from torch import nn

from pumice import methods
from pumice.errors import UserError
from pumice.methods import AdamWOptions, Method, SinkGDOptions, SparseSinkGDOptions
from pumice.optim import SinkGD


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 8))
    model[3].weight.requires_grad_(False)
    return model


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown method 'adam': did you mean 'adamw'\?"):
        methods.get("adam")


def test_a_method_joins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "METHODS", {})
    method = Method("plain", "gradient descent", AdamWOptions, lambda model, lr, decay, options: torch.optim.SGD(model))
    methods.register(method)
    assert methods.get("plain") is method
    with pytest.raises(ValueError, match="'plain' is registered already"):
        methods.register(method)


def test_adamw_decays_matrices_only_and_trains_what_is_trained(model: nn.Module) -> None:
    optimizer = methods.get("adamw").build(model, 0.01, 0.1, AdamWOptions(betas=(0.8, 0.9)))
    assert isinstance(optimizer, torch.optim.AdamW)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {p: 0.1 if p.ndim >= 2 else 0.0 for p in model.parameters() if p.requires_grad}
    assert {(g["lr"], g["betas"], g["eps"]) for g in optimizer.param_groups} == {(0.01, (0.8, 0.9), 1e-8)}


def test_sinkgd_routes_and_takes_its_options(model: nn.Module) -> None:
    options = SinkGDOptions(lr_scale=0.5, sinkhorn_iters=3, seed=9, overrides={"^0": "sinkgd"})
    optimizer = methods.get("sinkgd").build(model, 0.01, 0.1, options)
    assert isinstance(optimizer, SinkGD)
    balanced = {p for group in optimizer.param_groups if group["rule"] == "sinkgd" for p in group["params"]}
    assert balanced == {model[0].weight, model[1].weight}
    group = optimizer.param_groups[0]
    assert (group["lr"], group["lr_scale"], group["sinkhorn_iters"], group["seed"]) == (0.01, 0.5, 3, 9)


def test_options_are_those_of_sinkgd() -> None:
    taken = dict(inspect.signature(SinkGD).parameters) | dict(inspect.signature(SinkGD.from_model).parameters)
    theirs = {name: parameter.default for name, parameter in taken.items()}
    for name in ("params", "model", "options", "lr", "weight_decay", "maximize"):  # another's, or not for training
        theirs.pop(name, None)
    sparse = {field.name: field.default for field in dataclasses.fields(SparseSinkGDOptions)}
    for name in ("warmup_steps", "density_scaling"):  # of packed values
        assert theirs.pop(name) == sparse[name]
    ours = {field.name: field.default for field in dataclasses.fields(SinkGDOptions)}
    assert ours.keys() == theirs.keys()
    left_to_it = {name for name, default in ours.items() if default is None}
    assert {name: theirs[name] for name in ours.keys() - left_to_it} == {n: ours[n] for n in ours.keys() - left_to_it}
