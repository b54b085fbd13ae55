"""Equal matrices too large for a stack enter compiled code together, and come out as they would alone."""

from typing import Any

import pytest
import torch
from torch import nn

from pumice.optim import SinkGD, batch
from pumice.optim.compiling import call_compiled
from tests.numerics.oracle import normal


def train(compile: bool, **options: Any) -> list[torch.Tensor]:
    shapes = [(24, 40)] * 10 + [(16, 40)] * 3
    parameters = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]
    optimizer = SinkGD([{"params": parameters, "rule": "sinkgd"}], 0.01, lr_scale=1.0, compile=compile, **options)
    for step in range(2):
        for i, parameter in enumerate(parameters):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("options", [{}, {"spectral_target": "sqrt"}], ids=str)
def test_joint_calls_change_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "COMPILED_STACK_BYTES", 0)
    made = []

    def counted(kernel: Any, calls: list[Any]) -> list[Any]:
        made.append((kernel.__name__, len(calls)))
        return call_compiled(kernel, calls)

    monkeypatch.setattr(batch, "call_compiled", counted)
    for joint, alone in zip(train(True, **options), train(False, **options), strict=True):
        torch.testing.assert_close(joint, alone, rtol=1e-6, atol=1e-6)
    for kernel in ("balance_whole", "descend"):
        assert made.count((kernel, 4)) == 2 * 2  # two runs of four in each of two updates
        assert made.count((kernel, 1)) == 2 * (2 + 3)


def test_a_matrix_that_is_not_finite_does_not_disturb_its_company(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "COMPILED_STACK_BYTES", 0)
    parameters = [nn.Parameter(torch.zeros(24, 40)) for _ in range(9)]
    for parameter in parameters:
        parameter.grad = normal(24, 40)
    parameters[4].grad[0, 0] = float("nan")
    optimizer = SinkGD([{"params": parameters, "rule": "sinkgd"}], compile=True, nonfinite="skip")
    with pytest.warns(UserWarning, match="is not finite"):
        optimizer.step()
    assert [bool(parameter.detach().any()) for parameter in parameters] == [i != 4 for i in range(9)]
