"""Ages of blocks whatever happens around them, exact zeros, and layers that are given in other ways."""

import copy
import re
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from pumice.optim import SMET
from pumice.sparse import BlockSparseLinear, Topology, densify, sparsify
from tests.numerics.oracle import normal

COLS, ROWS = 100, 64  # (1, 64): the second block of a row has 36 real entries and 28 of padding


def network(dtype: torch.dtype = torch.float32, block: tuple[int, int] = (1, 64), density: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLS, ROWS), nn.Tanh(), nn.Linear(ROWS, 3)).to(dtype)
    return sparsify(model, density, block, targets="0", keep="random")


def optimizer_of(model: nn.Module, **options: Any) -> SMET:
    return SMET.from_model(model, **{"lr": 0.01, "warmup_steps": 4, "compile": False, **options})


def topology_of(model: nn.Module, **options: Any) -> Topology:
    fixed = {"interval": 3, "drop_fraction": 0.4, "final_drop_fraction": 0.4, "stop": 1.0, "total_steps": 100}
    return Topology(model, **{**fixed, **options})


def backward(model: nn.Module, step: int) -> None:
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    (model(normal(8, COLS, seed=step).to(dtype)) - 1).square().mean().backward()


def train(model: nn.Module, optimizer: Any, topology: Topology | None, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        if topology is not None:
            topology.step(optimizer)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def ages(optimizer: SMET, layer: BlockSparseLinear) -> Tensor:
    """Of each slot at the coming update, found from how far a gradient of one moves a weight without a past."""
    twin_layer, twin = copy.deepcopy((layer, optimizer))
    state = twin.state[twin_layer.values]
    state["exp_avg"].zero_()
    state["exp_avg_sq"].zero_()
    twin.param_groups[0].update(lr=1.0, betas=(0.0, 0.999), eps=1e-12, warmup_steps=0, density_scaling="none")
    before = twin_layer.values.detach().clone()
    twin_layer.values.grad = torch.ones_like(before)
    twin.step()
    moved = (before - twin_layer.values.detach())[:, 0, 0].double()  # √((1 − β2^t) / (1 − β2))
    age: Tensor = (1 - moved.square() * 0.001).log() / torch.tensor(0.999).log()
    return age.round().long()


def test_ages_follow_the_topology() -> None:
    model = network()
    layer, optimizer, topology = model[0], optimizer_of(model), topology_of(model)
    train(model, optimizer, topology, range(7))
    expected = torch.where(layer.birth > 0, 8 - layer.birth, 8)
    assert set(layer.birth.tolist()) == {0, 3, 6}
    assert ages(optimizer, layer).tolist() == expected.tolist()


def test_a_topology_that_begins_later() -> None:
    model = network()
    layer, optimizer = model[0], optimizer_of(model)
    train(model, optimizer, None, range(5))
    train(model, optimizer, topology_of(model), range(5, 9))  # an update after the third of its own steps
    assert set(layer.birth.tolist()) == {0, 3}
    assert ages(optimizer, layer).tolist() == torch.where(layer.birth > 0, 2, 10).tolist()


def test_an_optimizer_that_begins_later() -> None:
    """As where a run is continued without the optimizer's state: all moments are new, whenever their block was born."""
    model = network()
    layer, topology = model[0], topology_of(model)
    train(model, torch.optim.SGD(model.parameters(), 0.01), topology, range(7))
    optimizer = optimizer_of(model)
    train(model, optimizer, topology, range(7, 8))
    assert set(layer.birth.tolist()) == {0, 3, 6}
    assert set(ages(optimizer, layer).tolist()) == {2}
    train(model, optimizer, topology, range(8, 11))  # an update after step 9
    assert ages(optimizer, layer).tolist() == torch.where(layer.birth == 9, 3, 5).tolist()


def test_a_model_of_an_earlier_run_trains_and_moves_as_a_new_one() -> None:
    """Births by the earlier clock would be ages below one for as long, and a grace for as long."""
    model = network()
    train(model, optimizer_of(model), topology_of(model), range(30))
    loaded = network()
    loaded.load_state_dict(model.state_dict())
    assert int(loaded[0].birth.max()) == 30
    results = []
    for births in (True, False):
        twin = copy.deepcopy(loaded)
        if not births:
            twin[0].birth.zero_()
        optimizer, topology = optimizer_of(twin), topology_of(twin)
        train(twin, optimizer, topology, range(8))
        results.append((twin.state_dict(), ages(optimizer, twin[0])))
    assert_same(*results)


def test_steps_without_gradient_do_not_count() -> None:
    model = network()
    layer, optimizer, topology = model[0], optimizer_of(model), topology_of(model)
    for step in range(9):
        backward(model, step)
        if step in (0, 4):
            layer.values.grad = None
        before = layer.values.detach().clone()
        optimizer.step()
        assert torch.equal(before, layer.values) == (step in (0, 4))
        topology.step(optimizer)
    assert float(optimizer.state[layer.values]["step"]) == 7
    found = ages(optimizer, layer)
    assert set(found[layer.birth == 9].tolist()) == {1}
    assert set(found[layer.birth == 6].tolist()) == {4}


def test_layers_frozen_and_unfrozen() -> None:
    model = nn.Sequential(network()[0], nn.Tanh(), BlockSparseLinear(ROWS, 8, torch.arange(4), (1, 64)))
    first, last = model[0], model[2]
    last.values.requires_grad_(False)
    optimizer, topology = optimizer_of(model), topology_of(model, grow="gradient")
    assert len(optimizer.param_groups[0]["params"]) == 1
    optimizer.add_param_group({"params": [("2.values", last.values)], "layers": [last], "rule": "smet", "lr": 0.02})
    train(model, optimizer, topology, range(4))
    assert last.values not in optimizer.state
    assert last.birth.tolist() == [0] * 4
    last.values.requires_grad_(True)
    first.values.requires_grad_(False)
    kept = first.values.detach().clone()
    train(model, optimizer, topology, range(4, 8))
    assert_same(first.values.detach(), kept)
    assert float(optimizer.state[last.values]["step"]) == 4
    assert set(last.birth.tolist()) == {0, 6}
    assert set(first.birth.tolist()) == {0, 3}
    optimizer.param_groups = [optimizer.param_groups[-1]]
    optimizer._layers = {0: last}
    assert ages(optimizer, last).tolist() == torch.where(last.birth == 6, 3, 5).tolist()


def padding(layer: BlockSparseLinear) -> Tensor:
    """The entries of ``values`` that are no entries of the matrix."""
    ones = torch.ones(layer.out_features, layer.in_features)
    real = type(layer).from_dense(ones, torch.arange(layer.grid.blocks), layer.block_shape).values.detach()
    everywhere = torch.cat((real, torch.zeros_like(real[:1])))  # and an empty slot
    return everywhere[layer.ids.long()] == 0


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_and_empty_slots_stay_zero(dtype: torch.dtype, bits: int, compile: bool) -> None:
    model = network(dtype, density=0.75)
    layer = model[0]
    optimizer = optimizer_of(model, state_bits=bits, weight_decay=0.1, compile=compile)
    topology = topology_of(model, final_share=0.5, stop=9, interval=2)
    train(model, optimizer, topology, range(12))
    assert ("exp_avg_scale" in optimizer.state[layer.values]) == (bits == 8)
    assert int((layer.ids == layer.grid.blocks).sum()) > 20
    nothing = padding(layer)
    assert int(nothing.sum()) > 1000
    assert not bool(layer.values.detach()[nothing].any())
    inactive = torch.ones(layer.grid.blocks, dtype=torch.bool)
    inactive[layer.ids[layer.ids < layer.grid.blocks].long()] = False
    weight = nn.functional.pad(densify(model)[0].weight.detach(), (0, 28)).view(-1, 64)
    assert not bool(weight[inactive].any())
    assert bool(weight[~inactive].any(1).all())


def test_eight_bit_second_moments_decay_beside_a_large_one() -> None:
    """A block's largest element is refreshed at each step, and so is the block's scale; the others decay."""
    layer = BlockSparseLinear(64, 64, torch.arange(64), (1, 64), bias=False)
    optimizer = optimizer_of(layer, state_bits=8, betas=(0.0, 0.99), lr=0.0)
    gradient = torch.full((64, 1, 64), 0.5)
    gradient[:, 0, 0] = 1.0
    for step in range(300):
        layer.values.grad = gradient.clone()
        if step:
            layer.values.grad[:, 0, 1:] = 0
        optimizer.step()
    state = optimizer.state[layer.values]
    share = (state["exp_avg_sq"].double() / 255) ** 4 * state["exp_avg_sq_scale"].double().unsqueeze(1)
    expected = 0.01 * 0.25 * 0.99**299
    assert float(share[:, 0, 0].mean()) == pytest.approx(1 - 0.99**300, rel=0.01)
    assert float(share[:, 0, 1:].mean()) == pytest.approx(expected, rel=0.15)


@pytest.mark.filterwarnings("error")
def test_a_model_without_sparse_layers_and_its_experts_are_trained_by_adamw() -> None:
    model = nn.ParameterDict({"experts": nn.Parameter(normal(2, 3, 4)), "vector": nn.Parameter(normal(4))})
    twin = copy.deepcopy(model)
    optimizer = optimizer_of(model, weight_decay=0.1)
    groups = [{"params": [twin["experts"]], "weight_decay": 0.1}, {"params": [twin["vector"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01)
    for step in range(5):
        for one, its in ((model, optimizer), (twin, reference)):
            for parameter in one.values():
                parameter.grad = normal(*parameter.shape, seed=step)
            its.step()
    torch.testing.assert_close(dict(model), dict(twin), rtol=1e-6, atol=1e-6)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    packed = {"params": [model[0].values], "layers": [model[0]], "rule": "smet"}
    return [packed, {"params": [model[0].bias, *model[2].parameters()]}]


@pytest.mark.parametrize("form", ["from_model", "groups", "groups used before", "added later", "generators"])
def test_forms_of_parameters_that_know_the_layers(form: str) -> None:
    results = []
    for chosen in ("from_model", form):
        model = network()
        options, groups = {"lr": 0.01, "compile": False}, groups_of(model)
        if chosen == "from_model":
            optimizer = SMET.from_model(model, **options)
        elif chosen == "added later":
            optimizer = SMET(groups[1:], **options)
            optimizer.add_param_group(groups[0])
        else:
            if chosen == "generators":
                groups = [{**group, "params": (p for p in group["params"])} for group in groups]
            optimizer = SMET(groups, **options)
            if chosen == "groups used before":
                optimizer = SMET(groups, **options)
        train(model, optimizer, topology_of(model), range(7))
        results.append(model.state_dict())
    assert_same(*results)


def test_bare_values_are_trained_by_adamw_with_a_warning_and_no_topology() -> None:
    layer = network()[0]
    with pytest.warns(UserWarning, match=r"layers of 1 parameters .*use SMET\.from_model\(model, lr\)"):
        optimizer = SMET(layer.parameters(), 0.01, compile=False)
    topology = topology_of(layer, interval=1)
    backward(layer, 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"^SMET does not know the layer of these values; make it with SMET"):
        topology.step(optimizer)


def test_wrong_groups() -> None:
    model = network()
    packed, rest = groups_of(model)
    sentence = (
        "^a group has layers if and only if its rule is 'smet', got {} layers with rule '{}'; SMET.from_model makes"
    )
    with pytest.raises(ValueError, match=sentence.format(0, "smet")):
        SMET([{"params": packed["params"], "rule": "smet"}], 0.01)
    with pytest.raises(ValueError, match=sentence.format(1, "adamw")):
        SMET([{**packed, "rule": "adamw"}], 0.01)
    optimizer = SMET([rest], 0.01, compile=False)
    with pytest.raises(ValueError, match=r"^a group of 1 parameters needs as many layers, got 2$"):
        optimizer.add_param_group({**packed, "layers": [model[0], model[0]]})
    with pytest.raises(ValueError, match=r"^rule must be 'smet' or 'adamw', got 'sinkgd'$"):
        optimizer.add_param_group({**packed, "rule": "sinkgd"})
    with pytest.raises(TypeError, match=r"^SMET trains real parameters only, got one of torch\.complex64$"):
        SMET([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    assert len(optimizer.param_groups) == 1


def test_state_of_a_layer_with_other_slots_is_refused_and_changes_nothing() -> None:
    denser, model = network(density=0.75), network()
    theirs, optimizer = optimizer_of(denser), optimizer_of(model)
    train(denser, theirs, None, range(2))
    train(model, optimizer, None, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    sentence = (
        "the state to load has moments of shape (96, 1, 64) for 0.values, whose shape is (64, 1, 64); load it into an "
        "optimizer of the same model, sparse in the same way"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        optimizer.load_state_dict(theirs.state_dict())
    assert_same(optimizer.state_dict()["state"], before["state"])


def test_within_accelerate() -> None:
    """Its wrapper of the optimizer is what the topology is given."""
    accelerator, model, plain = Accelerator(cpu=True), network(), network()
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model))
    topology = topology_of(wrapped)
    for step in range(7):
        optimizer.zero_grad()
        accelerator.backward((wrapped(normal(8, COLS, seed=step)) - 1).square().mean())
        optimizer.step()
        topology.step(optimizer)
    train(plain, optimizer_of(plain), topology_of(plain), range(7))
    assert_same(model.state_dict(), plain.state_dict())
