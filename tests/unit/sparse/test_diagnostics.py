"""What is measured of topology updates, on numbers worked out by hand."""

import json
import math

import pytest
import torch
from torch import nn

from pumice.sparse import BlockSparseLinear, Monitor, NewbornProbe, Spikes, Topology


def layer_of(values: list[float], cols: int = 8) -> nn.Sequential:
    """One row, blocks of two entries, the first of them active."""
    layer = BlockSparseLinear(cols, 1, torch.arange(len(values)), (1, 2), bias=False)
    with torch.no_grad():
        layer.values.copy_(torch.tensor(values).view(-1, 1, 1).expand(-1, 1, 2))
    return nn.Sequential(layer)


def test_a_jump_is_the_larger_of_two_steps_against_the_usual_ones():
    spikes = Spikes()
    losses = [5.0, 4.0, 4.5, 4.0, 3.0, 6.0, 3.5, 3.0]
    found = [spikes.see(step, loss, updated=step == 5) for step, loss in enumerate(losses, start=1)]
    assert found[:6] == [None] * 6
    # quiet jumps: from step 1 max(4, 4.5) - 5, step 2 max(4.5, 4) - 4, step 3 max(4, 3) - 4.5; step 4 has the update
    # within its two steps; then the update's own, max(6, 3.5) - 3
    spike = found[6]
    assert (spike.step, spike.height) == (5, 3.0)
    quiet = [-0.5, 0.5, -0.5]
    assert spike.usual == pytest.approx(sum(quiet) / 3)
    assert spike.noise == pytest.approx(math.sqrt(sum((q - sum(quiet) / 3) ** 2 for q in quiet) / 3))
    assert spike.metrics()["spike_deviations"] == pytest.approx((3.0 - spike.usual) / spike.noise)


def test_a_jump_with_nothing_to_compare_it_with_is_not_told():
    spikes = Spikes()
    assert [spikes.see(step, 1.0, updated=step == 1) for step in (1, 2, 3)] == [None] * 3


def test_newborn_updates_over_those_of_others():
    """SGD with rates of its own for slots: newborn ones move by 3, others by 2."""
    model = layer_of([1.0, 2.0, 3.0, 4.0], cols=16)
    topology = Topology(model, 10, 0.5, total_steps=20, stop=1.0)
    probe, optimizer = NewbornProbe(topology, steps=2), torch.optim.SGD(model.parameters(), lr=1.0)
    ratios = []
    for _ in range(14):
        newborn = (model[0].birth == topology.updated_at) & (topology.updated_at > 0)
        model[0].values.grad = torch.where(newborn, 3.0, 2.0).view(-1, 1, 1).expand_as(model[0].values).clone()
        probe.before_step()
        optimizer.step()
        ratios.append(probe.after_step())
        topology.step(optimizer)
    assert ratios == [None] * 10 + [1.5, 1.5] + [None] * 2


def test_padding_does_not_count_in_the_ratio():
    """Of five columns the last block has one real entry; its padding never moves."""
    layer = BlockSparseLinear(5, 1, torch.tensor([0, 2]), (1, 2), bias=False)
    topology = Topology(layer, 1, 0.5, total_steps=20, stop=1.0)
    topology.updated_at = topology.steps = 1
    layer.birth[1] = 1
    probe = NewbornProbe(topology)
    probe.before_step()
    with torch.no_grad():
        layer.values[0] += 1.0
        layer.values[1, 0, 0] += 1.0
    assert probe.after_step() == pytest.approx(1.0)


def test_a_large_layer_is_sampled():
    layer = BlockSparseLinear(100, 10, torch.arange(500), (1, 2), bias=False)
    topology = Topology(layer, 1, 0.5, total_steps=20, stop=1.0)
    topology.updated_at = topology.steps = 1
    layer.birth[::2] = 1
    probe = NewbornProbe(topology, sample=20)
    probe.before_step()
    assert [len(slots) for _, _, slots, _ in probe._copies] == [10, 10]


def record_updates(monitor: Monitor, optimizer: torch.optim.Optimizer, steps: range) -> list[tuple[int, dict]]:
    records = []
    for step in steps:
        for parameter in monitor.topology.layers["0"].parameters():
            parameter.grad = torch.ones_like(parameter)
        monitor.before_step()
        optimizer.step()
        record = monitor.step(optimizer, loss=10.0 - step + (step == 13))
        if record is not None:
            records.append((step, record))
    return records


def monitor_of(interval: int = 12) -> tuple[Monitor, torch.optim.Optimizer]:
    model = layer_of([1.0, 2.0, 3.0, 4.0], cols=16)
    topology = Topology(model, interval, 0.5, total_steps=40, stop=1.0)
    return Monitor(topology), torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_update_is_told_five_steps_later_with_all_that_is_known():
    monitor, optimizer = monitor_of()
    records = record_updates(monitor, optimizer, range(1, 31))
    assert [step for step, _ in records] == [17, 29]
    first = records[0][1]
    assert first["update"] == 1
    assert first["grown"] == first["dropped"] == 2
    assert first["spike_height"] == pytest.approx(0.0)  # max(10 - 13 + 1, 10 - 14) - (10 - 12)
    assert [first[f"newborn_ratio_{age}"] for age in range(1, 6)] == pytest.approx([1.0] * 5)
    assert first["density/0"] == 0.5
    assert "density/0" not in records[1][1]
    assert records[1][1]["survival_1"] == 1.0
    assert [len(window) for window in monitor.windows] == [16]
    assert monitor.windows[0] == [10.0 - step + (step == 13) for step in range(7, 23)]


def test_close_updates_are_told_before_the_next_one():
    monitor, optimizer = monitor_of(interval=2)
    records = record_updates(monitor, optimizer, range(1, 8))
    assert [(step, record["update"]) for step, record in records] == [(4, 1), (6, 2)]
    assert monitor.finish()["update"] == 3
    assert monitor.finish() is None


def test_state_goes_through_json_and_on():
    whole, optimizer = monitor_of()
    told = record_updates(whole, optimizer, range(1, 31))
    first, optimizer = monitor_of()
    record_updates(first, optimizer, range(1, 15))
    state = json.loads(json.dumps(first.state_dict()))
    second, other = monitor_of()
    second.topology.layers["0"].load_state_dict(first.topology.layers["0"].state_dict())
    second.load_state_dict(state)
    assert record_updates(second, other, range(15, 31)) == told
    assert second.windows == whole.windows
