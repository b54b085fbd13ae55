"""Block-sparse layers and topology updates against slow float64 or plain-Python versions of them."""

import math
import random

import pytest
import torch
from torch import nn

from pumice.sparse import BlockSparseLinear
from pumice.sparse.topology import plan_swap

SHAPES = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 4), (5, 7)]
ROWS, COLS = 5, 7


def where(block_id, block):
    """The entries of a block, as (row, column, row in the block, column in the block)."""
    across = math.ceil(COLS / block[1])
    top, left = block_id // across * block[0], block_id % across * block[1]
    return [
        (top + i, left + j, i, j)
        for i in range(block[0])
        for j in range(block[1])
        if top + i < ROWS and left + j < COLS
    ]


def sparse_layer(block, bias=True):
    torch.manual_seed(0)
    blocks = math.ceil(ROWS / block[0]) * math.ceil(COLS / block[1])
    ids = torch.randperm(blocks)[: math.ceil(blocks / 2)]
    return BlockSparseLinear(COLS, ROWS, ids, block, bias, dtype=torch.float64)


def dense_oracle(layer, block):
    weight = torch.zeros(ROWS, COLS, dtype=torch.float64)
    for slot, block_id in enumerate(layer.ids.tolist()):
        for row, col, i, j in where(block_id, block):
            weight[row, col] = layer.values[slot, i, j].item()
    return weight


@pytest.mark.parametrize("block", SHAPES)
def test_forward_and_every_gradient_equal_the_dense_layer(block):
    layer = sparse_layer(block)
    layer.record_block_norms = True
    weight = dense_oracle(layer, block).requires_grad_()
    bias = layer.bias.detach().clone().requires_grad_()
    x = torch.randn(2, 3, COLS, dtype=torch.float64, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    target = torch.randn(2, 3, ROWS, dtype=torch.float64)

    out = layer(x)
    expected = torch.stack([torch.stack([weight @ token + bias for token in row]) for row in twin])
    ((out - target) ** 3).sum().backward()
    ((expected - target) ** 3).sum().backward()

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(layer.bias.grad, bias.grad)
    for slot, block_id in enumerate(layer.ids.tolist()):
        gradient = torch.zeros(block, dtype=torch.float64)
        for row, col, i, j in where(block_id, block):
            gradient[i, j] = weight.grad[row, col]
        torch.testing.assert_close(layer.values.grad[slot], gradient)  # zero in padding
    blocks = math.ceil(ROWS / block[0]) * math.ceil(COLS / block[1])
    norms = [sum(weight.grad[row, col].item() ** 2 for row, col, _, _ in where(b, block)) for b in range(blocks)]
    torch.testing.assert_close(layer.block_norms, torch.tensor(norms, dtype=torch.float32))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block", [(1, 1), (1, 4), (2, 2)])
def test_gradcheck(block, bias):
    layer = sparse_layer(block, bias)
    x = torch.randn(2, COLS, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,)).tanh()

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_a_dense_layer(dtype):
    """No rounding is added on the way: at full density, outputs and gradients are those of nn.Linear to the bit."""
    torch.manual_seed(0)
    dense = nn.Linear(16, 8, dtype=dtype)
    layer = BlockSparseLinear.from_dense(dense.weight.detach(), torch.arange(32), (1, 4), dense.bias.detach())
    x = torch.randn(4, 16, dtype=dtype)
    assert torch.equal(layer(x), dense(x))
    layer(x).square().sum().backward()
    dense(x).square().sum().backward()
    assert torch.equal(layer.values.grad.view(8, 16), dense.weight.grad)
    assert torch.equal(layer.bias.grad, dense.bias.grad)


def swap_oracle(ids, magnitudes, scores, protected, fraction, target):
    """The rule of an update in plain Python: new ids, slot by slot."""
    blocks = len(scores)
    active = [slot for slot, block in enumerate(ids) if block < blocks]
    free = sorted(set(range(blocks)) - set(ids), key=lambda block: (-scores[block], block))
    eligible = sorted((s for s in active if not protected[s]), key=lambda s: (magnitudes[s], ids[s]))
    surplus = min(max(0, len(active) - target), len(eligible))
    swapped = min(math.floor(fraction * (len(active) - surplus) + 0.5), len(eligible) - surplus, len(free))
    dropped = sorted(eligible[: surplus + swapped])
    fresh = sorted(free[:swapped]) + [blocks] * surplus
    return [fresh[dropped.index(slot)] if slot in dropped else block for slot, block in enumerate(ids)]


@pytest.mark.parametrize("density", [0.05, 0.25, 0.5, 0.95, 1.0])
def test_update_rule_at_any_density(density):
    """Scores of few values, so that ties are everywhere; slots in random order, some empty, some protected."""
    draw = random.Random(int(density * 100))
    for blocks in (1, 2, 3, 7, 20, 64):
        for fraction in (0.0, 0.005, 0.2, 0.5, 1.0):
            slots = max(1, round(density * blocks))
            ids = draw.sample(range(blocks), slots)
            if slots > 4:
                ids[1] = blocks
            target = draw.choice([slots, max(1, slots // 2)])
            magnitudes = [draw.choice([0.0, 0.5, 1.0]) for _ in ids]
            scores = [draw.choice([0.0, 0.25, 1.0]) for _ in range(blocks)]
            protected = [draw.random() < 0.3 for _ in ids]
            swap = plan_swap(
                torch.tensor(ids, dtype=torch.int32),
                torch.tensor(magnitudes),
                torch.tensor(scores),
                torch.tensor(protected),
                fraction,
                target,
            )
            after = list(ids)
            for slot, block in zip(swap.slots.tolist(), swap.ids.tolist(), strict=True):
                after[slot] = block
            assert after == swap_oracle(ids, magnitudes, scores, protected, fraction, target)
            held = [block for block in after if block < blocks]
            assert len(set(held)) == len(held)
            assert not set(swap.ids.tolist()) - {blocks} & set(ids)  # neither active nor dropped just now
