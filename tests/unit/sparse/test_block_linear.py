"""The layer as other software meets it: autograd, compilation, casts, checkpoints."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pumice.errors import UserError
from pumice.sparse import BlockSparseLinear

ROWS, COLS = 6, 10


def layer(block=(1, 4), seed=0, **options):
    torch.manual_seed(seed)
    blocks = -(-ROWS // block[0]) * -(-COLS // block[1])
    return BlockSparseLinear(COLS, ROWS, torch.randperm(blocks)[: max(1, blocks // 2)], block, **options)


def dense_twin(sparse):
    dense = nn.Linear(COLS, ROWS, bias=sparse.bias is not None, dtype=sparse.values.dtype)
    dense.load_state_dict({"weight": sparse.weight} | ({"bias": sparse.bias} if sparse.bias is not None else {}))
    return dense


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
def test_any_leading_dimensions(leading):
    sparse = layer()
    x = torch.randn(*leading, COLS, requires_grad=True)
    out = sparse(x)
    assert out.shape == (*leading, ROWS)
    torch.testing.assert_close(out, dense_twin(sparse)(x))
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert sparse.values.grad.shape == sparse.values.shape
    torch.testing.assert_close(sparse.bias.grad, torch.full((ROWS,), float(x.numel() // COLS)))


def test_input_that_is_not_contiguous():
    sparse = layer()
    x = torch.randn(COLS, 3, 2).permute(2, 1, 0)
    torch.testing.assert_close(sparse(x), dense_twin(sparse)(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("block", [(1, 1), (2, 2)])
def test_nothing_dense_is_saved_for_backward(compiled, block):
    """Two layers in a row, so that the second input is an activation: nothing saved has ROWS · COLS elements."""
    model = nn.Sequential(layer(block), nn.ReLU(), nn.Linear(ROWS, COLS), layer(block, seed=1))
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    x = torch.randn(3, COLS, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = run(x)
    own = {model[2].weight.data_ptr()}  # the dense layer keeps its parameter
    assert saved
    assert all(t.numel() < ROWS * COLS for t in saved if t.data_ptr() not in own)
    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_compiled_equals_eager_to_the_bit_and_records_norms():
    results = []
    for compiled in (False, True):
        sparse = layer()
        sparse.record_block_norms = True
        run = torch.compile(sparse, backend="aot_eager", fullgraph=True) if compiled else sparse
        x = torch.linspace(-1, 1, 3 * COLS).view(3, COLS).requires_grad_()
        out = run(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, sparse.values.grad, sparse.bias.grad, sparse.block_norms))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_block_norms_are_summed_over_micro_batches_and_not_doubled_by_checkpointing():
    sparse, total = layer(bias=False), torch.zeros(ROWS * 3)
    sparse.record_block_norms = True
    assert sparse.block_norms is None
    for number in range(2):
        x = torch.randn(4, COLS, generator=torch.Generator().manual_seed(number))
        checkpoint(sparse, x, use_reentrant=False).square().sum().backward()
        gradient = (2 * x @ sparse.weight.detach().T).T @ x
        total += torch.stack([block.square().sum() for row in gradient for block in row.split(4)])
    torch.testing.assert_close(sparse.block_norms, total)
    assert not any("norm" in name for name in sparse.state_dict())
    sparse.record_block_norms = True
    assert sparse.block_norms is None
    sparse.record_block_norms = False
    sparse(x).sum().backward()
    assert sparse.block_norms is None


def test_norms_are_float32_whatever_the_layer_and_the_default_are():
    torch.set_default_dtype(torch.float64)
    try:
        sparse = layer().to(torch.bfloat16)
        sparse.record_block_norms = True
        sparse(torch.ones(2, COLS, dtype=torch.bfloat16)).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert sparse.block_norms.dtype == torch.float32
    assert sparse.block_norms.tolist() == pytest.approx([16.0, 16.0, 8.0] * ROWS)  # every entry of dL/dW is 2


def test_checkpointing_gives_the_same_gradients():
    sparse = layer()
    x = torch.randn(4, COLS, requires_grad=True)
    plain = torch.autograd.grad(sparse(x).square().sum(), [x, *sparse.parameters()])
    again = torch.autograd.grad(checkpoint(sparse, x, use_reentrant=False).square().sum(), [x, *sparse.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_functional_call():
    sparse, other = layer(), layer(seed=1)
    x = torch.randn(3, COLS)
    tensors = dict(other.named_parameters()) | dict(other.named_buffers())
    assert torch.equal(torch.func.functional_call(sparse, tensors, (x,)), other(x))


def test_autocast_computes_in_its_dtype_and_saves_no_cast_copy():
    sparse = layer()
    saved = []
    x = torch.randn(3, COLS, requires_grad=True)
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        out = sparse(x)
        expected = dense_twin(sparse)(x)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert any(tensor.data_ptr() == sparse.values.data_ptr() for tensor in saved)
    out.sum().backward()
    assert x.grad.dtype == sparse.values.grad.dtype == sparse.bias.grad.dtype == torch.float32


def test_autocast_leaves_double_alone():
    sparse = layer(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert sparse(torch.randn(3, COLS, dtype=torch.float64)).dtype == torch.float64


def test_bf16_layer_has_bf16_gradients():
    sparse = layer().to(torch.bfloat16)
    x = torch.randn(3, COLS, dtype=torch.bfloat16)
    assert torch.equal(sparse(x), dense_twin(sparse)(x))
    sparse(x).sum().backward()
    assert sparse.values.grad.dtype == torch.bfloat16


def test_wrong_inputs_are_told():
    sparse = layer()
    with pytest.raises(ValueError, match=r"expected an input of shape \(\.\.\., 10\), got \(5, 6\)"):
        sparse(torch.randn(5, 6))  # 30 numbers would be three rows of 10
    with pytest.raises(TypeError, match=r"layer's dtype, torch\.float32, got torch\.float64"):
        sparse(torch.randn(3, COLS, dtype=torch.float64))


@pytest.mark.parametrize("frozen", ["values", "bias"])
def test_frozen_parameters_get_no_gradient(frozen):
    sparse = layer()
    getattr(sparse, frozen).requires_grad_(False)
    sparse(torch.randn(3, COLS)).sum().backward()
    assert [name for name, p in sparse.named_parameters() if p.grad is None] == [frozen]


def test_weight_is_dense_differentiable_and_read_only():
    sparse = layer()
    sparse.weight.sum().backward()
    assert sparse.weight.shape == (ROWS, COLS)
    assert int(sparse.values.grad.sum()) == round(sparse.density * ROWS * COLS)  # ones at real entries
    with pytest.raises((AttributeError, KeyError)):
        sparse.weight = torch.zeros(ROWS, COLS)


def test_padding_starts_at_zero_and_never_trains():
    sparse = BlockSparseLinear(COLS, ROWS, torch.arange(3), (4, 4))
    optimizer = torch.optim.AdamW(sparse.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        sparse(torch.randn(5, COLS)).square().sum().backward()
        optimizer.step()
    assert sparse.values[2, :, 2:].abs().sum() == 0  # block 2 has columns 8 and 9
    assert sparse.values[2, :, :2].abs().min() > 0


# --- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_ids_and_birth_are_never_cast(cast):
    """2^24 + 1 and 301 are no bfloat16 numbers, and 2^24 + 1 is no float32 number."""
    sparse = layer()
    ids = sparse.ids.clone()
    sparse.birth.fill_(2**24 + 1)
    cast(sparse)
    assert sparse.ids.dtype == sparse.birth.dtype == torch.int32
    assert torch.equal(sparse.ids, ids)
    assert sparse.birth.unique().tolist() == [2**24 + 1]


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip_through_a_file(assign):
    source, target = layer(), layer(seed=3).to(torch.bfloat16)
    source.birth.copy_(torch.arange(len(source.birth)) + 2**24)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert target.ids.dtype == target.birth.dtype == torch.int32
    assert torch.equal(target.ids, source.ids)
    assert torch.equal(target.birth, source.birth)
    assert torch.equal(target.weight, source.weight.to(target.values.dtype))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.update(ids=s["ids"].to(torch.bfloat16)), r"'ids': they are torch\.bfloat16, no longer exact"),
        (lambda s: s.update(birth=s["birth"].float()), r"'birth': they are torch\.float32"),
        (lambda s: s["ids"].fill_(3), "'ids': ids name a block twice"),
        (lambda s: s["ids"].add_(18), "'ids': ids must be from 0 to 17, got"),
    ],
)
def test_spoilt_ids_are_not_loaded(spoil, message):
    state = copy.deepcopy(layer().state_dict())
    spoil(state)
    with pytest.raises(RuntimeError, match=message):
        layer().load_state_dict(state)


def test_integer_ids_of_another_width_are_loaded_as_int32():
    state = layer(seed=1).state_dict()
    target = layer()
    target.load_state_dict(state | {"ids": state["ids"].long()}, assign=True)
    assert target.ids.dtype == torch.int32
    assert torch.equal(target.ids, state["ids"])


def test_deepcopy_is_independent():
    sparse = layer()
    sparse.record_block_norms = True
    twin = copy.deepcopy(sparse)
    with torch.no_grad():
        twin.values.add_(1)
    twin(torch.randn(2, COLS)).sum().backward()
    assert not torch.equal(twin.weight, sparse.weight)
    assert sparse.block_norms is None
    assert twin.block_norms is not None


def test_meta_device_gives_shapes():
    sparse = layer(device="meta")
    assert sparse(torch.empty(3, COLS, device="meta")).shape == (3, ROWS)
    assert "active=9 of 18" in repr(sparse)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([0, 0]), "twice"),
        (torch.tensor([18]), "from 0 to 17, got 18 to 18"),
        (torch.tensor([-1]), "from 0 to 17"),
        (torch.tensor([0.5]), "vector of at least one integer"),
        (torch.tensor([], dtype=torch.int64), "vector of at least one integer"),
    ],
)
def test_ids_are_checked(ids, message):
    with pytest.raises(UserError, match=message):
        BlockSparseLinear(COLS, ROWS, ids, (1, 4))


def test_persistent_metadata_is_eight_bytes_an_active_block_and_a_bit_a_block():
    sparse = layer()
    bits = -(-sparse.grid.blocks // 8)
    assert sum(buffer.numel() * buffer.element_size() for buffer in sparse.buffers()) == 8 * len(sparse.ids) + bits
