"""torch's own battery of optimizer tests: its inputs and schedulers, with the logic of its tests that applies here."""

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInfo,
    get_error_inputs_for_all_optims,
)

from pumice.optim import SMET, SinkGD
from pumice.optim.base import MatrixOptimizer
from pumice.sparse import BlockSparseLinear

pytestmark = pytest.mark.filterwarnings("ignore:SinkGD balances all", "ignore:.*step.. before `lr_scheduler.step")
BASE = {"lr": 0.01, "compile": False}
SHARED: list[dict[str, Any]] = [
    {},
    {"lr": torch.tensor(0.01)},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
]
SINKGD: list[dict[str, Any]] = [
    {"sinkhorn_iters": 5, "warm_start": False},
    {"lr_scale": "match_rms_adamw", "betas": (0.8, 0.9), "eps": 1e-6},
    {"spectral_target": "sqrt"},
    {"state_bits": 32, "stochastic_rounding": False},
    {"negligible_rows": 0.1, "base_width": 8},
]
SMETS: list[dict[str, Any]] = [
    {"betas": (0.0, 0.9), "eps": 1e-6, "density_scaling": "none"},
    {"warmup_steps": 0, "density_scaling": "linear"},
    {"state_bits": 8, "stochastic_rounding": False},
]


class Config(NamedTuple):
    """An optimizer and its options; ``packed``: its matrix is that of a block-sparse layer."""

    kind: type[MatrixOptimizer]
    options: dict[str, Any]
    packed: bool = False


INFOS = {
    kind: OptimizerInfo(
        kind,
        optim_inputs_func=lambda *_: [],
        supported_impls=(),
        supports_complex=False,
        supports_sparse=False,
        optim_error_inputs_func=get_error_inputs_for_all_optims,
    )
    for kind in (SinkGD, SMET)
}
SCHEDULERS = INFOS[SinkGD].scheduler_inputs[0]
CONFIGS = [Config(SinkGD, options) for options in (*SHARED, *SINKGD)]
CONFIGS += [Config(SMET, {}), *(Config(SMET, options, packed=True) for options in (*SHARED, *SMETS))]
ids = pytest.mark.parametrize(
    "config", CONFIGS, ids=[f"{c.kind.__name__}{' packed' if c.packed else ''} {c.options}" for c in CONFIGS]
)


class Problem(NamedTuple):
    """torch's regression of one matrix and one vector, and a closure for an optimizer of it."""

    params: list[nn.Parameter]
    closure: Callable[[MatrixOptimizer], Tensor]
    layer: BlockSparseLinear | None

    def groups(self, config: Config, named: bool = False) -> list[dict[str, Any]]:
        """One of the matrix and one of the vector."""
        groups: list[dict[str, Any]] = [{"params": [(f"p{i}", p)] if named else [p]} for i, p in enumerate(self.params)]
        if self.layer is not None:
            groups[0] |= {"layers": [self.layer], "rule": "smet"}
        return groups


def make(params: Any, config: Config) -> MatrixOptimizer:
    return config.kind(params, **deepcopy({**BASE, **config.options}))  # schedulers change a tensor lr in place


def problem(config: Config, dtype: torch.dtype = torch.float32) -> Problem:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((10, 5), (10,), (5,)))
    if config.packed:  # half of the blocks, two entries each or, at the edge, one
        layer = BlockSparseLinear.from_dense(weight, torch.arange(0, 30, 2), (1, 2), bias)
        params = [layer.values, layer.bias]
    else:
        layer, params = None, [nn.Parameter(weight), nn.Parameter(bias)]

    def closure(optimizer: MatrixOptimizer) -> Tensor:
        optimizer.zero_grad()
        loss = (params[0].mv(x) + params[1] if layer is None else layer(x)).pow(2).sum()
        loss.backward()
        return loss

    return Problem(params, closure, layer)


@ids
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheduler", range(-1, len(SCHEDULERS)))
def test_goes_in_the_right_direction(config: Config, dtype: torch.dtype, scheduler: int) -> None:
    given = problem(config, dtype)
    optimizer, closure = make(given.groups(config), config), given.closure
    schedulers = [SCHEDULERS[scheduler](optimizer)] if scheduler >= 0 else []
    first = closure(optimizer).item()
    for _ in range(8):
        loss = optimizer.step(lambda: closure(optimizer)).detach()
        for one in schedulers:
            one.step(loss) if isinstance(one, torch.optim.lr_scheduler.ReduceLROnPlateau) else one.step()
    assert (closure(optimizer).item() > first) == config.options.get("maximize", False)


@ids
def test_groups_with_their_own_learning_rate(config: Config) -> None:
    given = problem(config)
    params, closure, _ = given
    later = problem(config).params
    matrix, vector = given.groups(config)
    optimizer = make([matrix, {**vector, "lr": 0.02}], config)
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
    given = problem(config)
    params, closure, _ = given
    optimizer = make(given.groups(config), config)
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
    given, other = problem(config), problem(config)
    params, closure, _ = given
    optimizer = make(given.groups(config, named), config)
    for _ in range(3):
        closure(optimizer)
        optimizer.step()
    others, other_closure, _ = other
    for p, q in zip(others, params, strict=True):
        p.data = q.detach().clone()
    copied = make(other.groups(config, named), config)
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
        given = problem(config)
        params, closure, _ = given
        optimizer = make(given.groups(config), config)
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


ERRORS = [(kind, case) for kind, info in INFOS.items() for case in info.optim_error_inputs_func("cpu", torch.float32)]


@pytest.mark.parametrize(
    ("kind", "case"), ERRORS, ids=[f"{kind.__name__} {case.optimizer_error_input.desc}" for kind, case in ERRORS]
)
def test_wrong_inputs(kind: type[MatrixOptimizer], case: ErrorOptimizerInput) -> None:
    given = case.optimizer_error_input
    params = given.params if given.params is not None else [nn.Parameter(torch.zeros(2, 2))]
    assert case.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
    if case.error_type is UserWarning:
        with pytest.warns(UserWarning, match=case.error_regex):
            kind(params, compile=False, **given.kwargs)
        return
    own = r"lr must be a number in \[0, inf\), got tensor"  # in our words instead of torch's
    with pytest.raises((case.error_type, TypeError), match=own if "lr" in given.kwargs else case.error_regex):
        kind(params, compile=False, **given.kwargs)


@ids
def test_two_optimizers_do_not_meet(config: Config) -> None:
    runs = [problem(config) for _ in range(2)]
    optimizers = [make(given.groups(config), config) for given in runs]
    for _, (optimizer, given) in itertools.product(range(3), list(zip(optimizers, runs, strict=True))):
        given.closure(optimizer)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(runs[0].params, runs[1].params, strict=True))
