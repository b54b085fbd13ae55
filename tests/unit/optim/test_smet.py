"""SMET among its neighbours: layers found again, clocks that differ, state that survives, and odd parameters."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pumice.optim import SMET
from pumice.optim.quantised import blocks, decode_unsigned, encode_unsigned, zeros
from pumice.sparse import BlockSparseLinear, Topology, sparsify
from tests.numerics.oracle import normal


def network(dtype: torch.dtype = torch.float32, block: tuple[int, int] = (1, 16)) -> nn.Sequential:
    """Two sparse layers, of which the first is large enough for 8-bit state, and a dense one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 100), nn.Tanh(), nn.Linear(100, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    sparsify(model, 0.5, block, targets="^[02]$")
    return model


def optimizer_of(model: nn.Module, **options: Any) -> SMET:
    return SMET.from_model(model, **{"lr": 0.01, "warmup_steps": 3, "compile": False, **options})


def topology_of(model: nn.Module, **options: Any) -> Topology:
    return Topology(model, 3, 0.3, **{"total_steps": 30, "grace": 1, **options})


def run(model: nn.Module, optimizer: SMET, topology: Topology | None, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = normal(8, 96, seed=step).to(next(model.parameters()).dtype)
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        if topology is not None:
            topology.step(optimizer)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def through_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


KINDS = pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.float32, 32), (torch.bfloat16, 8), (torch.float64, 32)],
    ids=["float32, 32 bits", "bfloat16, 8 bits", "float64, 32 bits"],
)


@KINDS
def test_resumed_training_is_the_same_bit_for_bit(dtype: torch.dtype, bits: int) -> None:
    whole = network(dtype)
    trained = optimizer_of(whole, state_bits=bits), topology_of(whole)
    run(whole, *trained, range(4))
    saved = [through_file(part.state_dict()) for part in (whole, *trained)]
    run(whole, *trained, range(4, 10))

    model = network(dtype)
    parts = model, optimizer_of(model, lr=1.0), topology_of(model)
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    assert_same(parts[1].state_dict()["state"], saved[1]["state"])
    run(*parts, range(4, 10))
    assert_same(model.state_dict(), whole.state_dict())
    assert int((whole[0].birth > 4).sum()) > 0


@pytest.mark.parametrize("way", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_copies_go_the_same_way(way: Callable[[Any], Any]) -> None:
    model = network()
    parts = model, optimizer_of(model), topology_of(model)
    run(*parts, range(4))
    twins = way(parts)
    run(*parts, range(4, 8))
    run(*twins, range(4, 8))
    assert_same(twins[0].state_dict(), model.state_dict())


@KINDS
def test_padding_stays_zero(dtype: torch.dtype, bits: int) -> None:
    """100 columns in blocks of 16 leave 12 columns of padding; later slots are emptied."""
    model = network(dtype)
    topology = topology_of(model, final_share=0.5, stop=1.0)
    run(model, optimizer_of(model, state_bits=bits, weight_decay=0.1), topology, range(30))
    layer = model[2]
    edge = layer.ids % layer.grid.grid_cols == layer.grid.grid_cols - 1
    empty = layer.ids == layer.grid.blocks
    assert int(edge.sum()) > 0
    assert int(empty.sum()) > 0
    assert float(layer.values[edge & ~empty][:, :, 4:].detach().abs().max()) == 0
    assert float(layer.values[empty].detach().abs().max()) == 0


def test_layers_are_found_after_parameters_were_swapped() -> None:
    """As accelerate does with FSDP2: the groups get new parameters, in place, after construction."""
    model, twin = network(), network()
    optimizer, other = optimizer_of(model), optimizer_of(twin)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    swapped = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [swapped[name] for name in group["param_names"]]
    run(model, optimizer, topology_of(model), range(8))
    run(twin, other, topology_of(twin), range(8))
    assert_same(model.state_dict(), twin.state_dict())


def test_groups_serve_twice_and_may_grow() -> None:
    model = network()
    made = optimizer_of(model)
    layers = [model[0], model[2]]
    group = {"params": [layer.values for layer in layers], "layers": layers, "rule": "smet"}
    for _ in range(2):
        optimizer = SMET([group], 0.01, warmup_steps=3, compile=False)
        optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.5})
        assert optimizer._layers == made._layers == {0: layers[0], 1: layers[1]}
        assert "layers" not in optimizer.state_dict()["param_groups"][0]


def test_a_model_without_sparse_layers_is_trained_by_adamw() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    twin = copy.deepcopy(model)
    ours, theirs = optimizer_of(model), torch.optim.AdamW(twin.parameters(), 0.01, weight_decay=0.0, foreach=False)
    for step in range(5):
        for one, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            one(normal(3, 8, seed=step)).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-6, atol=1e-7)


def test_bare_values_are_trained_with_a_warning() -> None:
    model = network()
    with pytest.warns(UserWarning, match=r"does not know the layers of 2 parameters .* use SMET.from_model"):
        optimizer = SMET(model.parameters(), 0.01, compile=False)
    with pytest.raises(ValueError, match=r"does not know the layer of these values; make it with SMET.from_model"):
        run(model, optimizer, topology_of(model), range(3))


def test_a_topology_newer_than_the_optimizer() -> None:
    """Its clock starts from 0 while the optimizer has taken 50 steps: newborn blocks are newborn all the same."""
    model = network()
    optimizer = optimizer_of(model, warmup_steps=10, density_scaling="none", betas=(0.9, 0.99))
    run(model, optimizer, None, range(50))
    run(model, optimizer, topology_of(model), range(50, 53))
    newborn = model[0].birth == 3
    assert int(newborn.sum()) > 0
    before = model[0].values.detach().clone()
    run(model, optimizer, None, range(53, 54))
    moved = (model[0].values.detach() - before).abs()
    torch.testing.assert_close(float(moved[newborn].max()), 0.001, rtol=1e-3, atol=0)  # lr · 1/10
    assert float(moved[~newborn].max()) > 0.004


def test_a_layer_without_gradient_for_some_steps() -> None:
    """Its own count of updates lags behind the clock, and its newborn blocks warm up from their first update."""
    model = network()
    optimizer, topology = optimizer_of(model, warmup_steps=10, density_scaling="none"), topology_of(model)
    for step in range(3):
        model[0].values.grad = torch.ones_like(model[0].values) if step == 0 else None
        model[2].values.grad = torch.ones_like(model[2].values)
        optimizer.step()
        topology.step(optimizer)
    assert int(optimizer.state[model[0].values]["step"]) == 1
    assert int(optimizer.state[model[0].values]["lag"]) == 2
    before = [layer.values.detach().clone() for layer in (model[0], model[2])]
    model[0].values.grad = torch.ones_like(model[0].values)
    optimizer.step()
    for layer, values in zip((model[0], model[2]), before, strict=True):
        moved = (values - layer.values.detach())[layer.birth == 3]
        torch.testing.assert_close(moved, torch.full_like(moved, 0.001), rtol=1e-4, atol=0)


def test_layers_frozen_at_first() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer, topology = optimizer_of(model), topology_of(model)
    before = copy.deepcopy(model[0].state_dict())
    run(model, optimizer, topology, range(4))
    assert_same(model[0].state_dict(), before)
    model[0].values.requires_grad_(True)
    optimizer.add_param_group({"params": [("0.values", model[0].values)], "layers": [model[0]], "rule": "smet"})
    run(model, optimizer, topology, range(4, 9))
    assert not torch.equal(model[0].ids, before["ids"])


def test_one_active_block() -> None:
    layer = BlockSparseLinear(16, 4, torch.tensor([2]), (1, 16))
    optimizer, topology = optimizer_of(layer), Topology(layer, 1, 0.9, total_steps=8, grace=0, stop=1.0)
    seen = set()
    for step in range(6):
        optimizer.zero_grad()
        layer(normal(3, 16, seed=step)).sum().backward()
        optimizer.step()
        topology.step(optimizer)
        seen.add(int(layer.ids))
        assert bool(layer.values.isfinite().all())
    assert len(seen) > 1


def test_clipping_sees_sparse_and_dense_parameters_alike() -> None:
    model = network()
    model(normal(8, 96)).square().mean().backward()
    expected = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) == pytest.approx(float(expected), rel=1e-5)
    clipped = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert float(clipped) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("bits", [32, 8])
def test_an_unfit_gradient(bits: int) -> None:
    model = network()
    optimizer = optimizer_of(model, state_bits=bits)
    run(model, optimizer, None, range(2))
    model[0].values.grad[5, 0, 3] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(FloatingPointError, match=r"the gradient of 0.values, shape \(\d+, 1, 16\), is not finite"):
        optimizer.step()
    assert_same(model.state_dict(), before)
    optimizer.nonfinite = "skip"
    with pytest.warns(UserWarning, match="its update is skipped"):
        optimizer.step()
    assert_same(model.state_dict()["0.values"], before["0.values"])
    assert not torch.equal(model.state_dict()["2.values"], before["2.values"])
    assert optimizer.skipped == {"0.values": 1}


def test_bfloat16_values_are_rounded_without_bias() -> None:
    """An update of 1/1000 of a weight would be lost by rounding to nearest."""
    layer = BlockSparseLinear(64, 512, torch.arange(512), (1, 64), bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.values.fill_(1.0)
    optimizer = optimizer_of(layer, lr=1e-3, warmup_steps=0, density_scaling="none")
    for _ in range(5):
        layer.values.grad = torch.ones_like(layer.values)
        optimizer.step()
    assert float(layer.values.detach().float().mean()) == pytest.approx(1 - 0.005, abs=2e-4)
    still = BlockSparseLinear(64, 512, torch.arange(512), (1, 64), bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        still.values.fill_(1.0)
    nearest = optimizer_of(still, lr=1e-3, warmup_steps=0, density_scaling="none", stochastic_rounding=False)
    still.values.grad = torch.ones_like(still.values)
    nearest.step()
    assert float(still.values.detach().float().mean()) == 1.0


def test_eight_bit_second_moments_decay_beside_a_large_one_that_stays() -> None:
    """To nearest they would stick: a code stands for steps of a hundredth or more, an update moves by a thousandth."""
    codes, scale = blocks(*zeros(torch.zeros(64, 256), signed=False))
    exact, start = torch.full((64, 1, 256), 0.1), torch.full((64, 1, 256), 0.1)
    start[..., 0] = exact[..., 0] = 1.0
    generator = torch.Generator().manual_seed(0)
    encode_unsigned(start, codes, scale, torch.rand(start.shape, generator=generator))
    for _ in range(2000):
        exact = exact * 0.999
        exact[..., 0] = 1.0
        values = decode_unsigned(codes, scale) * 0.999
        values[..., 0] = 1.0
        encode_unsigned(values, codes, scale, torch.rand(values.shape, generator=generator))
    found = decode_unsigned(codes, scale)[..., 1:]
    assert float(found.mean() / exact[..., 1:].mean()) == pytest.approx(1.0, abs=0.02)


def test_make_state_is_what_a_step_makes_also_without_storage() -> None:
    model = network()
    stepped, made = optimizer_of(model, state_bits=8), optimizer_of(model, state_bits=8)
    run(model, stepped, None, range(1))
    made.make_state()
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(96, 100), nn.Tanh(), nn.Linear(100, 16), nn.Tanh(), nn.Linear(16, 3))
    sparsify(bare, 0.5, (1, 16), targets="^[02]$", keep="random")
    planned = optimizer_of(bare, state_bits=8)
    planned.make_state()
    shapes = [
        [{key: (value.shape, value.dtype) for key, value in state.items()} for state in optimizer.state.values()]
        for optimizer in (stepped, made, planned)
    ]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be a whole number of at least 0, got -1"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps must be a whole number"),
        ({"density_scaling": "root"}, ValueError, "density_scaling must be 'sqrt', 'linear' or 'none', got 'root'"),
        ({"state_bits": 4}, ValueError, "state_bits must be 8 or 32, got 4"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be in \[0, 1\), got 1.0"),
        ({"lr": -1.0}, ValueError, "lr must be in"),
        ({"seed": -1}, ValueError, "seed must be a whole number"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite must be 'error' or 'skip'"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optimizer_of(network(), **options)


def test_a_group_must_name_its_layers() -> None:
    model = network()
    with pytest.raises(ValueError, match="has layers if and only if its rule is 'smet', got 0 layers with rule 'smet'"):
        SMET([{"params": [model[0].values], "rule": "smet"}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="got 1 layers with rule 'adamw'"):
            SMET([{"params": [model[0].values], "layers": [model[0]]}])
        with pytest.raises(ValueError, match="a group of 2 parameters needs as many layers, got 1"):
            SMET([{"params": [model[0].values, model[2].values], "layers": [model[0]], "rule": "smet"}])


def test_values_of_another_number_of_slots_are_refused() -> None:
    model = network()
    torch.manual_seed(0)
    other = sparsify(nn.Sequential(nn.Linear(96, 100), nn.Tanh(), nn.Linear(100, 16)), 0.25, (1, 16))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.values"):
        nn.Sequential(*other).load_state_dict({k: v for k, v in model.state_dict().items() if k[0] in "02"})


def test_sparse_gradients_are_refused() -> None:
    layer = BlockSparseLinear(16, 4, torch.tensor([0, 1]), (1, 16))
    optimizer = optimizer_of(layer)
    layer.values.grad = torch.ones(2, 1, 16).to_sparse()
    with pytest.raises(ValueError, match="SMET needs dense gradients, got a sparse one for values"):
        optimizer.step()
