"""SinkGD on packed values against a masked dense matrix in float64, scaled row by row and column by column."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pumice.optim import SinkGD
from pumice.sparse import BlockSparseLinear, Topology
from tests.numerics.oracle import normal

ROWS, COLS = 10, 23
BLOCKS = [(1, 1), (1, 4), (3, 5), (4, 4), (10, 23)]


def layer_of(block: tuple[int, int], share: float = 0.4, dtype: torch.dtype = torch.float32) -> BlockSparseLinear:
    torch.manual_seed(1)
    blocks = math.ceil(ROWS / block[0]) * math.ceil(COLS / block[1])
    ids = torch.randperm(blocks)[: max(1, int(share * blocks))]
    return BlockSparseLinear(COLS, ROWS, ids, block, bias=False, dtype=dtype)


def mask_of(layer: BlockSparseLinear, block: tuple[int, int]) -> Tensor:
    across = math.ceil(COLS / block[1])
    mask = torch.zeros(ROWS, COLS, dtype=torch.bool)
    for i in layer.ids.tolist():
        if i < across * math.ceil(ROWS / block[0]):
            top, left = i // across * block[0], i % across * block[1]
            mask[top : top + block[0], left : left + block[1]] = True
    return mask


def set_gradient(layer: BlockSparseLinear, dense: Tensor) -> None:
    layer.values.grad = None
    layer(torch.eye(COLS, dtype=layer.values.dtype)).backward(dense.t().to(layer.values.dtype))


def balanced(gradient: Tensor, mask: Tensor, iterations: int, factors: Tensor) -> tuple[Tensor, Tensor]:
    x, factors = gradient.double() * mask * factors, factors.clone()
    for _ in range(iterations):
        for i in range(ROWS):
            if float(x[i].norm()) > 0:
                x[i] *= math.sqrt(int(mask[i].sum())) / x[i].norm()
        for j in range(COLS):
            if float(x[:, j].norm()) > 0:
                scale = math.sqrt(int(mask[:, j].sum())) / x[:, j].norm()
                x[:, j] *= scale
                factors[j] *= scale
    return x, factors


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize("block", BLOCKS)
def test_equals_the_masked_dense_matrix_across_updates(block: tuple[int, int], warm: bool, scale: float) -> None:
    layer = layer_of(block)
    iterations = 1 if warm else 3
    optimizer = SinkGD.from_model(
        layer, 0.02, lr_scale=0.5, weight_decay=0.1, sinkhorn_iters=iterations, warm_start=warm, compile=False
    )
    topology = Topology(layer, 3, 0.4, grace=0, stop=1.0, total_steps=12)
    weight, factors = layer.weight.detach().double(), torch.ones(COLS, dtype=torch.float64)
    for step in range(9):
        mask = mask_of(layer, block)
        gradient = scale * normal(ROWS, COLS, seed=step)
        gradient[step % ROWS] = 0
        set_gradient(layer, gradient)
        optimizer.step()
        x, found = balanced(gradient, mask, iterations, factors if warm else torch.ones_like(factors))
        factors = found
        weight = weight * (1 - 0.02 * 0.1) - 0.02 * 0.5 * x
        assert float(x[mask].square().mean().sqrt()) == pytest.approx(
            math.sqrt(float(((x**2).sum(0) > 0).double() @ mask.double().sum(0)) / int(mask.sum())), rel=1e-9
        )
        torch.testing.assert_close(layer.weight.detach().double(), weight, rtol=1e-5, atol=1e-6)
        topology.step(optimizer)
        weight = weight * mask * mask_of(layer, block)
        kept = layer.weight.detach() != 0
        weight = torch.where(kept, weight, 0.0)  # a block that left and came back starts from zero


def test_a_full_layer_is_the_dense_update() -> None:
    for block in ((1, 4), (10, 23), (3, 5)):
        layer = layer_of(block, share=1.0)
        dense = torch.nn.Linear(COLS, ROWS, bias=False)
        dense.weight.data = layer.weight.detach().clone()
        options: dict[str, Any] = {"lr_scale": 1.0, "spectral_target": 1.0, "compile": False}
        ours, theirs = SinkGD.from_model(layer, 0.02, **options), SinkGD.from_model(dense, 0.02, **options)
        for step in range(4):
            gradient = normal(ROWS, COLS, seed=step)
            set_gradient(layer, gradient)
            dense.weight.grad = gradient.clone()
            ours.step()
            theirs.step()
            scale = float(theirs.state[dense.weight]["right_vector"].norm())
            assert scale == pytest.approx(1.0, rel=1e-4)
        # the two start their power iterations from other random vectors
        torch.testing.assert_close(layer.weight, dense.weight, rtol=0, atol=2e-4)


@pytest.mark.parametrize("block", BLOCKS[:4])
def test_spectral_target(block: tuple[int, int]) -> None:
    layer = layer_of(block)
    optimizer = SinkGD.from_model(layer, 1.0, lr_scale=1.0, spectral_target=0.3, sinkhorn_iters=5, compile=False)
    gradient = normal(ROWS, COLS)
    for _ in range(3):
        before = layer.weight.detach().clone()
        set_gradient(layer, gradient)
        optimizer.step()
    update = before - layer.weight.detach()
    assert float(torch.linalg.matrix_norm(update.double(), 2)) == pytest.approx(0.3, rel=0.01)
    assert float(update[~mask_of(layer, block)].abs().max()) == 0


@pytest.mark.parametrize(("warmup", "scaling"), [(4, "none"), (0, "sqrt"), (3, "linear")])
def test_ramp_and_density_scaling(warmup: int, scaling: str) -> None:
    layer, plain = layer_of((1, 4)), layer_of((1, 4))
    options: dict[str, Any] = {"lr_scale": 1.0, "compile": False}
    optimizer = SinkGD.from_model(layer, 0.01, warmup_steps=warmup, density_scaling=scaling, **options)
    reference = SinkGD.from_model(plain, 0.01, **options)
    density = float(mask_of(layer, (1, 4)).double().mean())
    factor = density ** {"none": 0.0, "sqrt": -0.5, "linear": -1.0}[scaling]
    newborn = torch.tensor([2, 5])
    for step in range(8):
        if step == 3:
            with torch.no_grad():
                layer.birth[newborn] = 3
                layer.values[newborn] = 0
                plain.values[newborn] = 0
            optimizer.reset_slots(layer.values, newborn)
        before = layer.values.detach().clone(), plain.values.detach().clone()
        for one, its in ((layer, optimizer), (plain, reference)):
            set_gradient(one, normal(ROWS, COLS, seed=step))
            its.step()
        ages = torch.full((len(layer.ids),), step + 1.0)
        if step >= 3:
            ages[newborn] = step + 1.0 - 3
        ramp = (ages / warmup).clamp(max=1.0) if warmup else torch.ones_like(ages)
        moved, full = layer.values.detach() - before[0], plain.values.detach() - before[1]
        torch.testing.assert_close(moved, full * factor * ramp.view(-1, 1, 1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 4])
def test_many_chunks_are_one_update(warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer above a megabyte goes through in pieces, with one rate for all slots or one for each."""
    updates = []
    for limit in (1 << 20, 64):
        monkeypatch.setattr("pumice.optim.packed.CHUNK_BYTES", limit)
        layer = layer_of((1, 4))
        options: dict[str, Any] = {"lr_scale": 1.0, "spectral_target": 1.0, "compile": False}
        optimizer = SinkGD.from_model(layer, 0.01, warmup_steps=warmup, **options)
        before = layer.values.detach().clone()
        for step in range(3):
            set_gradient(layer, normal(ROWS, COLS, seed=step))
            optimizer.step()
        updates.append(layer.values.detach() - before)
    assert float(updates[0].abs().max()) > 0
    torch.testing.assert_close(updates[1], updates[0], rtol=1e-5, atol=1e-7)


def test_no_support_no_harm() -> None:
    """A gradient of zeros, and one with a single entry, move what they should and leave scales finite."""
    layer = layer_of((1, 4))
    optimizer = SinkGD.from_model(layer, 0.01, lr_scale=1.0, compile=False)
    before = layer.values.detach().clone()
    layer.values.grad = torch.zeros_like(layer.values)
    optimizer.step()
    assert torch.equal(layer.values.detach(), before)
    layer.values.grad[0, 0, 0] = 1e-20
    for _ in range(50):
        optimizer.step()
    assert torch.equal(layer.values.detach()[1:], before[1:])
    assert bool(layer.values.isfinite().all())
    state = optimizer.state[layer.values]["col_scale"]
    assert bool((state > 0).all())
    assert bool(state.isfinite().all())


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_bfloat16_values_are_rounded_without_bias(compile: bool) -> None:
    layer = BlockSparseLinear(64, 256, torch.arange(0, 1024, 2), (1, 16), bias=False, dtype=torch.bfloat16)
    exact = BlockSparseLinear(64, 256, torch.arange(0, 1024, 2), (1, 16), bias=False, dtype=torch.float32)
    for one in (layer, exact):
        with torch.no_grad():
            one.values.fill_(1.0)
    optimizers = [SinkGD.from_model(one, 1e-3, lr_scale=1.0, compile=compile) for one in (layer, exact)]
    for step in range(4):
        gradient = 1 + 0.1 * normal(*layer.values.shape, seed=step)
        for one, optimizer in zip((layer, exact), optimizers, strict=True):
            one.values.grad = gradient.to(one.values.dtype)
            optimizer.step()
    error = (layer.values.float() - exact.values).detach()
    assert float(error.mean().abs()) < 2e-4
    assert float(exact.values.detach().mean()) == pytest.approx(1 - 0.004, abs=2e-4)


def test_an_unfit_gradient_is_named() -> None:
    layer = layer_of((1, 4))
    optimizer = SinkGD.from_model(layer, 0.01, compile=False)
    layer.values.grad = torch.ones_like(layer.values)
    layer.values.grad[3, 0, 1] = float("inf")
    before = layer.values.detach().clone()
    with pytest.raises(FloatingPointError, match="the gradient of values, shape"):
        optimizer.step()
    assert torch.equal(layer.values.detach(), before)
