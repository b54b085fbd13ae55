"""Routing on hand-written modules: plain PyTorch, no transformers."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pumice.errors import UserError
from pumice.optim import param_groups, routing
from pumice.optim.table import Routing, Row


class PlainLM(nn.Module):
    """A language model as people write it: token and position tables, a block, an untied head."""

    def __init__(self, vocabulary=11, width=4, context=6, tied=False, head_bias=False):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width)
        self.out = nn.Linear(width, vocabulary, bias=head_bias)
        if tied:
            self.out.weight = self.tokens.weight


class Experts(nn.Module):
    def __init__(self, up, down, bias=None, **marks):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(up))
        self.down = nn.Parameter(torch.zeros(down))
        if bias:
            self.b = nn.Parameter(torch.zeros(bias))
        for name, value in marks.items():
            setattr(self, name, value)


class Bare(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Conv1D(nn.Module):
    """transformers' linear layer stored [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.zeros(nx, nf))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_pretended_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def kinds(model, **kwargs):
    """What each parameter of two or more dimensions is to the table: 'in'/'in, out' with its input size, or a rule."""
    return {row.name: kind(row) for row in routing(model, **kwargs) if len(row.shape) > 1}


def kind(row):
    if row.rule == "sinkgd":
        return ("[in, out]" if row.transposed else "[out, in]", row.input_dim)
    return row.rule if row.decays or row.rule == "frozen" else "adamw, no decay"


# --- groups ------------------------------------------------------------------------------------------------------


def test_groups_cover_each_trainable_parameter_once_with_rule_layout_and_decay():
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(5, 4), "a": nn.Linear(4, 6), "b": Conv1D(nf=3, nx=6), "frozen": nn.Linear(2, 2)}
    )
    model["frozen"].requires_grad_(False)

    groups = param_groups(model, weight_decay=0.1)

    described = [
        ([name for name, _ in g["params"]], g["rule"], g["transposed"], g["weight_decay"], sorted(g)) for g in groups
    ]
    keys = ["params", "rule", "transposed", "weight_decay"]
    assert described == [
        (["a.weight"], "sinkgd", False, 0.1, keys),
        (["b.weight"], "sinkgd", True, 0.1, keys),
        (["tokens.weight"], "adamw", False, 0.1, keys),
        (["a.bias"], "adamw", False, 0.0, keys),
    ]
    named = dict(model.named_parameters())
    assert all(parameter is named[name] for g in groups for name, parameter in g["params"])


def test_groups_are_what_torch_optimizers_accept():
    model = PlainLM()
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=1e-3)
    assert [g["rule"] for g in optimizer.param_groups] == ["sinkgd", "adamw", "adamw"]
    assert optimizer.param_groups[0]["param_names"] == ["up.weight", "down.weight"]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.1, 0.0]


def test_groups_stay_the_same_without_weight_decay():
    groups = param_groups(PlainLM())
    assert [len(g["params"]) for g in groups] == [2, 3, 2]
    assert {g["weight_decay"] for g in groups} == {0.0}


@pytest.mark.parametrize("weight_decay", [-0.1, float("nan"), float("inf")])
def test_weight_decay_is_checked(weight_decay):
    with pytest.raises(UserError, match="weight_decay must be finite and not negative"):
        param_groups(PlainLM(), weight_decay=weight_decay)


def test_only_modules_are_routed():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module to route, got generator"):
        param_groups(PlainLM().parameters())


# --- embeddings and heads ----------------------------------------------------------------------------------------


def test_tables_and_untied_head_of_a_plain_model_go_to_adamw():
    assert kinds(PlainLM()) == {
        "tokens.weight": "adamw",
        "positions.weight": "adamw",
        "up.weight": ("[out, in]", 4),
        "down.weight": ("[out, in]", 7),
        "out.weight": "adamw",
    }


def test_tied_head_is_one_parameter_and_an_embedding():
    table = routing(PlainLM(tied=True))
    assert [row.name for row in table if row.rule == "adamw" and len(row.shape) > 1] == [
        "tokens.weight",
        "positions.weight",
    ]
    assert table["tokens.weight"].reason == "embedding, shared with out.weight"


def test_a_linear_that_happens_to_have_vocabulary_many_outputs_is_a_head_only_as_the_last_one():
    model = PlainLM(vocabulary=7)  # up also has 7 outputs
    assert kinds(model)["up.weight"] == ("[out, in]", 4)
    assert kinds(model)["out.weight"] == "adamw"


def test_outputs_as_many_as_positions_do_not_make_a_head():
    model = nn.Sequential(nn.Embedding(11, 4), nn.Embedding(6, 4), nn.Linear(4, 6))
    assert kinds(model)["2.weight"] == ("[out, in]", 4)


def test_embedding_bag_and_padding_are_embeddings():
    assert kinds(nn.Sequential(nn.EmbeddingBag(5, 4), nn.Embedding(5, 4, padding_idx=0))) == {
        "0.weight": "adamw",
        "1.weight": "adamw",
    }


def test_what_a_module_returns_as_its_embeddings_counts_whatever_its_class():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.hidden, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

        def get_input_embeddings(self):
            return self.first

        def get_output_embeddings(self):
            return self.last

    table = routing(nn.ModuleDict({"inner": Custom()}))
    assert [row.rule for row in table if len(row.shape) > 1] == ["adamw", "sinkgd", "adamw"]
    assert table["inner.first.weight"].reason == "input embedding of Custom"
    assert table["inner.last.weight"].reason == "output head of Custom"


def test_a_getter_that_does_not_apply_is_passed_over():
    class Backbone(nn.Linear):
        def get_input_embeddings(self):
            raise NotImplementedError

        def get_output_embeddings(self):
            return None

    assert kinds(Backbone(3, 4)) == {"weight": ("[out, in]", 3)}


# --- matrices of known modules -----------------------------------------------------------------------------------


def test_two_linears_that_share_a_weight_are_one_balanced_parameter():
    a, b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    b.weight = a.weight
    table = routing(nn.Sequential(a, b))
    assert [(row.name, row.rule, row.reason) for row in table] == [
        ("0.weight", "sinkgd", "matrix of Linear, stored [out, in], shared with 1.weight")
    ]


def test_stacked_projections_of_torch_modules_are_balanced_and_their_bias_matrices_are_not():
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    assert kinds(attention) == {
        "in_proj_weight": ("[out, in]", 4),
        "out_proj.weight": ("[out, in]", 4),
        "bias_k": "adamw, no decay",
        "bias_v": "adamw, no decay",
    }
    assert kinds(nn.MultiheadAttention(4, 2, kdim=3, vdim=5)) == {
        "q_proj_weight": ("[out, in]", 4),
        "k_proj_weight": ("[out, in]", 3),
        "v_proj_weight": ("[out, in]", 5),
        "out_proj.weight": ("[out, in]", 4),
    }
    assert kinds(nn.GRU(3, 4)) == {"weight_ih_l0": ("[out, in]", 3), "weight_hh_l0": ("[out, in]", 4)}


def test_linear_layers_of_other_libraries_are_known_by_their_features():
    class Foreign(nn.Module):
        def __init__(self):
            super().__init__()
            self.in_features, self.out_features = 3, 5
            self.weight = nn.Parameter(torch.zeros(5, 3))
            self.scale = nn.Parameter(torch.zeros(5, 2))

    assert kinds(Foreign()) == {"weight": ("[out, in]", 3), "scale": "adamw"}


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(4, 4, 3),
        nn.Conv1d(4, 4, 3, groups=4),
        nn.Conv2d(3, 4, 2),
        nn.Conv2d(3, 4, 1),
        nn.ConvTranspose1d(3, 4, 2),
    ],
)
def test_convolutions_go_to_adamw_whatever_their_kernel(module):
    table = routing(module)
    assert kind(table["weight"]) == "adamw"
    assert table["weight"].reason == "convolution kernel"


def test_one_row_and_one_column_go_to_adamw():
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 4), Bare(token=(1, 1, 4)))
    assert {row.name: row.reason for row in routing(model) if len(row.shape) > 1} == {
        "0.weight": "one row",
        "1.weight": "one column",
        "2.token": "one row",
    }


def test_bare_parameters_go_to_adamw_and_bias_matrices_without_decay():
    model = Bare(A_log=(8, 4), position_embeddings=(1, 5, 4), q=(4, 2, 2), gate_bias=(2, 4), D=(8,))
    assert {row.name: kind(row) for row in routing(model)} == {
        "A_log": "adamw",
        "position_embeddings": "adamw",
        "q": "adamw",
        "gate_bias": "adamw, no decay",
        "D": "adamw, no decay",
    }
    assert routing(model)["A_log"].reason == "bare parameter of Bare: input axis unknown"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_matrices_without_elements_are_left_to_adamw():
    table = routing(nn.ModuleDict({"rows": nn.Linear(4, 0), "columns": nn.Linear(0, 4)}))
    assert {row.name: (row.rule, row.reason) for row in table if len(row.shape) > 1} == {
        "rows.weight": ("adamw", "no elements"),
        "columns.weight": ("adamw", "no elements"),
    }


# --- experts and routers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        # up fused with a gate: the shapes tell
        (Experts(up=(3, 10, 4), down=(3, 4, 5)), {"up": ("[out, in]", 4), "down": ("[out, in]", 5)}),
        (Experts(up=(3, 4, 10), down=(3, 5, 4)), {"up": ("[in, out]", 4), "down": ("[in, out]", 5)}),
        # no gate: the shapes fit either way, so the mark decides, and [out, in] without it
        (Experts(up=(3, 5, 4), down=(3, 4, 5)), {"up": ("[out, in]", 4), "down": ("[out, in]", 5)}),
        (
            Experts(up=(3, 4, 5), down=(3, 5, 4), is_transposed=True),
            {"up": ("[in, out]", 4), "down": ("[in, out]", 5)},
        ),
        # the mark overrules the shapes
        (
            Experts(up=(3, 4, 10), down=(3, 5, 4), is_transposed=False),
            {"up": ("[out, in]", 10), "down": ("[out, in]", 4)},
        ),
        # a bias by its shape, whatever its name
        (
            Experts(up=(3, 10, 4), down=(3, 4, 5), bias=(3, 10)),
            {"up": ("[out, in]", 4), "down": ("[out, in]", 5), "b": "adamw, no decay"},
        ),
    ],
)
def test_fused_experts_keep_their_own_layout(experts, expected):
    assert kinds(experts) == expected


def test_a_marked_module_holds_experts_whatever_its_class():
    module = Bare(w=(3, 4, 5))
    module.is_transposed = True
    assert kinds(module) == {"w": ("[in, out]", 4)}


class TokenChoiceTopKRouter(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)


class MoEGate(Bare): ...


@pytest.mark.parametrize("router", [TokenChoiceTopKRouter(), MoEGate(weight=(3, 4))])
def test_routers_are_known_by_their_class(router):
    table = routing(nn.ModuleDict({"gate": router}))
    assert {row.reason for row in table if len(row.shape) > 1} == {"router of experts"}


@pytest.mark.parametrize(
    "experts",
    [
        nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)]),
        Experts(up=(3, 10, 4), down=(3, 4, 5)),
    ],
    ids=["side by side", "fused"],
)
@pytest.mark.parametrize("gate", [nn.Linear(4, 3), Bare(weight=(3, 4))], ids=["linear", "bare"])
def test_a_matrix_with_one_row_per_expert_beside_them_is_a_router(experts, gate):
    moe = nn.ModuleDict({"experts": experts, "gate": gate, "shared_up": nn.Linear(4, 6), "mix": nn.Linear(4, 1)})
    table = routing(nn.ModuleDict({"mlp": moe, "elsewhere": nn.Linear(4, 3)}))
    assert table["mlp.gate.weight"].reason == "router of experts"
    assert table["mlp.shared_up.weight"].rule == "sinkgd"
    assert table["elsewhere.weight"].rule == "sinkgd"
    assert all(row.rule == "sinkgd" for row in table if row.name.startswith("mlp.experts"))


def test_a_gate_that_does_not_choose_among_experts_is_a_linear_layer():
    class ForgetGate(nn.Linear): ...

    assert kinds(nn.ModuleDict({"gate": ForgetGate(4, 3)})) == {"gate.weight": ("[out, in]", 4)}


# --- frozen ------------------------------------------------------------------------------------------------------


def test_frozen_parameters_are_listed_but_not_grouped():
    model = PlainLM(tied=True)
    model.tokens.requires_grad_(False)
    model.up.requires_grad_(False)
    table = routing(model)
    assert {row.name for row in table if row.rule == "frozen"} == {"tokens.weight", "up.weight", "up.bias"}
    grouped = [name for g in param_groups(model) for name, _ in g["params"]]
    assert grouped == ["down.weight", "positions.weight", "down.bias"]


def test_a_frozen_model_has_no_groups():
    assert param_groups(PlainLM().requires_grad_(False)) == []


# --- overrides ---------------------------------------------------------------------------------------------------


def test_the_first_override_that_matches_anywhere_in_the_name_wins():
    table = routing(
        PlainLM(), overrides={"^up": "adamw", "up|down": "adamw", r"tokens\.weight$": "sinkgd", "w": "adamw"}
    )
    assert {row.name: (row.rule, row.reason) for row in table if len(row.shape) > 1} == {
        "tokens.weight": ("sinkgd", r"override 'tokens\.weight$'"),
        "positions.weight": ("adamw", "override 'w'"),
        "up.weight": ("adamw", "override '^up'"),
        "down.weight": ("adamw", "override 'up|down'"),
        "out.weight": ("adamw", "override 'w'"),
    }


def test_a_shared_parameter_is_matched_by_each_of_its_names():
    groups = param_groups(PlainLM(tied=True), overrides={"^out": "sinkgd"})
    assert "tokens.weight" in [name for name, _ in groups[0]["params"]]


def test_a_shared_module_is_matched_by_each_of_its_names():
    layer = nn.Linear(4, 3, bias=False)
    model = nn.ModuleDict({"first": layer, "again": layer})
    (row,) = routing(model, overrides={"^again": "adamw"})
    assert (row.name, row.rule) == ("first.weight", "adamw")


def test_an_override_keeps_layout_and_decay():
    model = nn.ModuleDict({"tokens": nn.Embedding(5, 4), "head": Conv1D(nf=5, nx=4), "bare": Bare(bias=(2, 4))})
    model.get_output_embeddings = lambda: model["head"]
    assert routing(model)["head.weight"].rule == "adamw"
    assert kinds(model, overrides={"head": "sinkgd", "bare": "adamw"}) == {
        "tokens.weight": "adamw",
        "head.weight": ("[in, out]", 4),
        "bare.bias": "adamw, no decay",
    }
    assert kinds(model, overrides={"bare": "sinkgd"})["bare.bias"] == ("[out, in]", 4)


def test_an_override_does_not_thaw():
    model = PlainLM()
    model.up.requires_grad_(False)
    assert routing(model, overrides={r"up\.weight": "sinkgd"})["up.weight"].rule == "frozen"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"embedding": "adamw"}, "override 'embedding' matches no parameter"),
        ({"up": "sinkdg"}, "override 'up': unknown rule 'sinkdg'; did you mean 'sinkgd'"),
        ({"up": "frozen"}, "override 'up': unknown rule 'frozen'; expected one of: adamw, sinkgd"),
        ({"up[": "adamw"}, r"override 'up\[' is not a regular expression"),
        ({"up": "sinkgd"}, r"override 'up' gives 'up.bias' of shape \(7,\) to sinkgd, which needs two or more"),
    ],
)
@pytest.mark.parametrize("function", [param_groups, routing])
def test_wrong_overrides_are_refused(function, overrides, message):
    with pytest.raises(UserError, match=message):
        function(PlainLM(), overrides=overrides)


# --- wrappers ----------------------------------------------------------------------------------------------------


def strip(rows, prefix):
    return [replace(row, name=row.name.removeprefix(prefix)) for row in rows]


def test_a_compiled_model_is_routed_alike_under_its_own_names():
    wrapped = routing(torch.compile(PlainLM()))
    assert strip(wrapped, "_orig_mod.") == list(routing(PlainLM()))
    assert wrapped.rows[0].name == "_orig_mod.tokens.weight"


def test_a_replicated_model_is_routed_alike_under_its_own_names(process_group):
    wrapped = routing(nn.parallel.DistributedDataParallel(PlainLM()))
    assert strip(wrapped, "module.") == list(routing(PlainLM()))
    assert wrapped.rows[0].name == "module.tokens.weight"


def test_sharded_parameters_keep_their_global_shape_and_their_module(two_pretended_ranks):
    model = nn.ModuleDict({"experts": Experts(up=(4, 6, 10), down=(4, 5, 6)), "lm": PlainLM()})
    plain = routing(model)
    for module in (model["experts"], model["lm"].up, model["lm"].tokens, model["lm"]):
        fully_shard(module, mesh=dist.init_device_mesh("cpu", (2,)))
    assert model["experts"].up.to_local().shape == (2, 6, 10)
    sharded = routing(model)
    assert [(row.name, row.shape, kind(row), row.bytes) for row in sharded] == [
        (row.name, row.shape, kind(row), row.bytes) for row in plain
    ]
    assert kind(sharded["experts.up"]) == ("[in, out]", 6)


def test_flattened_shards_are_refused(process_group):
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 3)), device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"'_fsdp_wrapped_module._flat_param' .* is a flattened shard .* use FSDP2"):
        param_groups(model)
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.zeros(12))
    with pytest.raises(ValueError, match=r"'0.weight' of Linear is a flattened shard of shape \(12,\)"):
        param_groups(nn.Sequential(layer))


class Dishonest(nn.Module):
    """Lists other parameters than it holds."""

    def __init__(self, listed):
        super().__init__()
        self.a, self.listed = nn.Linear(2, 2, bias=False), listed

    def named_parameters(self, *args, **kwargs):
        yield from [
            (name, self.a.weight if name == "a.weight" else nn.Parameter(torch.zeros(2))) for name in self.listed
        ]


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (["a.weight", "a.weight"], "'a.weight' is listed twice"),
        (["a.weight", "ghost"], "'ghost' is listed by named_parameters"),
        ([], "'a.weight' is trainable but missing"),
    ],
)
def test_parameters_that_are_not_listed_exactly_once_are_an_error(listed, message):
    with pytest.raises(ValueError, match=message):
        param_groups(Dishonest(listed))


# --- the table ---------------------------------------------------------------------------------------------------


def test_the_table_reads_well():
    blocks = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4, bias=False)])
    blocks[2].requires_grad_(False)
    assert str(routing(nn.ModuleDict({"blocks": blocks, "tokens": nn.Embedding(5, 4)}))) == "\n".join(
        [
            "parameter            shape  rule             input  reason",
            "2 x blocks.*.weight  6 x 4  sinkgd           4      matrix of Linear, stored [out, in]",
            "2 x blocks.*.bias    6      adamw, no decay  -      fewer than two dimensions",
            "blocks.2.weight      4 x 6  frozen           -      does not require a gradient",
            "tokens.weight        5 x 4  adamw            -      embedding",
            "",
            "sinkgd: 2 parameters, 48 elements, 0.000 GiB",
            "frozen: 1 parameters, 24 elements, 0.000 GiB",
            "adamw: 3 parameters, 32 elements, 0.000 GiB",
        ]
    )


def test_totals_count_elements_and_bytes_of_each_rule_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 2048, dtype=torch.bfloat16), nn.Linear(2048, 1024, bias=False))
    totals = routing(model).totals
    assert totals == {"sinkgd": (2, 2 * 2**21, 2 * 2**21 + 4 * 2**21), "adamw": (1, 2048, 4096)}


def test_a_row_is_found_by_name():
    row = Row("a", (2, 3), "sinkgd", "because", transposed=True, decays=True, elements=6, bytes=24)
    assert Routing((row,))["a"].input_dim == 2
    with pytest.raises(KeyError, match="b"):
        Routing((row,))["b"]


def test_routing_needs_torch_alone():
    code = (
        "import sys, pumice.optim; sys.exit(any(m in sys.modules for m in ('transformers', 'torchao', 'accelerate')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_embeddings_and_head_are_balanced_on_request_in_a_group_of_their_own():
    options = {"lr_scale": 0.025, "negligible_rows": 0.1}
    hidden, apart, vectors = param_groups(PlainLM(tied=False), 0.1, embeddings=options)
    assert [name for name, _ in apart["params"]] == ["tokens.weight", "positions.weight", "out.weight"]
    assert {key: apart[key] for key in options} == options
    assert (apart["rule"], apart["weight_decay"], vectors["rule"]) == ("sinkgd", 0.1, "adamw")
    assert not options.keys() & hidden.keys()


def test_an_override_takes_a_head_out_of_the_balanced_embeddings():
    table = routing(PlainLM(tied=False), {"^out": "adamw"}, embeddings={})
    assert (table["tokens.weight"].rule, table["out.weight"].rule) == ("sinkgd", "adamw")
    assert table["tokens.weight"].reason == "embedding, balanced"
