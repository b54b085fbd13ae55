"""SMET against an oracle in which every weight of the dense matrix knows whether it is active and how old it is."""

import math

import pytest
import torch
from torch import Tensor, nn

from pumice.optim import SMET
from pumice.sparse import BlockSparseLinear, Topology
from tests.numerics.oracle import normal

ROWS, COLS, SLOTS_OF = 6, 11, {(1, 1): 30, (1, 4): 9, (2, 3): 6, (6, 11): 1}
EXPONENT = {"sqrt": -0.5, "linear": -1.0, "none": 0.0}


class Weight:
    """One entry of the matrix, alive while its block is active."""

    def __init__(self, value: float) -> None:
        self.w, self.m, self.v, self.t = value, 0.0, 0.0, 0

    def step(self, g: float, lr: float, decay: float, betas: tuple[float, float], eps: float, warmup: int) -> None:
        self.w *= 1 - decay
        self.t += 1
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        ramp = min(1.0, self.t / warmup) if warmup else 1.0
        m_hat, v_hat = self.m / (1 - betas[0] ** self.t), self.v / (1 - betas[1] ** self.t)
        self.w -= lr * ramp * m_hat / (math.sqrt(v_hat) + eps)


def entries_of(block_id: int, block: tuple[int, int]) -> list[tuple[int, int]]:
    top, left = block_id // math.ceil(COLS / block[1]) * block[0], block_id % math.ceil(COLS / block[1]) * block[1]
    return [(i, j) for i in range(top, min(top + block[0], ROWS)) for j in range(left, min(left + block[1], COLS))]


def active_entries(layer: BlockSparseLinear, block: tuple[int, int]) -> dict[tuple[int, int], int]:
    blocks = math.ceil(ROWS / block[0]) * math.ceil(COLS / block[1])
    return {entry: i for i in layer.ids.tolist() if i < blocks for entry in entries_of(i, block)}


def sparse_layer(block: tuple[int, int], dtype: torch.dtype = torch.float32) -> BlockSparseLinear:
    torch.manual_seed(0)
    blocks = math.ceil(ROWS / block[0]) * math.ceil(COLS / block[1])
    return BlockSparseLinear(COLS, ROWS, torch.randperm(blocks)[: SLOTS_OF[block]], block, bias=False, dtype=dtype)


def set_gradient(layer: BlockSparseLinear, dense: Tensor) -> None:
    """The packed gradient for a gradient of the dense matrix, by the layer's own backward pass."""
    layer.values.grad = None
    layer(torch.eye(COLS, dtype=layer.values.dtype)).backward(dense.t().to(layer.values.dtype))


@pytest.mark.parametrize("final_share", [1.0, 0.5], ids=["same", "sparser"])
@pytest.mark.parametrize("scaling", EXPONENT)
@pytest.mark.parametrize("block", SLOTS_OF)
def test_every_weight_has_its_own_age(block: tuple[int, int], scaling: str, final_share: float) -> None:
    layer = sparse_layer(block)
    lr, decay, betas, eps, warmup = 0.03, 0.1, (0.7, 0.95), 1e-6, 5
    optimizer = SMET.from_model(
        layer, lr, weight_decay=decay, betas=betas, eps=eps, warmup_steps=warmup, density_scaling=scaling, compile=False
    )
    topology = Topology(layer, 4, 0.4, grace=1, stop=1.0, total_steps=24, final_share=final_share)
    oracle = {(i, j): Weight(layer.weight[i, j].item()) for i, j in active_entries(layer, block)}
    alive = active_entries(layer, block)
    swapped = 0
    for step in range(24):
        gradient = normal(ROWS, COLS, seed=step)
        set_gradient(layer, gradient)
        optimizer.step()
        rate = lr * (len(alive) / (ROWS * COLS)) ** EXPONENT[scaling]
        for (i, j), weight in oracle.items():
            weight.step(float(gradient[i, j]), rate, lr * decay, betas, eps, warmup)
        exact = torch.zeros(ROWS, COLS, dtype=torch.float64)
        for (i, j), weight in oracle.items():
            exact[i, j] = weight.w
        torch.testing.assert_close(layer.weight.detach().double(), exact, rtol=2e-6, atol=1e-6)
        update = topology.step(optimizer)
        if update is not None:
            before, alive = alive, active_entries(layer, block)
            swapped += update.layers[0].grown
            oracle = {e: oracle[e] if before.get(e) == i else Weight(0.0) for e, i in alive.items()}
    assert swapped > 0 or block == (6, 11)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_dense_without_warmup_equals_adamw(dtype: torch.dtype, compile: bool) -> None:
    blocks = 6 * 3
    layer = BlockSparseLinear(COLS, ROWS, torch.randperm(blocks), (1, 4), bias=True, dtype=dtype)
    twin = nn.Linear(COLS, ROWS, dtype=dtype)
    twin.load_state_dict({"weight": layer.weight.detach(), "bias": layer.bias.detach()})
    options = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8}
    ours = SMET.from_model(layer, weight_decay=0.1, warmup_steps=0, compile=compile, **options)
    groups = [{"params": [twin.weight], "weight_decay": 0.1}, {"params": [twin.bias], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, foreach=False, **options)
    for step in range(50):
        x, target = (normal(7, size, seed=2 * step + i).to(dtype) for i, size in enumerate((COLS, ROWS)))
        for model, optimizer in ((layer, ours), (twin, theirs)):
            optimizer.zero_grad()
            ((model(x) - target) ** 2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(layer.weight, twin.weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.bias, twin.bias, rtol=1e-6, atol=1e-6)


def test_first_update_of_a_newborn_block_is_one_ramp_step_of_lr() -> None:
    """AdamW's global count would make it (1−β1)/√(1−β2) ≈ 3.16 times lr at this step."""
    layer = sparse_layer((1, 4))
    optimizer = SMET.from_model(layer, 0.01, warmup_steps=10, density_scaling="none", compile=False)
    topology = Topology(layer, 3000, 0.5, stop=1.0, total_steps=3000, final_drop_fraction=0.5)
    optimizer.param_groups[0]["lr"] = 1e-9
    for _ in range(3000):
        set_gradient(layer, torch.ones(ROWS, COLS))
        optimizer.step()
        topology.step(optimizer)
    newborn = layer.birth > 0
    assert int(newborn.sum()) > 0
    optimizer.param_groups[0]["lr"] = 0.01
    before = layer.values.detach().clone()
    set_gradient(layer, torch.ones(ROWS, COLS))
    optimizer.step()
    moved = (before - layer.values.detach())[layer.values.grad != 0]
    sizes = moved.view(-1)
    is_new = newborn.view(-1, 1, 1).expand_as(layer.values)[layer.values.grad != 0].view(-1)
    torch.testing.assert_close(sizes[is_new], torch.full_like(sizes[is_new], 0.001), rtol=1e-4, atol=0)
    torch.testing.assert_close(sizes[~is_new], torch.full_like(sizes[~is_new], 0.01), rtol=1e-4, atol=0)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("block", [(1, 64), (1, 16), (16, 16), (4, 8)])
def test_eight_bits_stay_near_32(block: tuple[int, int], compile: bool) -> None:
    ids = torch.randperm((128 // block[0]) * (128 // block[1]))[: 64 * 128 // (block[0] * block[1])]
    layers = [BlockSparseLinear(128, 128, ids, block, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    start = layers[0].values.detach().clone()
    optimizers = [
        SMET.from_model(layer, 0.01, betas=(0.9, 0.99), warmup_steps=3, state_bits=bits, compile=compile)
        for layer, bits in zip(layers, (32, 8), strict=True)
    ]
    size, slots = normal(*start.shape, seed=1).exp(), torch.arange(0, len(start), 3)
    for step in range(40):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            layer.values.grad = size * (0.3 + normal(*start.shape, seed=step))
            optimizer.step()
            if step == 19:  # the same slots in both, which a topology that looks at their weights would not choose
                layer.birth[slots] = 20
                layer.values.detach()[slots] = 0
                optimizer.reset_slots(layer.values, slots)
    assert optimizers[1].state[layers[1].values]["exp_avg"].dtype == torch.uint8
    moved, error = layers[0].values.detach() - start, (layers[0].values - layers[1].values).detach()
    assert float(error.norm() / moved.norm()) < 0.05


def test_reset_forgets_eight_bit_moments() -> None:
    layer = BlockSparseLinear(128, 64, torch.arange(128), (1, 64), bias=False)
    optimizer = SMET.from_model(layer, 0.01, state_bits=8, warmup_steps=0, density_scaling="none", compile=False)
    layer.values.grad = normal(128, 1, 64)
    optimizer.step()
    slots = torch.tensor([3, 77])
    with torch.no_grad():
        layer.birth[slots] = 1
        layer.values[slots] = 0
    optimizer.reset_slots(layer.values, slots)
    layer.values.grad = torch.zeros(128, 1, 64)
    before = layer.values.detach().clone()
    optimizer.step()
    moved = (layer.values.detach() - before).abs().amax((1, 2))
    assert moved[slots].tolist() == [0.0, 0.0]
    assert int((moved > 0).sum()) == 126
