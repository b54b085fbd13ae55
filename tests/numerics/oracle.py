"""What SinkGD and AdamW should do, written the slow, obvious way in float64, from the papers.

Nothing here is shared with the package: the iterate is a matrix, and its rows and columns are scaled one by one.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


def balanced(gradient: Tensor, iterations: int, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the iterate X (..., m, n) after L iterations, and by what each column was multiplied, start included."""
    if gradient.ndim > 2:
        starts = [None] * len(gradient) if start is None else start
        parts = [balanced(part, iterations, one) for part, one in zip(gradient, starts, strict=True)]
        return torch.stack([x for x, _ in parts]), torch.stack([c for _, c in parts])
    rows, cols = gradient.shape
    factors = torch.ones(cols, dtype=torch.float64) if start is None else start.double().clone()
    x = gradient.double().clone()
    for j in range(cols):
        x[:, j] *= factors[j]
    for _ in range(iterations):
        for i in range(rows):
            norm = x[i].norm()
            if norm > 0:
                x[i] *= math.sqrt(cols) / norm
        for j in range(cols):
            norm = x[:, j].norm()
            if norm > 0:
                x[:, j] *= math.sqrt(rows) / norm
                factors[j] *= math.sqrt(rows) / norm
    return x, factors


@dataclass
class Matrix:
    """A weight under SinkGD."""

    weight: Tensor
    iterations: int
    warm: bool
    start: Tensor | None = field(default=None)

    def step(self, gradient: Tensor, lr: float, lr_scale: float, weight_decay: float) -> None:
        x, factors = balanced(gradient, self.iterations, self.start)
        if self.warm:
            self.start = factors
        self.weight = self.weight - lr * weight_decay * self.weight - lr * lr_scale * x


@dataclass
class Adam:
    """A weight under AdamW."""

    weight: Tensor
    betas: tuple[float, float]
    eps: float
    m: Tensor | float = 0.0
    v: Tensor | float = 0.0
    t: int = 0

    def step(self, gradient: Tensor, lr: float, weight_decay: float) -> None:
        (beta1, beta2), g = self.betas, gradient.double()
        self.t += 1
        self.weight = self.weight - lr * weight_decay * self.weight
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g**2
        m_hat, v_hat = self.m / (1 - beta1**self.t), self.v / (1 - beta2**self.t)
        self.weight = self.weight - lr * m_hat / (v_hat.sqrt() + self.eps)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers that depend on ``seed`` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return the largest error of any entry, relative to the largest entry of its column."""
    size = exact.abs().amax(-2, keepdim=True)
    error = (ours.double() - exact).abs()
    return float(torch.where(size > 0, error / size, error).max())
