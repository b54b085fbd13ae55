import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from pumice.optim import SMET, GradientRelease, SinkGD
from pumice.optim.release import of
from pumice.sparse import Topology, sparsify

Make = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sinkgd": lambda model: SinkGD.from_model(model, 0.02, weight_decay=0.1),
    "sinkgd, 32 bits": lambda model: SinkGD.from_model(model, 0.02, state_bits=32, sinkhorn_iters=2),
    "smet": lambda model: SMET.from_model(model, 0.01, state_bits=8, weight_decay=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.1),
    "adamw, foreach": lambda model: torch.optim.AdamW(model.named_parameters(), 0.01, foreach=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
}


class Net(nn.Module):
    """Tied embedding and head, a module used twice, layers alike, one that some steps leave out, and a frozen one."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
        self.shared = nn.Linear(64, 64)
        self.sometimes = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, ids: Tensor, extra: bool = False) -> Tensor:
        x = self.frozen(self.embedding(ids))
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
            x = x + self.shared(x)
        if extra:
            x = x + self.sometimes(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def build(dtype: torch.dtype = torch.float32, reentrant: bool | None = None) -> Net:
    torch.manual_seed(0)
    return Net(reentrant).to(dtype)


def batch(step: int) -> Tensor:
    return torch.randint(96, (4, 16), generator=torch.Generator().manual_seed(step))


def train(model: Net, optimizer: Optimizer, steps: int = 4, scheduled: bool = True) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.5, 1.0, 0.7, 0.1][step])
    for step in range(steps):
        model(batch(step), extra=step % 2 == 1).backward()
        optimizer.step()
        if scheduled:
            scheduler.step()
        optimizer.zero_grad()


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, left), right in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), name


def assert_same_state(one: Optimizer, other: Optimizer) -> None:
    left, right = one.state_dict()["state"], other.state_dict()["state"]
    assert left.keys() == right.keys()
    for number, state in left.items():
        assert state.keys() == right[number].keys()
        for key, value in state.items():
            assert torch.equal(value, right[number][key]), (number, key)


@pytest.mark.parametrize("reentrant", [None, False], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_same_weights_and_state_bit_for_bit(make: Make, dtype: torch.dtype, reentrant: bool | None) -> None:
    ordinary, released = build(dtype, reentrant), build(dtype, reentrant)
    theirs, ours = make(ordinary), make(released)
    GradientRelease(ours)
    train(ordinary, theirs)
    train(released, ours)
    assert not torch.equal(released.head.weight, build(dtype).head.weight)
    assert_same(ordinary, released)
    assert_same_state(theirs, ours)


def test_compiled_as_step_would_be() -> None:
    """Whether to compile is decided by all parameters, not by the one that is updated."""
    ordinary, released = build(), build()
    for model in (ordinary, released):
        optimizer = SinkGD.from_model(model, 0.02, compile=True)
        if model is released:
            GradientRelease(optimizer)
        train(model, optimizer, 2)
    assert_same(ordinary, released)


def test_same_weights_to_rounding_with_a_spectral_target() -> None:
    """step() stacks small equal matrices, and a product of a stack is added up in another order."""
    ordinary, released = build(torch.float64), build(torch.float64)
    for model in (ordinary, released):
        optimizer = SinkGD.from_model(model, 0.02, state_bits=32, spectral_target="sqrt")
        if model is released:
            GradientRelease(optimizer)
        train(model, optimizer)
    for left, right in zip(ordinary.parameters(), released.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


def test_gradients_are_gone_after_backward() -> None:
    model = build()
    optimizer = SinkGD.from_model(model, 0.02)
    GradientRelease(optimizer)
    before = copy.deepcopy(model.state_dict())
    model(batch(0)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.equal(model.shared.weight, before["shared.weight"])
    assert torch.equal(model.sometimes.weight, before["sometimes.weight"])
    assert torch.equal(model.frozen.weight, before["frozen.weight"])


def test_at_most_one_gradient_is_alive() -> None:
    model = build()
    optimizer = SinkGD.from_model(model, 0.02)
    alive = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _: alive.append(sum(p.grad is not None for p in model.parameters()))
            )
    GradientRelease(optimizer)
    model(batch(0)).backward()
    assert set(alive) == {1}


def test_groups_with_rates_of_their_own() -> None:
    def make(model: Net) -> Optimizer:
        groups = [
            {"params": list(model.layers.named_parameters()), "lr": 0.05},
            {"params": list(model.norm.named_parameters()), "lr": 0.0, "weight_decay": 0.3},
            {"params": [("embedding", model.embedding.weight), *model.shared.named_parameters()]},
        ]
        return torch.optim.AdamW(groups, 0.01)

    ordinary, released = build(), build()
    theirs, ours = make(ordinary), make(released)
    GradientRelease(ours)
    train(ordinary, theirs)
    train(released, ours)
    assert_same(ordinary, released)
    assert [group["param_names"] for group in ours.param_groups] == [g["param_names"] for g in theirs.param_groups]


def test_packed_values_and_a_moving_topology() -> None:
    def run(release: bool) -> nn.Module:
        model = build()
        sparsify(model, 0.5, (1, 16), targets=["layers"])
        optimizer = SMET.from_model(model, 0.01, warmup_steps=2)
        topology = Topology(model, 2, 0.3, grow="gradient", grace=0, total_steps=10)
        if release:
            GradientRelease(optimizer)
        for step in range(6):
            model(batch(step)).backward()
            optimizer.step()
            topology.step(optimizer)
            optimizer.zero_grad()
        return model

    ordinary, released = run(False), run(True)
    assert_same(ordinary, released)
    for left, right in zip(ordinary.buffers(), released.buffers(), strict=True):
        assert torch.equal(left, right)


def test_a_second_backward_is_refused_before_it_changes_anything() -> None:
    model = build()
    GradientRelease(SinkGD.from_model(model, 0.02))
    model(batch(0)).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"norm.* got a second gradient before optimizer.step\(\)"):
        model(batch(1)).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_several_backward_passes_over_different_parameters() -> None:
    torch.manual_seed(0)
    ordinary = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    released = copy.deepcopy(ordinary)
    for model in (ordinary, released):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if model is released:
            GradientRelease(optimizer)
        for layer in model:
            layer(torch.ones(8)).sum().backward()
        optimizer.step()
    assert_same(ordinary, released)


def test_reentrant_checkpointing_of_a_shared_module_is_refused() -> None:
    """Its gradient comes in parts, and the first cannot be told from the whole."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    GradientRelease(torch.optim.AdamW(layer.parameters()))
    x = torch.ones(8, requires_grad=True)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use use_reentrant=False"):
        y.sum().backward()


def test_reentrant_checkpointing_of_modules_of_their_own() -> None:
    results = []
    for release in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        optimizer = torch.optim.AdamW(layers.parameters())
        if release:
            GradientRelease(optimizer)
        x = torch.ones(8, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=True)
        x.sum().backward()
        optimizer.step()
        results.append(layers)
    assert_same(*results)


def test_closures_are_refused() -> None:
    optimizer = SinkGD.from_model(build(), 0.02)
    GradientRelease(optimizer)
    for call in (lambda: optimizer.step(lambda: 1.0), lambda: optimizer.step(closure=lambda: 1.0)):
        with pytest.raises(ValueError, match=r"optimizer.step\(\) takes no closure"):
            call()


def test_nonfinite_gradient_error_names_the_parameter() -> None:
    model = build()
    GradientRelease(SinkGD.from_model(model, 0.02))
    model.layers[1][0].weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(FloatingPointError, match=r"layers.1.0.weight.*is not finite.*it was not changed, but"):
        model(batch(0)).backward()


def test_nonfinite_gradient_skipped_as_in_the_ordinary_path() -> None:
    models = []
    for release in (False, True):
        model = build()
        optimizer = SinkGD.from_model(model, 0.02, nonfinite="skip")
        if release:
            GradientRelease(optimizer)
        for layer in (model.layers[1][0].weight, model.norm.bias):
            layer.register_hook(lambda gradient: gradient * torch.nan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(batch(0)).backward()
            optimizer.step()
        assert optimizer.skipped == {"layers.1.0.weight": 1, "norm.bias": 1}
        models.append(model)
    assert_same(*models)


def test_clipping_by_parameter() -> None:
    """Balanced matrices agree with global clipping to rounding; of the others each is clipped by its own norm."""
    ordinary, released = build(), build()
    theirs, ours = SinkGD.from_model(ordinary, 0.02), SinkGD.from_model(released, 0.02)
    release = GradientRelease(ours, clip=0.01, norm=True)
    ordinary(batch(0)).backward()
    total = nn.utils.clip_grad_norm_(ordinary.parameters(), 0.01)
    theirs.step()
    seen: dict[str, Tensor] = {}
    names = {parameter: name for name, parameter in released.named_parameters()}

    def watched(group: int, index: int) -> None:
        parameter = ours.param_groups[group]["params"][index]
        seen[names[parameter]] = parameter.grad.norm()
        original(group, index)

    original = ours.step_parameter
    ours.step_parameter = watched  # type: ignore[method-assign]
    released(batch(0)).backward()
    assert release.grad_norm is None
    ours.step()
    assert release.grad_norm == pytest.approx(float(total), rel=1e-6)
    torch.testing.assert_close(released.layers[0][0].weight, ordinary.layers[0][0].weight, rtol=1e-5, atol=1e-6)
    assert seen["embedding.weight"] == pytest.approx(0.01, rel=1e-4)
    assert seen["layers.0.0.weight"] > 0.011


def test_a_parameter_that_begins_to_train_later_is_updated_by_step() -> None:
    ordinary, released = build(), build()
    for model in (ordinary, released):
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if model is released:
            GradientRelease(optimizer)
        model.frozen.requires_grad_(True)
        train(model, optimizer)
    assert_same(ordinary, released)
    assert not torch.equal(released.frozen.weight, build().frozen.weight)


def test_step_hooks_run_once_a_step() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    GradientRelease(optimizer)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a scheduler that believes it came before the optimizer
        train(model, optimizer, steps=2)
    assert calls == ["pre", "post"] * 2


@pytest.mark.parametrize("make", [OPTIMIZERS["sinkgd"], OPTIMIZERS["adamw"]], ids=["sinkgd", "adamw"])
def test_after_resume_the_weights_move_as_without_it(make: Make) -> None:
    straight, first = build(), build()
    optimizer = make(straight)
    GradientRelease(optimizer)
    train(straight, optimizer, 4)
    optimizer = make(first)
    GradientRelease(optimizer)
    train(first, optimizer, 2)
    weights, state = copy.deepcopy(first.state_dict()), copy.deepcopy(optimizer.state_dict())

    resumed = build()
    resumed.load_state_dict(weights)
    optimizer = make(resumed)
    GradientRelease(optimizer)
    optimizer.load_state_dict(state)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.0, 0.5, 1.0, 0.7, 0.1][step], last_epoch=1)
    for step in (2, 3):
        model_before = resumed.shared.weight.clone()
        resumed(batch(step), extra=step % 2 == 1).backward()
        assert not torch.equal(resumed.shared.weight, model_before)
        optimizer.step()
        scheduler.step()
    assert_same(straight, resumed)


def test_after_removal_gradients_stay() -> None:
    model = build()
    optimizer = SinkGD.from_model(model, 0.02)
    release = GradientRelease(optimizer)
    assert of(optimizer) is release
    release.remove()
    assert of(optimizer) is None
    model(batch(0)).backward()
    assert model.shared.weight.grad is not None
    optimizer.step(lambda: 1.0)


class PerGroup(torch.optim.SGD):
    """Counts steps in its groups, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_optimizers_that_cannot_update_one_parameter_are_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS updates all parameters together"):
        GradientRelease(torch.optim.LBFGS(build().parameters()))
    model = build()
    GradientRelease(PerGroup(model.parameters()))
    with pytest.raises(RuntimeError, match="PerGroup keeps count for a whole group"):
        model(batch(0)).backward()


def test_wrong_calls() -> None:
    optimizer = SinkGD.from_model(build(), 0.02)
    for clip, error, text in ((0, ValueError, r"clip must be in \(0, inf\), got 0"), ("1", TypeError, "a number")):
        with pytest.raises(error, match=text):
            GradientRelease(optimizer, clip=clip)  # type: ignore[arg-type]
    GradientRelease(optimizer)
    with pytest.raises(ValueError, match="released already"):
        GradientRelease(optimizer)


def test_replaced_parameters_are_noticed() -> None:
    model = build()
    optimizer = SinkGD.from_model(model, 0.02)
    GradientRelease(optimizer)
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
    with pytest.raises(RuntimeError, match="parameters were replaced"):
        model(batch(0)).backward()
