"""From dense to block-sparse and back: which layers, which blocks, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from pumice.errors import UserError
from pumice.sparse import BlockSparseLinear, densify, sparsify, summary


class Conv1D(nn.Module):
    """transformers' linear layer stored [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class LM(nn.Module):
    """Two hidden layers and a head that only its module knows to be one."""

    def __init__(self, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(12, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, 12, bias=False)
        self.last = nn.Linear(12, 12)
        if tied:
            self.head.weight = self.tokens.weight

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        return self.last(self.head(self.down(torch.relu(self.up(self.tokens(x))))))


def sparse_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, BlockSparseLinear)]


def two_layers(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))


# --- which layers ----------------------------------------------------------------------------------------------------


def test_default_is_every_linear_layer_but_heads():
    """`last` has as many outputs as the table has rows, `head` is returned by the model."""
    model = LM()
    assert sparsify(model, 0.5, (1, 4)) is model
    assert sparse_names(model) == ["up", "down"]


def test_tied_head_is_left_alone_without_any_getter():
    model = nn.ModuleDict({"tokens": nn.Embedding(5, 4), "head": nn.Linear(4, 5), "up": nn.Linear(4, 8)})
    model["head"].weight = model["tokens"].weight
    assert sparse_names(sparsify(model, 0.5, (1, 2))) == ["up"]


def test_targets_are_expressions_and_may_name_a_head():
    assert sparse_names(sparsify(LM(), 0.5, (1, 4), targets="head|up")) == ["up", "head"]
    assert sparse_names(sparsify(LM(), 0.5, (1, 4), targets=["^down$"])) == ["down"]


def test_a_bare_layer_is_returned_converted():
    dense = nn.Linear(8, 4)
    sparse = sparsify(dense, 1.0, (1, 4))
    assert isinstance(sparse, BlockSparseLinear)
    assert torch.equal(densify(sparse).weight, dense.weight)


# --- which blocks ----------------------------------------------------------------------------------------------------


def test_largest_blocks_stay_by_mean_over_real_entries():
    """Row 0 in blocks of 2: means 1, 3 and, for the short block, 2."""
    model = nn.Sequential(nn.Linear(5, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, -1.0, 6.0, 0.0, -2.0]]))
    densify(sparsify(model, 2 / 3, (1, 2)))
    assert model[0].weight.tolist() == [[0.0, 0.0, 6.0, 0.0, -2.0]]


def test_random_blocks_depend_on_seed_and_name_alone():
    def ids(seed):
        model = sparsify(two_layers(), 0.5, (1, 2), keep="random", seed=seed)
        return [layer.ids.tolist() for layer in (model[0], model[2])]

    first = ids(seed=1)
    torch.manual_seed(99)
    assert ids(seed=1) == first
    assert ids(seed=2) != first
    alone = sparsify(two_layers(7), 0.5, (1, 2), keep="random", seed=1, targets="^2$")
    assert alone[2].ids.tolist() == first[1]


def test_sparsify_leaves_the_global_generator_alone():
    model, state = two_layers(), torch.get_rng_state()
    sparsify(model, 0.5, (1, 2), keep="random")
    assert torch.equal(torch.get_rng_state(), state)


def test_rescale_restores_the_sum_of_squares():
    model = nn.Sequential(nn.Linear(64, 64))
    before = model[0].weight.detach().clone()
    sparsify(model, 0.25, (1, 16), keep="random", rescale=True)
    after = model[0].weight.detach()
    torch.testing.assert_close(after.square().sum(), before.square().sum())
    ratios = (after / before)[after != 0]
    assert ratios.std() < 1e-6
    assert ratios.mean() == pytest.approx(2.0, rel=0.05)  # 0.25^(-1/2)


def test_rescale_of_zeros_stays_zero():
    model = nn.Sequential(nn.Linear(8, 4))
    nn.init.zeros_(model[0].weight)
    assert sparsify(model, 0.5, (1, 4), rescale=True)[0].values.abs().sum() == 0


# --- and back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 1), (1, 4), (3, 3), (6, 2)])
def test_inactive_weights_are_exactly_zero_and_active_ones_exactly_kept(block):
    model, original = two_layers(), two_layers()
    sparsify(model, 0.4, block, targets="0", keep="random")
    ids = set(model[0].ids.tolist())
    densify(model)
    for row in range(6):
        for col in range(8):
            block_id = row // block[0] * -(-8 // block[1]) + col // block[1]
            kept = original[0].weight[row, col].item() if block_id in ids else 0.0
            assert model[0].weight[row, col].item() == kept
    assert torch.equal(model[0].bias, original[0].bias)


def test_densify_gives_the_class_flags_and_outputs_back():
    model = nn.Sequential(Conv1D(6, 8), nn.Linear(6, 4, bias=False)).eval()
    model[0].weight.requires_grad_(False)
    model[1].extra = "kept"
    x = torch.randn(3, 8)
    out = sparsify(model, 0.5, (2, 2))(x)
    assert [tuple(layer.weight.shape) for layer in model] == [(6, 8), (4, 6)]
    assert not model[0].values.requires_grad
    assert model[0].bias.requires_grad
    assert not any(module.training for module in model)
    densify(model)
    assert [type(layer) for layer in model] == [Conv1D, nn.Linear]
    assert [tuple(layer.weight.shape) for layer in model] == [(8, 6), (4, 6)]
    assert [p.requires_grad for p in model.parameters()] == [False, True, True]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight"]
    assert model[1].extra == "kept"
    assert model[1].bias is None
    assert not any(module.training for module in model)
    torch.testing.assert_close(model(x), out)


def test_conv1d_keeps_its_map_at_full_density():
    conv = nn.Sequential(Conv1D(6, 8))
    x = torch.randn(3, 8)
    out = conv(x)
    torch.testing.assert_close(sparsify(conv, 1.0, (4, 4))(x), out)


def test_a_layer_made_by_hand_becomes_an_ordinary_one():
    dense = densify(nn.Sequential(BlockSparseLinear(8, 4, torch.tensor([3]), (1, 4))))
    assert type(dense[0]) is nn.Linear
    assert (dense[0].weight != 0).sum() == 4


def test_state_dict_of_a_sparse_model_loads_into_another_one():
    source = sparsify(two_layers(), 0.5, (1, 2), keep="random", seed=1)
    target = sparsify(two_layers(5), 0.5, (1, 2), keep="random", seed=2)
    assert target[0].ids.tolist() != source[0].ids.tolist()
    target.load_state_dict(source.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(target(x), source(x))


def test_sparse_models_can_be_copied_and_made_on_meta():
    model = copy.deepcopy(sparsify(two_layers(), 0.5, (1, 2)))
    assert torch.equal(densify(model)[0].weight, densify(sparsify(two_layers(), 0.5, (1, 2)))[0].weight)
    with torch.device("meta"):
        planned = sparsify(two_layers(), 0.5, (1, 2))
    assert planned[0].values.shape == (12, 1, 2)
    assert planned[0].values.is_meta
    planned.load_state_dict(sparsify(two_layers(), 0.5, (1, 2)).state_dict(), assign=True)
    assert torch.equal(densify(planned)[0].weight, model[0].weight)


def test_summary_counts_entries():
    model = sparsify(nn.Sequential(nn.Linear(5, 2), nn.Linear(4, 2)), 0.5, (1, 2), targets="0")
    table = summary(model)
    (row,) = table
    assert (row.active, row.blocks, row.rows, row.cols) == (3, 6, 2, 5)
    ids = model[0].ids.tolist()
    assert row.active_entries == sum(1 if block in (2, 5) else 2 for block in ids)
    assert table.density == row.density == row.active_entries / 10 == model[0].density
    lines = str(table).splitlines()
    assert lines[0].split() == ["layer", "matrix", "block", "active", "blocks", "density"]
    assert lines[1].split()[:8] == ["0", "2", "x", "5", "1", "x", "2", "3"]
    assert lines[-1].startswith("1 block-sparse layers, ")


# --- refusals --------------------------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_features, self.out_features = 8, 4
        self.register_buffer("packed", torch.zeros(4, 4, dtype=torch.uint8))


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 4)
        self.lora_A = nn.Linear(8, 2, bias=False)


def shared_weight():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def shared_module():
    layer = nn.Linear(8, 8)
    return nn.Sequential(layer, nn.ReLU(), layer)


def integer_weight():
    model = two_layers()
    model[0].weight = nn.Parameter(torch.zeros(6, 8, dtype=torch.int8), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (two_layers(), {"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        (two_layers(), {"density": 1.01}, r"density must be in \(0, 1\], got 1.01"),
        (
            two_layers(),
            {"block_shape": (1, 7)},
            r"cannot sparsify '2': block \(1, 7\) is larger than the matrix \(4, 6",
        ),
        (two_layers(), {"block_shape": 4}, r"block_shape must be \(rows, columns\) of a block, got 4"),
        (two_layers(), {"targets": "attention"}, "'attention' matches no layer to sparsify"),
        (two_layers(), {"targets": "["}, "not a regular expression"),
        (two_layers(), {"keep": "largest"}, "unknown keep 'largest'; expected one of: magnitude, random"),
        (two_layers(), {"distribution": "erks"}, "did you mean 'erk'"),
        (nn.Sequential(nn.ReLU()), {}, "no linear layer to sparsify"),
        (shared_weight(), {}, "cannot sparsify '0': its weight is shared by '0' and '1'"),
        (shared_module(), {}, "cannot sparsify '0': its weight is shared by '0' and '2'"),
        (LM(tied=True), {"targets": "head"}, "shared by 'tokens' and 'head'"),
        (
            integer_weight(),
            {},
            r"cannot sparsify '0': its weight is Tensor of torch.int8 .* sparsify before quantising",
        ),
        (
            nn.Sequential(Quantised(), nn.Linear(8, 4)),
            {},
            "cannot sparsify '0': Quantised has no floating-point weight",
        ),
        (nn.Sequential(Adapter()), {}, r"cannot sparsify '0.base_layer': '0' is an adapter \(Adapter\) around a layer"),
        (nn.Sequential(Scaled(8, 4)), {}, "cannot sparsify '0': Scaled computes more than a linear layer"),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))),
            {},
            "cannot sparsify '0': its weight is computed from other parameters",
        ),
    ],
)
def test_refusals_name_the_layer_and_change_nothing(model, options, message):
    before = [type(module) for module in model.modules()]
    with pytest.raises(UserError, match=message):
        sparsify(model, **({"density": 0.5, "block_shape": (1, 4)} | options))
    assert [type(module) for module in model.modules()] == before


def test_sparsify_twice_and_densify_of_dense_are_refused():
    model = sparsify(two_layers(), 0.5, (1, 2), targets="2")
    with pytest.raises(UserError, match=r"sparse already \('2' is block-sparse\); call densify first"):
        sparsify(model, 0.5, (1, 2))
    with pytest.raises(UserError, match="no block-sparse layer to densify"):
        densify(two_layers())
