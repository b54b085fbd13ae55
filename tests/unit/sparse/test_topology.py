"""Updates by hand, the clock, resuming, and what other parts of training meet."""

import copy
import io
import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from pumice.errors import UserError
from pumice.sparse import BlockSparseLinear, Topology, sparsify
from pumice.sparse.layout import real_entries
from pumice.sparse.sharding import fill_slots, gathered
from pumice.sparse.topology import plan_swap


def table(ids, magnitudes, scores, *, protected=(), fraction=0.5, target=99):
    """New ids of the slots after one update."""
    ids = torch.tensor(ids, dtype=torch.int32)
    shield = torch.zeros(len(ids), dtype=torch.bool)
    shield[list(protected)] = True
    swap = plan_swap(ids, torch.tensor(magnitudes), torch.tensor(scores), shield, fraction, target)
    return ids.index_copy(0, swap.slots, swap.ids.int()).tolist()


# fmt: off
UPDATES = [  # ids, mean |w| and ids afterwards by slot; scores by block
    # half of four: the two least leave slots 1 and 2; of the free 1, 3, 5, 6 the best are 3 and 6
    ([4, 0, 7, 2], [9., 1., 2., 8.], [9., 1., 9., 5., 9., 2., 3., 9.], {}, [4, 3, 6, 2]),
    # a block in its grace stays, the next weakest goes
    ([4, 0, 7, 2], [9., 1., 2., 8.], [9., 1., 9., 5., 9., 2., 3., 9.], {"protected": [1]}, [4, 0, 3, 6]),
    # all but one in their grace
    ([4, 0, 7, 2], [9., 1., 2., 8.], [9., 1., 9., 5., 9., 2., 3., 9.], {"protected": [0, 1, 2]}, [4, 0, 7, 3]),
    # equal weights: the lower id goes, in whichever slot; equal scores: the lower id comes
    ([3, 1, 2], [1., 1., 1.], [0.] * 6, {"fraction": 0.34}, [3, 0, 2]),
    # one free block: one swap, although half of five were to go
    ([0, 1, 2, 3, 5], [5., 4., 1., 2., 3.], [0.] * 6, {}, [0, 1, 4, 3, 5]),
    # full: nothing is free
    ([1, 0, 2], [1., 2., 3.], [1., 2., 3.], {"fraction": 1.0}, [1, 0, 2]),
    # one active block: half of it rounds up to one
    ([2], [1.], [5., 1., 9.], {}, [0]),
    ([2], [1.], [5., 1., 9.], {"fraction": 0.4}, [2]),
    # one block in all
    ([0], [1.], [1.], {"fraction": 1.0}, [0]),
    # no weight is a number: zero magnitude and score
    ([0, 1], [1., float("nan")], [0., 0., float("nan"), 1.], {}, [0, 3]),
    # sparser: three active are one more than wanted; one swap of the remaining two; the last slot is emptied
    ([5, 0, 3], [1., 2., 3.], [1., 2., 3., 4., 5., 6.], {"target": 2}, [4, 6, 3]),
    # an empty slot stays empty
    ([6, 0, 3], [0., 2., 3.], [1., 2., 3., 4., 5., 6.], {}, [6, 5, 3]),
]
# fmt: on


@pytest.mark.parametrize(("before", "magnitudes", "scores", "options", "after"), UPDATES)
def test_hand_worked_updates(before, magnitudes, scores, options, after):
    assert table(before, magnitudes, scores, **options) == after


# --- one layer through several updates -------------------------------------------------------------------------------


def one_layer(values, ids, cols=8, block=(1, 2)):
    layer = BlockSparseLinear(cols, 1, torch.tensor(ids), block, bias=False)
    with torch.no_grad():
        layer.values.copy_(torch.tensor(values).view_as(layer.values))
    return nn.Sequential(layer)


def test_an_update_in_full():
    """Four slots with means 4, 1, 3, 2; half of them swap. Only slots 1 and 3 change, in every respect."""
    model = one_layer([4.0, 4, 1, 1, 3, 3, 2, 2], [7, 2, 0, 5], cols=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    topology = Topology(model, 1, 0.5, total_steps=10, final_drop_fraction=0.5)
    update = topology.step(optimizer)
    layer, state = model[0], optimizer.state[model[0].values]
    assert layer.ids[[0, 2]].tolist() == [7, 0]
    assert set(layer.ids[[1, 3]].tolist()) <= {1, 3, 4, 6}
    assert layer.ids[1] < layer.ids[3]
    assert layer.birth.tolist() == [0, 1, 0, 1]
    assert layer.values.flatten().tolist() == [4, 4, 0, 0, 3, 3, 0, 0]
    for name in ("exp_avg", "exp_avg_sq"):
        assert (state[name].flatten(1).sum(1) != 0).tolist() == [True, False, True, False]
    assert state["step"] == 1
    (change,) = update.layers
    assert (change.layer, change.active, change.dropped, change.grown) == ("0", 4, 2, 2)
    assert change.ever_active == 6 / 8


def test_growth_by_gradient_takes_the_block_with_the_largest_norm():
    """Two micro-batches, of gradients (1, 0) and (−1, 3) for blocks 2 and 3: the sum of squares is 2 and 9."""
    for inputs, grown in (((0, 0, 0, 0, 1.0, 0, 0, 0), 2), ((0, 0, 0, 0, 0, 0, 0, 3.0), 3)):
        model = one_layer([4.0, 4, 1, 1], [0, 1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        topology = Topology(model, 1, 0.5, "gradient", total_steps=10)
        model(torch.tensor([inputs])).sum().backward()
        topology.step(optimizer)
        assert model[0].ids.tolist() == [0, grown]


def test_norms_of_micro_batches_add_up_and_do_not_cancel():
    """Gradients of block 2 are +2 and −2, of block 3 they are +1 and +1: 8 against 2, although the former cancel."""
    model = one_layer([4.0, 4, 1, 1], [0, 1])
    topology = Topology(model, 1, 0.5, "gradient", total_steps=10)
    for sign in (1.0, -1.0):
        model(torch.tensor([[0, 0, 0, 0, 2 * sign, 0, 1.0, 0]])).sum().backward()
    topology.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert model[0].ids.tolist() == [0, 2]


def test_norms_are_recorded_in_the_step_of_an_update_alone():
    model = one_layer([4.0, 4, 1, 1], [0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    topology = Topology(model, 3, 0.5, "gradient", total_steps=10, stop=6)
    recording = []
    for _ in range(8):
        recording.append(model[0].record_block_norms)
        topology.step(optimizer)
    assert recording == [False, False, True, False, False, True, False, False]


def test_layers_without_gradient_are_left_alone_by_gradient_growth_only():
    for grow, moved in (("gradient", False), ("random", True)):
        model = nn.ModuleList([*one_layer([4.0, 4, 1, 1], [0, 1]), *one_layer([4.0, 4, 1, 1], [0, 1])])
        topology = Topology(model, 1, 0.5, grow, total_steps=10)
        model[0](torch.ones(1, 8)).sum().backward()
        update = topology.step(torch.optim.SGD(model.parameters(), lr=0.0))
        assert (model[1].ids.tolist() != [0, 1]) is moved
        assert (model[1].values[1] == 0).all() == moved
        assert [layer.dropped for layer in update.layers] == [1, int(moved)]


def test_frozen_layers_stay_and_get_no_entry():
    model = nn.ModuleList([*one_layer([4.0, 4, 1, 1], [0, 1]), *one_layer([4.0, 4, 1, 1], [0, 1])])
    model[0].values.requires_grad_(False)
    topology = Topology(model, 1, 0.5, "gradient", total_steps=10)
    assert [layer.record_block_norms for layer in model] == [False, True]
    sum(layer(torch.ones(1, 8)).sum() for layer in model).backward()
    update = topology.step(torch.optim.SGD(model[1].parameters(), lr=0.0))
    assert model[0].values.flatten().tolist() == [4, 4, 1, 1]
    assert [layer.layer for layer in update.layers] == ["1"]


def test_short_blocks_are_judged_by_their_real_entries():
    """(1, 193) in blocks of 64: block 3 is one entry of 0.5, more than the mean of 0.25, though less than the sum."""
    model = one_layer([0.25] * 64 + [0.5] + [0.0] * 63, [1, 3], cols=193, block=(1, 64))
    Topology(model, 1, 0.5, total_steps=10).step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert model[0].ids[0] in (0, 2)
    assert model[0].ids[1] == 3
    assert real_entries(model[0].ids, model[0].grid).tolist() == [64, 1]


def train(model, topology, optimizer, first, last):
    updates = []
    for step in range(first, last):
        x = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        updates.append(topology.step(optimizer))
        optimizer.zero_grad()
    return updates


def wide_model(seed=0, density=0.25, cols=150, block=(1, 64)):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(cols, 20), nn.Tanh(), nn.Linear(20, 3))
    return sparsify(model, density, block, targets="0", keep="random", seed=seed)


def test_grace_shields_newborns_for_that_many_updates():
    """lr = 0: newborns stay zero, so they are the weakest, and each is dropped as soon as it may be."""
    for grace, lifetime in ((0, 1), (1, 2), (2, 3)):
        model = one_layer([float(i) for i in range(1, 21)], list(range(10)), cols=80)
        topology = Topology(model, 2, 0.1, total_steps=100, grace=grace, stop=1.0, final_drop_fraction=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        first_born, ages = None, []
        for _ in range(10):
            update = topology.step(optimizer)
            if update and first_born is None:
                first_born = update.step
            ages.append(first_born in model[0].birth.tolist())
        assert sum(ages) == 2 * lifetime  # two steps an update


def test_blocks_of_the_start_have_no_grace():
    model = one_layer([4.0, 4, 1, 1], [0, 1])
    update = Topology(model, 1, 0.5, total_steps=10, grace=5).step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert update.layers[0].dropped == 1


@pytest.mark.parametrize("density", [0.01, 0.25, 0.95, 1.0])
@pytest.mark.parametrize("block", [(1, 64), (1, 1), (16, 16)])
def test_counts_shapes_and_padding_are_kept_at_any_density(density, block):
    model = wide_model(density=density, block=block)
    layer, shape = model[0], model[0].values.shape
    parameter = layer.values
    topology = Topology(model, 1, 0.5, "gradient", total_steps=4, stop=1.0, grace=1)
    updates = train(model, topology, torch.optim.AdamW(model.parameters(), lr=0.01), 0, 4)
    assert layer.values is parameter
    assert layer.values.shape == shape
    assert len(set(layer.ids.tolist())) == shape[0]
    assert 0 <= layer.ids.min() <= layer.ids.max() < layer.grid.blocks
    assert [update.layers[0].active for update in updates] == [shape[0]] * 4
    assert all(update.layers[0].dropped == update.layers[0].grown for update in updates)
    if density == 1.0:
        assert not any(update.layers[0].dropped for update in updates)
    heights, widths = torch.arange(block[0]).view(-1, 1), torch.arange(block[1])
    rows = layer.ids.view(-1, 1, 1) // layer.grid.grid_cols * block[0] + heights
    cols = layer.ids.view(-1, 1, 1) % layer.grid.grid_cols * block[1] + widths
    assert layer.values[(rows >= 20) | (cols >= 150)].abs().sum() == 0


def test_static_never_changes_and_never_records():
    model = wide_model()
    before = model[0].ids.clone()
    topology = Topology(model, 1, grow="static", total_steps=10)
    assert train(model, topology, torch.optim.SGD(model.parameters(), lr=0.01), 0, 5) == [None] * 5
    assert torch.equal(model[0].ids, before)
    assert not model[0].record_block_norms
    assert topology.steps == 5


def test_gradual_densities_empty_slots_for_good():
    """15 slots, of which a third is to be active at the last update, step 4: the cubic gives 9.2, 6.25, 5.2 and 5."""
    model = wide_model()
    slots, shape = model[0].ids.shape[0], model[0].values.shape
    topology = Topology(model, 1, 0.2, total_steps=4, stop=1.0, grace=0, final_share=1 / 3)
    updates = train(model, topology, torch.optim.AdamW(model.parameters(), lr=0.01), 0, 4)
    assert slots == 15
    assert [update.layers[0].active for update in updates] == [9, 6, 5, 5]
    born, alive = updates[1].layers[0].survivors[1]
    assert born == 2
    assert alive <= born  # the six slots that the first update emptied are no survivors
    layer = model[0]
    empty = layer.ids == layer.grid.blocks
    assert layer.values.shape == shape
    assert int(empty.sum()) == 10
    assert layer.values[empty].abs().sum() == 0
    assert layer.density == int(real_entries(layer.ids[~empty], layer.grid).sum()) / 3000
    assert len(set(layer.ids[~empty].tolist())) == 5


# --- the same decisions wherever they are made -----------------------------------------------------------------------


@pytest.mark.parametrize("grow", ["random", "gradient"])
def test_decisions_do_not_depend_on_slots_generators_or_other_layers(grow):
    def grown(shuffle=False, spoil=False):
        torch.manual_seed(0)
        layers = [BlockSparseLinear(20, 4, torch.arange(10), (1, 2), bias=False) for _ in range(1 + spoil)]
        model = nn.ModuleDict(dict(zip(("same", "other"), layers, strict=False)))
        if shuffle:
            order = torch.randperm(10)
            with torch.no_grad():
                layers[0].ids.copy_(layers[0].ids[order])
                layers[0].values.copy_(layers[0].values[order])
        torch.manual_seed(123 if spoil else 0)
        topology = Topology(model, 1, 0.4, grow, total_steps=10, seed=3)
        layers[0](torch.ones(1, 20).cumsum(1)).square().sum().backward()
        topology.step(torch.optim.SGD(model.parameters(), lr=0.0))
        return sorted(layers[0].ids.tolist())

    assert grown() == grown(shuffle=True) == grown(spoil=True)
    assert grown() != list(range(10))


def test_names_are_those_without_wrappers():
    model = wide_model()
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = model
    assert list(Topology(wrapped, 1, total_steps=10).layers) == list(Topology(model, 1, total_steps=10).layers) == ["0"]


@pytest.mark.parametrize("grow", ["random", "gradient"])
@pytest.mark.parametrize("stop_at", [4, 5, 6])
def test_resume_is_bit_for_bit_across_an_update(grow, stop_at):
    """Updates after steps 3, 6 and 9; saved just before one, just after, and in between, in bf16-proof form."""

    def start(seed):
        model = wide_model(seed)
        topology = Topology(model, 3, 0.3, grow, total_steps=12, seed=1)
        return model, topology, torch.optim.AdamW(model.parameters(), lr=0.01)

    whole = start(0)
    expected = train(*whole, 0, 10)

    first = start(0)
    train(*first, 0, stop_at)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first], file)
    file.seek(0)
    second = start(9)
    for part, state in zip(second, torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    assert train(*second, stop_at, 10) == expected[stop_at:]
    for name, tensor in whole[0].state_dict().items():
        assert torch.equal(second[0].state_dict()[name], tensor), name


def test_state_of_other_layers_is_refused():
    state = Topology(wide_model(), 1, total_steps=10).state_dict()
    other = Topology(nn.Sequential(nn.Identity(), *one_layer([1.0, 1], [0])), 1, total_steps=10)
    with pytest.raises(ValueError, match=r"differ in block-sparse layers: \['0', '1'\]"):
        other.load_state_dict(state)


# --- optimizers ------------------------------------------------------------------------------------------------------


class Resetting(torch.optim.SGD):
    def reset_slots(self, parameter, slots):
        self.seen = (parameter, slots.tolist())


class Wrapper:
    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_an_optimizer_that_knows_its_slots_is_asked():
    model = one_layer([4.0, 4, 1, 1], [0, 1])
    optimizer = Resetting(model.parameters(), lr=0.0)
    Topology(model, 1, 0.5, total_steps=10).step(Wrapper(optimizer))
    parameter, slots = optimizer.seen
    assert parameter is model[0].values
    assert slots == [1]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9),
    ],
)
def test_state_of_swapped_slots_starts_afresh_in_any_optimizer(make):
    model = one_layer([4.0, 4, 1, 1], [0, 1])
    optimizer = make(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    Topology(model, 1, 0.5, total_steps=10).step(optimizer)
    tensors = [s for k, s in optimizer.state[model[0].values].items() if k != "step" and isinstance(s, torch.Tensor)]
    assert tensors
    for state in tensors:
        assert state[1].abs().sum() == 0
        assert state[0].abs().sum() > 0


def test_one_slot_keeps_the_step_count_of_the_optimizer():
    model = one_layer([1.0, 1], [0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.state[model[0].values] = {"step": torch.tensor([7.0]), "m": torch.ones(1, 1, 2), "flag": True}
    Topology(model, 1, 1.0, total_steps=10).step(optimizer)
    state = optimizer.state[model[0].values]
    assert (state["step"].item(), state["m"].sum().item(), state["flag"]) == (7.0, 0.0, True)


@pytest.fixture(params=[0, 1])
def half(request):
    """A mesh of two ranks seen from one of them, without the other."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_slots_of_an_uneven_shard(half):
    """Five slots: the first rank has 0, 1, 2, the second has 3 and 4."""
    rank = half.get_local_rank()
    local = torch.ones(3 - rank, 1, 2)
    tensor = DTensor.from_local(local, half, [Shard(0)], run_check=False, shape=(5, 1, 2), stride=(2, 2, 1))
    fill_slots(tensor, torch.tensor([0, 3]))
    assert tensor.to_local()[:, 0, 0].tolist() == [[0, 1, 1], [0, 1]][rank]


def test_replicated_slots_and_other_shards(half):
    tensor = DTensor.from_local(torch.ones(4, 1, 2), half, [Replicate()], run_check=False)
    fill_slots(tensor, torch.tensor([1, 3]))
    assert gathered(tensor)[:, 0, 0].tolist() == [1, 0, 1, 0]
    with pytest.raises(ValueError, match="sharded along axis 0"):
        fill_slots(DTensor.from_local(torch.ones(4, 1, 2), half, [Shard(2)], run_check=False), torch.tensor([1]))


# --- diagnostics -----------------------------------------------------------------------------------------------------


def test_survival_by_hand():
    """lr = 0, no grace: the newborns of an update are the weakest at the next, and none survives it."""
    model = one_layer([float(i) for i in range(1, 21)], list(range(10)), cols=80)
    topology = Topology(model, 1, 0.2, total_steps=100, grace=0, stop=1.0, final_drop_fraction=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first, second = topology.step(optimizer), topology.step(optimizer)
    assert first.layers[0].survivors == {}
    assert second.layers[0].survivors == {1: (2, 0)}
    assert "survival_1" not in first.metrics()
    assert second.metrics() == {
        "dropped": 2,
        "grown": 2,
        "active": 10,
        "density": 0.25,
        "ever_active": second.layers[0].ever_active,
        "survival_1": 0.0,
    }


def test_survival_within_and_past_grace():
    """Grace of 2: newborns of update 1 are there after updates 2 and 3, and gone after 4 and 5."""
    model = one_layer([float(i) for i in range(1, 21)], list(range(10)), cols=80)
    topology = Topology(model, 1, 0.1, total_steps=100, grace=2, stop=1.0, final_drop_fraction=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    metrics = [topology.step(optimizer).metrics() for _ in range(6)]
    assert [m.get("survival_1") for m in metrics] == [None, 1, 1, 1, 1, 1]
    assert [m.get("survival_past_grace") for m in metrics] == [None, None, None, None, 0, 0]
    assert [m.get("survival_5") for m in metrics] == [None] * 5 + [0]


def test_share_ever_active_counts_real_entries_and_only_grows():
    """(1, 5) in blocks of 2: from block 0 to some other, which has two entries or, at the edge, one."""
    model = one_layer([1.0, 1], [0], cols=5)
    topology = Topology(model, 1, 1.0, total_steps=10, grace=0, stop=1.0, final_drop_fraction=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen, shares = {0}, []
    for _ in range(6):
        shares.append(topology.step(optimizer).metrics()["ever_active"])
        seen.add(int(model[0].ids))
        assert shares[-1] == sum({0: 2, 1: 2, 2: 1}[block] for block in seen) / 5
    assert shares == sorted(shares)


def test_history_is_one_bit_a_block():
    layer = wide_model()[0]
    bits = layer.state_dict()["ever_active"]
    assert bits.dtype == torch.uint8
    assert bits.numel() == -(-layer.grid.blocks // 8)


def test_state_of_the_clock_fits_into_json():
    model = wide_model()
    topology = Topology(model, 1, 0.5, total_steps=10)
    train(model, topology, torch.optim.SGD(model.parameters(), lr=0.01), 0, 3)
    state = topology.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert state["updated_at"] == state["steps"] == state["updates"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grow": "gradients"}, "unknown growth rule 'gradients'; did you mean 'gradient'"),
        ({"grace": -1}, "grace must be a whole number of updates, at least 0, got -1"),
        ({"interval": 0}, "interval must be a whole number"),
        ({"stop": 0.0}, "stop must come after start"),
        ({"interval": 3, "stop": 2}, "interval=3 has no multiple from step 0 to 2; lower it, or use grow='static'"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(UserError, match=message):
        Topology(wide_model(), **({"interval": 1, "total_steps": 10} | options))


def test_a_dense_model_has_no_topology():
    with pytest.raises(UserError, match="no block-sparse layer; call sparsify first"):
        Topology(nn.Sequential(nn.Linear(2, 2)), 1, total_steps=10)


def test_copies_do_not_share_ids():
    model = wide_model()
    twin = copy.deepcopy(model)
    train(model, Topology(model, 1, 0.5, total_steps=10), torch.optim.SGD(model.parameters(), lr=0.01), 0, 2)
    assert not torch.equal(model[0].ids, twin[0].ids)


def test_gradients_of_a_step_that_was_skipped_are_forgotten():
    """Block 2 has overflowed in the skipped step; in the one that counts, block 3 has the larger gradient."""
    model = one_layer([4.0, 4, 1, 1], [0, 1])
    topology = Topology(model, 1, 0.5, "gradient", total_steps=10)
    model(torch.tensor([[0, 0, 0, 0, float("inf"), 0, 0, 0]])).sum().backward()
    topology.skip()
    model.zero_grad()
    model(torch.tensor([[0, 0, 0, 0, 1.0, 0, 2.0, 0]])).sum().backward()
    topology.step(torch.optim.SGD(model.parameters(), lr=0.0))
    assert model[0].ids.tolist() == [0, 3]
    assert topology.steps == 1
