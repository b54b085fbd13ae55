"""SinkGD among its neighbours: closures, schedulers, groups, hooks, odd parameters, and gradients that are unfit."""

import copy
import itertools
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from pumice.optim import SinkGD
from tests.numerics.oracle import normal


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.LayerNorm(8))


def backward(model: nn.Module, seed: int = 0) -> Tensor:
    tokens = torch.randint(20, (5,), generator=torch.Generator().manual_seed(seed))
    loss = (model(tokens) * normal(5, 8, seed=seed)).square().mean()
    loss.backward()
    return loss


def optimizer_of(model: nn.Module, **options: Any) -> SinkGD:
    return SinkGD.from_model(model, **{"lr": 0.01, "compile": False, **options})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def state(optimizer: SinkGD) -> list[Tensor]:
    return [tensor.clone() for values in optimizer.state.values() for _, tensor in sorted(values.items())]


def test_closure_is_called_once_with_gradients_and_its_loss_returned() -> None:
    model, calls = network(), []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        calls.append(backward(model))
        return calls[-1]

    optimizer, before = optimizer_of(model), weights(model)
    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    assert optimizer.step() is None
    assert not torch.equal(weights(model)["1.weight"], before["1.weight"])


@pytest.mark.parametrize("scheduler", [lambda o: LambdaLR(o, lambda s: 0.5**s), lambda o: CosineAnnealingLR(o, 4)])
def test_schedulers_and_tensor_learning_rates(scheduler: Any) -> None:
    results = []
    for lr in (0.1, torch.tensor(0.1)):
        model = network()
        optimizer = optimizer_of(model, lr=lr)
        schedule = scheduler(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            schedule.step()
        results.append(weights(model))
        assert float(optimizer.param_groups[0]["lr"]) < 0.1
    torch.testing.assert_close(results[0], results[1])
    constant = network()
    optimizer = optimizer_of(constant, lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        backward(constant, step)
        optimizer.step()
    assert not torch.allclose(weights(constant)["1.weight"], results[0]["1.weight"])


@pytest.mark.parametrize("form", ["list", "generator", "named generator", "groups", "added later"])
def test_forms_of_parameters(form: str) -> None:
    model, options = network()[1], {"lr": 0.1, "compile": False}
    backward(nn.Sequential(nn.Embedding(20, 8), model, nn.Linear(6, 8)))
    groups = [{"params": (p for p in [model.weight]), "rule": "sinkgd"}, {"params": model.bias}]
    with pytest.warns(UserWarning, match="balances all 1") if "list" in form or "gen" in form else nullcontext():
        if form == "list":
            optimizer = SinkGD(list(model.parameters()), **options)
        elif form == "generator":
            optimizer = SinkGD(model.parameters(), **options)
        elif form == "named generator":
            optimizer = SinkGD(model.named_parameters(), **options)
        elif form == "groups":
            optimizer = SinkGD(groups, **options)
        else:
            optimizer = SinkGD(groups[:1], **options)
            optimizer.add_param_group({**groups[1], "lr": 0.2})
    before = weights(model)
    optimizer.step()
    names = [name for group in optimizer.param_groups for name in group.get("param_names", [])]
    assert names == (["weight", "bias"] if form.startswith("named") else [])
    size = {name: float((tensor - before[name]).abs().mean()) for name, tensor in weights(model).items()}
    assert size["weight"] == pytest.approx(0.1 * 0.05, rel=0.3)
    assert size["bias"] == pytest.approx(0.2 if form == "added later" else 0.1, rel=1e-3)


def test_parameters_without_gradient_get_state_but_do_not_move() -> None:
    """Strict loading of a checkpoint wants an entry for every parameter that can train."""
    model = network()
    model[3].weight.requires_grad_(False)
    optimizer = optimizer_of(model)
    backward(model)
    model[1].weight.grad = None
    before = weights(model)
    optimizer.step()
    after = weights(model)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"1.weight", "3.weight"}
    assert set(optimizer.state) == {p for p in model.parameters() if p.requires_grad}
    assert float(optimizer.state[model[1].weight]["step"]) == 0


@pytest.mark.parametrize("rule", ["sinkgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides_do_not_matter(rule: str, dtype: torch.dtype) -> None:
    weight, gradients = normal(4, 64, 96).to(dtype), [normal(4, 64, 96, seed=i).to(dtype) for i in (1, 2)]
    forms = {
        "plain": lambda t: t.clone(),
        "transposed": lambda t: t.mT.contiguous().mT,
        "batch last": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
        "part of a larger one": lambda t: torch.cat([t, t], -1)[..., :96],
    }
    results = {}
    for (name, of_weight), of_gradient in itertools.product(forms.items(), forms.values()):
        parameter = nn.Parameter(of_weight(weight))
        optimizer = SinkGD([{"params": [parameter], "rule": rule}], 0.1, state_bits=32, compile=False)
        for gradient in gradients:
            parameter.grad = of_gradient(gradient)
            optimizer.step()
        results[name] = parameter.detach()
        assert parameter.stride() == of_weight(weight).stride()
        torch.testing.assert_close(results[name], results["plain"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 32])
def test_adamw_knows_no_transposed_storage(bits: int) -> None:
    results = []
    for transposed in (False, True):
        params = [nn.Parameter(normal(64, 96)), nn.Parameter(normal(96))]
        group = {"params": params, "rule": "adamw", "transposed": transposed}
        optimizer = SinkGD([group], 0.1, state_bits=bits, compile=False)
        for step in range(2):
            for parameter in params:
                parameter.grad = normal(*parameter.shape, seed=step)
            optimizer.step()
        results.append([parameter.detach() for parameter in params])
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3), ()], ids=str)
def test_empty_and_scalar_parameters(shape: tuple[int, ...]) -> None:
    parameter, ordinary = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.ones(3, 3))
    groups = [{"params": [p], "rule": "sinkgd" if p.ndim >= 2 else "adamw"} for p in (parameter, ordinary)]
    optimizer = SinkGD(groups, 0.1, spectral_target="sqrt", negligible_rows=0.1, base_width=4, compile=False)
    for _ in range(2):
        parameter.grad, ordinary.grad = torch.ones(shape), torch.ones(3, 3)
        optimizer.step()
    assert parameter.shape == shape
    assert bool(ordinary.isfinite().all())
    assert bool((parameter < 1).all())


def test_step_hooks_run() -> None:
    model, calls = network(), []
    optimizer = optimizer_of(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    backward(model)
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    model = network()
    optimizer = optimizer_of(model)
    backward(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(g is None if set_to_none else not g.any() for g in gradients)
    before = weights(model)
    optimizer.step()
    unmoved = {name for name, tensor in weights(model).items() if torch.equal(tensor, before[name])}
    assert unmoved == (set(before) if set_to_none else {"1.weight", "3.weight"})  # momentum moves the AdamW part


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2))
    optimizer = optimizer_of(model)
    model(torch.tensor([1, 2])).sum().backward()
    before = weights(model)
    with pytest.raises(
        ValueError, match=r"^SinkGD needs dense gradients, got a sparse one for 0\.weight; set sparse=False"
    ):
        optimizer.step()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)


UNFIT = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias", "4.weight"])
@pytest.mark.parametrize("value", UNFIT)
def test_an_unfit_gradient_is_an_error_that_changes_nothing(name: str, value: float) -> None:
    model, twin = network(), network()
    optimizer, twins = optimizer_of(model), optimizer_of(twin)
    for step in range(3):
        if step == 1:  # the twin does not see this one
            optimizer.zero_grad()
            backward(model, 7)
            model.get_parameter(name).grad.view(-1)[3] = value
            before = weights(model), state(optimizer)
            with pytest.raises(
                FloatingPointError, match=rf"the gradient of {re.escape(name)}, shape .* is not finite \(update 2\)"
            ):
                optimizer.step()
            torch.testing.assert_close((weights(model), state(optimizer)), before, rtol=0, atol=0)
        for one, its_optimizer in ((model, optimizer), (twin, twins)):
            its_optimizer.zero_grad()
            backward(one, step)
            its_optimizer.step()
    torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["0.weight", "1.weight", "1.bias"])
@pytest.mark.parametrize("value", UNFIT)
def test_skip_leaves_that_parameter_alone_counts_and_warns(name: str, value: float) -> None:
    model, twin = network(), network()
    optimizer, twins = optimizer_of(model, nonfinite="skip"), optimizer_of(twin)
    backward(model)
    backward(twin)
    twin.get_parameter(name).grad = None
    model.get_parameter(name).grad.view(-1)[3] = value
    for count in (1, 2):
        with pytest.warns(UserWarning, match=f"the gradient of {re.escape(name)}, .*its update is skipped"):
            optimizer.step()
        twins.step()
        assert optimizer.skipped == {name: count}
    torch.testing.assert_close(weights(model), weights(twin), rtol=0, atol=0)
    assert float(optimizer.state[model.get_parameter(name)]["step"]) == 0


def test_one_unfit_matrix_of_a_stack_does_not_hold_up_the_others() -> None:
    parameters = [nn.Parameter(torch.zeros(4, 3)) for _ in range(3)]
    optimizer = SinkGD([{"params": parameters, "rule": "sinkgd"}], 0.1, nonfinite="skip", compile=False)
    for i, parameter in enumerate(parameters):
        parameter.grad = normal(4, 3, seed=i)
    parameters[1].grad[2, 2] = float("nan")
    with pytest.warns(UserWarning, match="parameter 1 of group 0, shape"):
        optimizer.step()
    assert [bool(parameter.detach().any()) for parameter in parameters] == [True, False, True]


@pytest.mark.parametrize("rule", ["sinkgd", "adamw"])
def test_a_finite_gradient_whose_sums_overflow_is_fit(rule: str) -> None:
    gradient = torch.full((40, 30), 3e38)
    parameter = nn.Parameter(torch.zeros(40, 30))
    parameter.grad = gradient
    SinkGD([{"params": [parameter], "rule": rule}], 0.1, lr_scale=1.0, compile=False).step()
    torch.testing.assert_close(parameter.detach(), torch.full((40, 30), -0.1), rtol=1e-4, atol=0)


def test_a_learning_rate_of_zero_keeps_weights_and_moves_moments() -> None:
    model = network()
    optimizer, before = optimizer_of(model, lr=0.0), weights(model)
    backward(model)
    optimizer.step()
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    assert bool(optimizer.state[model[4].weight]["exp_avg"].any())


def test_a_copy_of_parameters_in_the_groups_is_trained() -> None:
    """accelerate's FSDP2 builds the optimizer first and swaps the parameters afterwards."""
    model = network()
    optimizer = optimizer_of(model)
    new = {id(p): nn.Parameter(p.detach().clone()) for p in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [new[id(p)] for p in group["params"]]
    for i, parameter in enumerate(new.values()):
        parameter.grad = normal(*parameter.shape, seed=i)
    before = copy.deepcopy(list(new.values()))
    optimizer.step()
    assert not any(torch.equal(p, q) for p, q in zip(new.values(), before, strict=True))
    assert set(optimizer.state) == set(new.values())
