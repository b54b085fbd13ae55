"""Block-sparse training under FSDP2 on two gloo processes: topology updates included, as on one."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pumice.optim import SMET
from pumice.sparse import BlockSparseLinear, Topology, densify, sparsify
from tests.distributed.processes import on_two_processes

STEPS = 8
Parts = tuple[nn.Module, SMET, Topology]


def parts(shard: bool, grow: str = "random", bits: int = 32, dtype: torch.dtype = torch.float32) -> Parts:
    """A model of an odd number of slots, in one layer as many as make 8-bit state, and what trains it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 5), nn.Tanh(), nn.Linear(5, 7)).to(dtype)
    sparsify(model, 0.51, (1, 16), targets=r"^[02]$")
    if shard:
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = SMET.from_model(model, 0.01, weight_decay=0.1, warmup_steps=2, state_bits=bits, compile=False)
    return model, optimizer, Topology(model, 3, 0.4, grow, grace=1, stop=1.0, total_steps=12)


def train(model: nn.Module, optimizer: SMET, topology: Topology, steps: range) -> None:
    """Every process sees the same batch, so that one process computes the same."""
    for step in steps:
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).dtype)
        model(x).square().mean().backward()
        optimizer.step()
        topology.step(optimizer)
        optimizer.zero_grad()


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [module for module in model.modules() if isinstance(module, BlockSparseLinear)]


def equals_one_process(rank: int, folder: str) -> None:
    for grow, bits in (("random", 32), ("gradient", 32), ("random", 8)):
        here, alone = parts(True, grow, bits), parts(False, grow, bits)
        assert {layer.values.shape[0] % 2 for layer in layers(alone[0])} == {0, 1}
        train(*here, range(STEPS))
        train(*alone, range(STEPS))
        whole, sharded = full(alone[0]), full(here[0])
        for name, expected in whole.items():
            if expected.is_floating_point():
                torch.testing.assert_close(sharded[name], expected, rtol=1e-4, atol=1e-6, msg=f"{grow} {bits} {name}")
            else:
                assert torch.equal(sharded[name], expected), (grow, bits, name)
        assert all(bool((layer.birth > 0).any()) for layer in layers(here[0]))
        assert here[2].updates == 2


def ranks_agree_to_the_bit(rank: int, folder: str) -> None:
    here = parts(True, "gradient", dtype=torch.bfloat16)
    train(*here, range(STEPS))
    for name, value in full(here[0]).items():
        copies = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(copies, value)
        assert torch.equal(*copies), name


def densified_it_is_whole_on_every_rank(rank: int, folder: str) -> None:
    here, alone = parts(True), parts(False)
    train(*here, range(3))
    train(*alone, range(3))
    for one in (here, alone):
        densify(one[0])
    weights = [dict(one[0].named_parameters()) for one in (here, alone)]
    for name in ("0.weight", "0.bias", "2.weight"):
        assert not isinstance(weights[0][name], DTensor)
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=1e-4, atol=1e-6)


def checkpoint_across_an_update_loses_nothing(rank: int, folder: str) -> None:
    for bits in (32, 8):
        where = f"{folder}/smet{bits}"
        model, optimizer, topology = parts(True, bits=bits)
        train(model, optimizer, topology, range(4))
        saved = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save({**saved, "topology": topology.state_dict()}, checkpoint_id=where)
        clock = topology.state_dict()
        train(model, optimizer, topology, range(4, STEPS))

        fresh, resumed, later = parts(True, bits=bits)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        loaded = {"model": get_model_state_dict(fresh), "optim": get_optimizer_state_dict(fresh, resumed)}
        dcp.load(loaded, checkpoint_id=where)
        set_model_state_dict(fresh, loaded["model"])
        set_optimizer_state_dict(fresh, resumed, loaded["optim"])
        later.load_state_dict(clock)
        train(fresh, resumed, later, range(4, STEPS))
        assert_same(full(fresh), full(model))
        for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
            states = optimizer.state[one], resumed.state[other]
            assert states[0].keys() == states[1].keys()
            for key, value in states[0].items():
                theirs = states[1][key]
                pair = (t.to_local() if isinstance(t, DTensor) else t for t in (value, theirs))
                assert_same(*pair)


CHECKS = (
    equals_one_process,
    ranks_agree_to_the_bit,
    densified_it_is_whole_on_every_rank,
    checkpoint_across_an_update_loses_nothing,
)


def test_on_two_processes(tmp_path) -> None:
    on_two_processes(CHECKS, tmp_path)
