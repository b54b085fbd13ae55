"""torch's own battery of optimizer tests: its inputs and schedulers, with the logic of its tests that applies here."""

import itertools
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

from pumice.optim import SMET, SinkGD
from pumice.optim.base import MatrixOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:SinkGD balances all", "ignore:.*step.. before `lr_scheduler.step")
BASE = {"lr": 0.01, "compile": False}
SMET_OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": torch.tensor(0.01)},
    {"weight_decay": 0.1, "maximize": True},
    {"warmup_steps": 0, "density_scaling": "none", "state_bits": 8, "betas": (0.0, 0.9)},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": torch.tensor(0.01)},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"sinkhorn_iters": 5, "warm_start": False},
    {"lr_scale": "match_rms_adamw", "betas": (0.8, 0.9), "eps": 1e-6},
    {"spectral_target": "sqrt"},
    {"state_bits": 32, "stochastic_rounding": False},
    {"negligible_rows": 0.1, "base_width": 8},
]


def inputs(device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
    return [OptimizerInput(params=None, kwargs={**BASE, **options}, desc=str(options)) for options in OPTIONS]


INFO = OptimizerInfo(
    SinkGD,
    optim_inputs_func=inputs,
    supported_impls=(),
    supports_complex=False,
    supports_sparse=False,
    optim_error_inputs_func=get_error_inputs_for_all_optims,
)


@dataclass
class Config:
    """A class and its options."""

    kind: type[MatrixOptimizer]
    kwargs: dict[str, Any]


CONFIGS = [Config(SinkGD, one.kwargs) for one in INFO.optim_inputs_func("cpu")]
CONFIGS += [Config(SMET, {**BASE, **options}) for options in SMET_OPTIONS]
ids = pytest.mark.parametrize("config", CONFIGS, ids=[f"{one.kind.__name__} {one.kwargs}" for one in CONFIGS])


def make(params: Any, config: Config) -> MatrixOptimizer:
    return config.kind(params, **deepcopy(config.kwargs))  # schedulers change a tensor lr in place


def problem(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], Any]:
    """Return torch's regression of one matrix and one vector, and a closure for an optimizer of it."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((10, 5), (10,), (5,)))
    params = [nn.Parameter(weight), nn.Parameter(bias)]

    def closure(optimizer: MatrixOptimizer) -> Tensor:
        optimizer.zero_grad()
        loss = (params[0].mv(x) + params[1]).pow(2).sum()
        loss.backward()
        return loss

    return params, closure


@ids
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheduler", range(-1, len(INFO.scheduler_inputs[0])))
def test_goes_in_the_right_direction(config: Config, dtype: torch.dtype, scheduler: int) -> None:
    params, closure = problem(dtype)
    optimizer = make(params, config)
    schedulers = [INFO.scheduler_inputs[0][scheduler](optimizer)] if scheduler >= 0 else []
    first = closure(optimizer).item()
    for _ in range(8):
        loss = optimizer.step(lambda: closure(optimizer)).detach()
        for one in schedulers:
            one.step(loss) if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) else one.step()
    assert (closure(optimizer).item() > first) == config.kwargs.get("maximize", False)


@ids
def test_groups_with_their_own_learning_rate(config: Config) -> None:
    params, closure = problem()
    later, _ = problem()
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], config)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.01, 0.02])
    optimizer.add_param_group({"params": later[1], "lr": 0.0})
    before = [parameter.detach().clone() for parameter in (*params, later[1])]
    later[1].grad = torch.ones(10)
    closure(optimizer)
    later[1].grad = torch.ones(10)
    optimizer.step()
    same = [torch.equal(p, q) for p, q in zip((*params, later[1]), before, strict=True)]
    assert same == [False, False, True]


@ids
def test_does_not_change_its_gradients_or_graph(config: Config) -> None:
    params, closure = problem()
    optimizer = make(params, config)
    closure(optimizer)
    gradients, versions = deepcopy([p.grad for p in params]), [p.grad._version for p in params]
    addresses = [p.data_ptr() for p in params]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, gradients, strict=True))
    assert [p.grad._version for p in params] == versions
    assert [p.data_ptr() for p in params] == addresses
    assert all(p.requires_grad and p.is_leaf for p in params)


@ids
@pytest.mark.parametrize("named", [False, True])
def test_state_dict_gives_the_same_path(config: Config, named: bool) -> None:
    params, closure = problem()
    names = [f"p{i}" for i in range(2)]
    own = list(zip(names, params, strict=True)) if named else params
    optimizer = make(own, config)
    for _ in range(3):
        closure(optimizer)
        optimizer.step()
    others, other_closure = problem()
    for p, q in zip(others, params, strict=True):
        p.data = q.detach().clone()
    copied = make(list(zip(names, others, strict=True)) if named else others, config)
    copied.load_state_dict(deepcopy(optimizer.state_dict()))
    for _ in range(3):
        for one, its in ((optimizer, closure), (copied, other_closure)):
            its(one)
            one.step()
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert ("param_names" in copied.param_groups[0]) == named


@ids
def test_default_dtype_does_not_matter(config: Config) -> None:
    results = []
    for default in (torch.float32, torch.float64):
        params, closure = problem(torch.float32)
        optimizer = make(params, config)
        closure(optimizer)
        with torch.device("cpu"):
            torch.set_default_dtype(default)
            try:
                optimizer.step()
            finally:
                torch.set_default_dtype(torch.float32)
        results.append([p.detach() for p in params])
        assert all(v.dtype == torch.float32 for s in optimizer.state.values() for v in s.values())
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


ERRORS = INFO.optim_error_inputs_func("cpu", torch.float32)


@pytest.mark.parametrize("case", ERRORS, ids=[case.optimizer_error_input.desc for case in ERRORS])
def test_wrong_inputs(case: ErrorOptimizerInput) -> None:
    given = case.optimizer_error_input
    params = given.params if given.params is not None else [nn.Parameter(torch.zeros(2, 2))]
    assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    if case.error_type is UserWarning:
        with pytest.warns(UserWarning, match=case.error_regex):
            INFO.optim_cls(params, compile=False, **given.kwargs)
        return
    own = r"lr must be a number in \[0, inf\), got tensor"  # in our words instead of torch's
    with pytest.raises((case.error_type, TypeError), match=own if "lr" in given.kwargs else case.error_regex):
        INFO.optim_cls(params, compile=False, **given.kwargs)


def test_two_optimizers_do_not_meet() -> None:
    runs = [problem() for _ in range(2)]
    optimizers = [INFO.optim_cls(params, **BASE) for params, _ in runs]
    for _, (optimizer, (_, closure)) in itertools.product(range(3), list(zip(optimizers, runs, strict=True))):
        closure(optimizer)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(runs[0][0], runs[1][0], strict=True))
