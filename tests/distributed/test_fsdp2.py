"""SinkGD under FSDP2 on two gloo processes: the same training as on one, and checkpoints that lose nothing."""

import warnings
from pathlib import Path
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pumice.optim import SinkGD
from pumice.optim.groups import param_groups
from tests.distributed.processes import on_two_processes


class Network(nn.Module):
    """Sizes that two does not divide, rows for one rank only, a batch of matrices, one stored [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(33, 128)
        self.up = nn.Linear(128, 7)
        self.turned = nn.Parameter(torch.randn(7, 12) / 3)
        self.experts = nn.Parameter(torch.randn(3, 5, 12) / 3)
        self.norm = nn.LayerNorm(5)
        self.gate = nn.Linear(5, 1, bias=False)
        self.wide = nn.Parameter(torch.randn(1, 4096))

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.table(tokens))) @ self.turned
        x = self.norm(torch.einsum("bi,eoi->bo", x, self.experts))
        return (self.gate(x) * self.wide).square().mean()


def optimizer_of(model: nn.Module, **options: Any) -> SinkGD:
    groups = param_groups(model, 0.1, {"gate": "sinkgd", "turned|experts": "sinkgd", "wide": "adamw"})
    for group in list(groups):
        turned = [(name, parameter) for name, parameter in group["params"] if name == "turned"]
        if turned:
            group["params"] = [pair for pair in group["params"] if pair[0] != "turned"]
            groups.append({**group, "params": turned, "transposed": True})
    return SinkGD(groups, 0.01, compile=False, **options)


def gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    model.zero_grad()
    model(torch.arange(20) * (step + 1) % 33).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(scale)


def train(model: nn.Module, optimizer: SinkGD, steps: range) -> None:
    for step in steps:
        gradients(model, step, 1e-30 if step == 1 else 1.0)
        optimizer.step()


def full(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in model.named_parameters()
    }


def sharded(dtype: torch.dtype, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,)) if mesh is None else mesh
    return fully_shard(Network().to(dtype), mesh=mesh)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "cold, options": {
        "sinkhorn_iters": 2, "warm_start": False, "spectral_target": "sqrt", "negligible_rows": 0.3, "state_bits": 32
    },
}  # fmt: skip


def equals_one_process(rank: int, folder: str) -> None:
    for options in OPTIONS.values():
        for dtype in (torch.float32, torch.bfloat16):
            model, whole = sharded(dtype), Network().to(dtype)
            start = full(whole)
            train(model, optimizer_of(model, **options), range(3))
            train(whole, optimizer_of(whole, **options), range(3))
            for name, expected in full(whole).items():
                actual, moved = full(model)[name], (expected - start[name]).abs().max()
                assert moved > 0, name
                if dtype == torch.float32:
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=float(moved) * 1e-3, msg=name)
                else:  # the same bits: a half of all weights would differ with others
                    differ = (actual != expected).float().mean()
                    assert differ < 0.03 or (actual.numel() < 100 and (actual != expected).sum() <= 2), (name, differ)


def unfit_gradients_are_skipped_together(rank: int, folder: str) -> None:
    """Only one rank sees them; the other must not wait for ever, nor move that parameter."""
    model = sharded(torch.float32)
    optimizer = optimizer_of(model, nonfinite="skip")
    train(model, optimizer, range(1))
    before = full(model)
    gradients(model, 1)
    if rank == 0:
        for parameter in (model.up.weight, model.table.weight, model.experts):
            parameter.grad.to_local().view(-1)[1] = float("nan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    after = full(model)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {"up.weight", "table.weight", "experts"} == set(optimizer.skipped)
    assert not any(tensor.isnan().any() for tensor in after.values())


def hidden_step_changes_nothing(rank: int, folder: str) -> None:
    """torch makes missing state by a step with zero gradients and a learning rate of 0."""
    results = []
    for look in (False, True):
        model = sharded(torch.float32)
        optimizer = optimizer_of(model, spectral_target=1.0)
        if look:
            before = full(model)
            state = get_optimizer_state_dict(model, optimizer)["state"]
            assert_same(full(model), before)
            assert set(state) == set(before)
            assert {float(one["step"]) for one in state.values()} == {0.0}
        train(model, optimizer, range(3))
        results.append(full(model))
    assert_same(*results)


def zero_rate_with_gradients_on_one_rank(rank: int, folder: str) -> None:
    """A warm-up that starts at 0 is no hidden step, even where a rank's part of the gradient is zero."""
    model = sharded(torch.float32)
    optimizer = optimizer_of(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    gradients(model, 0)
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad.to_local().zero_()
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def checkpoint_loses_nothing(rank: int, folder: str) -> None:
    for dtype, bits in ((torch.float32, 32), (torch.bfloat16, 8)):
        where = f"{folder}/{bits}"
        model = sharded(dtype)
        optimizer = optimizer_of(model, state_bits=bits, spectral_target=1.0)
        train(model, optimizer, range(2))
        local = optimizer.state[model.table.weight]["exp_avg"].to_local()
        assert local.dtype == (torch.uint8 if bits == 8 else torch.float32)
        assert len(local) == (17 if rank == 0 else 16)
        saved = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(saved, checkpoint_id=where)
        train(model, optimizer, range(2, 3))

        fresh = sharded(dtype)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        resumed = optimizer_of(fresh, state_bits=bits, spectral_target=1.0)
        loaded = {"model": get_model_state_dict(fresh), "optim": get_optimizer_state_dict(fresh, resumed)}
        dcp.load(loaded, checkpoint_id=where)
        set_model_state_dict(fresh, loaded["model"])
        set_optimizer_state_dict(fresh, resumed, loaded["optim"])
        for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
            states = optimizer.state[one], resumed.state[other]
            kinds = [{key: (value.dtype, value.shape, type(value)) for key, value in s.items()} for s in states]
            assert kinds[0] == kinds[1]
        train(fresh, resumed, range(2, 3))
        assert_same(full(fresh), full(model))


def replicas_stay_identical(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(torch.bfloat16, mesh)
    train(model, optimizer_of(model), range(3))
    for name, parameter in model.named_parameters():
        local = parameter.to_local().float()
        copies = [torch.empty_like(local) for _ in range(2)]
        dist.all_gather(copies, local)
        assert torch.equal(*copies), name


CHECKS = (
    equals_one_process,
    unfit_gradients_are_skipped_together,
    hidden_step_changes_nothing,
    zero_rate_with_gradients_on_one_rank,
    replicas_stay_identical,
    checkpoint_loses_nothing,
)


def test_on_two_processes(tmp_path: Path) -> None:
    on_two_processes(CHECKS, tmp_path)
