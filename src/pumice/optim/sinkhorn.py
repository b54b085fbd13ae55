"""SR-Sinkhorn: balance the rows and columns of a gradient (arXiv 2502.06742, algorithm 3), in factored form.

The paper scales each row of an iterate to L2 norm √n, then each column to √m, L times. Every iterate is the gradient
with its rows and columns multiplied by positive numbers, so only those numbers are kept:

    X = diag(r) · G · diag(c)            G (m, n), r (m,), c (n,)
    r_i = √n / ‖(G · diag(c))_i‖         c_j = √m / ‖(diag(r) · G)_:j‖

A pass reads G and writes a vector. No iterate exists, so no scratch of the matrix's size is needed, and rounding errors
of G's dtype do not accumulate. r and c are multipliers of G itself, not of G∘G: for gradients around 1e-30 the latter
would not fit in float32.

Shapes here are (..., m, n) for matrices, (..., m) for r and (..., n) for c; leading axes are a batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

RowPass = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
ColPass = Callable[[Tensor, Tensor], Tensor]

CHUNK_BYTES = 1 << 20  # of a float32 temporary in the uncompiled passes: stays in a CPU's cache
_TINY = 2.0**-100  # a sum of squares below this may have lost summands to underflow
_BOUND = 2.0**40  # for c: without total support r and c drift apart for ever
_MAX_DRIFT = 8  # binary orders of c's geometric mean, which grows a little with every warm-started step
_LARGEST = 2.0**126  # for r: keeps the products with subnormal rows finite


def accumulation_dtype(gradient: Tensor) -> torch.dtype:
    """Return the dtype that sums and scale vectors of ``gradient`` use: at least float32."""
    return torch.promote_types(gradient.dtype, torch.float32)


def row_pass(gradient: Tensor, row_unit: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_j (u_i G_ij c_j)² and Σ_j |u_i G_ij|, both of shape (..., m); only the former can underflow to zero."""
    x = gradient.to(c.dtype) * row_unit.unsqueeze(-1)
    return (x * c.unsqueeze(-2)).square().sum(-1), x.abs().sum(-1)


def col_pass(gradient: Tensor, r: Tensor) -> Tensor:
    """Return Σ_i (r_i G_ij)², of shape (..., n)."""
    return (gradient.to(r.dtype) * r.unsqueeze(-1)).square().sum(-2)


def row_slices(matrix: Tensor, multiple: int = 1) -> Iterator[tuple[Any, ...]]:
    """Cut ``matrix`` (..., m, n) into runs of rows of about CHUNK_BYTES in float32.

    Yields indices into its first axes; each run but the last of a matrix has a multiple of ``multiple`` rows.
    """
    if matrix.numel() * 4 <= CHUNK_BYTES:
        yield (..., slice(None))
    elif matrix.ndim > 2:
        for i, part in enumerate(matrix.unbind(0)):
            yield from ((i, *index) for index in row_slices(part, multiple))
    else:
        rows = -(-max(1, CHUNK_BYTES // (4 * matrix.shape[-1])) // multiple) * multiple
        yield from ((slice(start, start + rows),) for start in range(0, matrix.shape[0], rows))


def rows_of(matrix: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Return the rows of ``matrix`` (..., m, n) that an index of :func:`row_slices` names."""
    return matrix[*index, slice(None)]


def cols_of(vector: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Return the part of ``vector`` (..., n) that belongs to the matrix of an index of :func:`row_slices`."""
    return vector[*index[:-1], slice(None)]


def chunked_row_pass(gradient: Tensor, row_unit: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Do :func:`row_pass` with bounded scratch and no compiler."""
    sums, sizes = torch.empty_like(row_unit), torch.empty_like(row_unit)
    for index in row_slices(gradient):
        sums[index], sizes[index] = row_pass(rows_of(gradient, index), row_unit[index], cols_of(c, index))
    return sums, sizes


def chunked_col_pass(gradient: Tensor, r: Tensor) -> Tensor:
    """Do :func:`col_pass` with bounded scratch and no compiler."""
    sums = r.new_zeros(*gradient.shape[:-2], gradient.shape[-1])
    for index in row_slices(gradient):
        cols_of(sums, index).add_(col_pass(rows_of(gradient, index), r[index]))
    return sums


def _unchanged(x: Tensor) -> Tensor:
    return x


def iterate(
    gradient: Tensor,
    row_unit: Tensor,
    c: Tensor,
    rows: int | Tensor,
    cols: int,
    iterations: int,
    row_pass: RowPass = row_pass,
    col_pass: ColPass = col_pass,
    sum_over_cols: Callable[[Tensor], Tensor] = _unchanged,
    sum_over_rows: Callable[[Tensor], Tensor] = _unchanged,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do ``iterations`` of SR-Sinkhorn, starting from ``c``.

    A row or column whose sum is zero keeps its previous scale.

    Args:
        gradient: (..., m, n), any floating dtype; the local part if it is sharded.
        row_unit: (..., m), in the accumulation dtype: powers of two that bring the rows near 1, ones ordinarily; zero
            leaves a row out.
        c: (..., n), in the accumulation dtype: positive start.
        rows: m of the whole matrix, or (..., 1) the number of rows that are not left out.
        cols: n of the whole matrix.
        iterations: L, at least 1.
        row_pass: sums over columns, local part.
        col_pass: sums over rows, local part.
        sum_over_cols: completes sums over columns where the columns are sharded.
        sum_over_rows: completes sums over rows where the rows are sharded.

    Returns:
        r (..., m); c (..., n); and a flag (...) that tells where squares under- or overflowed or G is not finite: then
        r and c are not to be used.
    """
    flags = torch.zeros(gradient.shape[:-2], dtype=torch.bool, device=gradient.device)
    r = row_unit
    mean_exponent = sum_over_cols(c.log2().sum(-1, keepdim=True)) / cols
    recentre = torch.where(mean_exponent.abs() > _MAX_DRIFT, torch.exp2(-mean_exponent.round()), 1.0)
    for iteration in range(iterations):
        sums, sizes = row_pass(gradient, row_unit, c)
        sums = sum_over_cols(sums)
        if iteration == 0:
            flags = (~sums.isfinite() | ((sizes > 0) & (sums < _TINY))).any(-1)
        r = torch.where(sums > 0, (row_unit * (cols / sums).sqrt()).clamp(max=_LARGEST), r)
        sums = sum_over_rows(col_pass(gradient, r))
        c = torch.where(sums > 0, (rows / sums).sqrt(), c).clamp(1 / _BOUND, _BOUND)
    return r / recentre, c * recentre, flags


def row_units(gradient: Tensor) -> Tensor:
    """Return for each row of ``gradient`` (..., m, n) the power of two that brings its largest entry into [1/2, 1).

    For rows of zeros, and of numbers too small or not finite, that is 1 or the nearest factor that float32 holds.
    """
    peaks = torch.empty(gradient.shape[:-1], dtype=accumulation_dtype(gradient), device=gradient.device)
    for index in row_slices(gradient):
        peaks[index] = rows_of(gradient, index).to(peaks.dtype).abs().amax(-1)
    exponents = torch.frexp(peaks)[1].clamp(-100, 126)
    return torch.where((peaks > 0) & peaks.isfinite(), torch.ldexp(torch.ones_like(peaks), -exponents), 1.0)


def scale_vectors(gradient: Tensor, iterations: int = 1, c: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the scale vectors that balance a gradient.

    Args:
        gradient: (..., m, n), any floating dtype and strides, finite.
        iterations: L, at least 1.
        c: (..., n), positive start, for example the c of an earlier gradient; ones by default.

    Returns:
        r (..., m) and c (..., n), float32 (float64 for a float64 gradient). ``r_i · G_ij · c_j`` has columns of L2 norm
        √m, and rows of norm √n up to what ``iterations`` left; rows and columns of zeros stay zero.

    Raises:
        ValueError: ``gradient`` has fewer than two axes or is not finite, or ``iterations`` is less than 1.

    Source: arXiv 2502.06742, algorithm 3 (SR-Sinkhorn).
    """
    if gradient.ndim < 2:
        raise ValueError(f"gradient must have at least two axes, got shape {tuple(gradient.shape)}")
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    rows, cols = gradient.shape[-2:]
    dtype = accumulation_dtype(gradient)
    unit = torch.ones(gradient.shape[:-1], dtype=dtype, device=gradient.device)
    if c is None:
        c = torch.ones(*gradient.shape[:-2], cols, dtype=dtype, device=gradient.device)
    if gradient.numel() == 0:
        return unit, c.to(dtype)
    for _ in range(2):
        r, balanced, flags = iterate(
            gradient, unit, c.to(dtype), rows, cols, iterations, chunked_row_pass, chunked_col_pass
        )
        if not bool(flags.any()):
            return r, balanced
        unit = row_units(gradient)
    raise ValueError("gradient must be finite, got infinite or NaN entries")


def balance(gradient: Tensor, iterations: int = 1, c: Tensor | None = None) -> Tensor:
    """Return the balanced gradient X = diag(r) · G · diag(c) as a matrix.

    Arguments, errors and source: see :func:`scale_vectors`. X has the shape of ``gradient``, is float32 (float64 for a
    float64 gradient), and its entries have RMS 1.
    """
    r, c = scale_vectors(gradient, iterations, c)
    return gradient.to(r.dtype) * r.unsqueeze(-1) * c.unsqueeze(-2)


def power_iteration(
    gradient: Tensor,
    r: Tensor,
    c: Tensor,
    v: Tensor,
    iterations: int,
    sum_over_cols: Callable[[Tensor], Tensor] = _unchanged,
    sum_over_rows: Callable[[Tensor], Tensor] = _unchanged,
) -> tuple[Tensor, Tensor]:
    """Estimate the operator norm σ of X = diag(r) · G · diag(c) without forming X.

    Args:
        gradient: (..., m, n).
        r: (..., m).
        c: (..., n).
        v: (..., n): vectors to start from, not zero.
        iterations: number of iterations, at least 1.
        sum_over_cols: completes sums over columns where they are sharded.
        sum_over_rows: completes sums over rows where they are sharded.

    Returns:
        σ (...), and the right singular vectors v (..., n) to start from next time. Where X is zero, σ is 0 and v is
        unchanged.
    """
    sigma = torch.zeros(gradient.shape[:-2], dtype=c.dtype, device=c.device)
    for _ in range(iterations):
        u = r * sum_over_cols(_matvec(gradient, c * v))
        next_v = c * sum_over_rows(_matvec(gradient.mT, r * u))
        length = sum_over_cols(v.square().sum(-1)).sqrt()
        sigma = sum_over_rows(u.square().sum(-1)).sqrt() / length
        norm = sum_over_cols(next_v.square().sum(-1)).sqrt()
        alive = (norm > 0).unsqueeze(-1)
        v = torch.where(alive, next_v / torch.where(alive, norm.unsqueeze(-1), 1.0), v)
    return sigma, v


def _matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    if matrix.dtype == vector.dtype:
        return torch.matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)
    out = vector.new_empty(matrix.shape[:-1])
    for index in row_slices(matrix):
        out[index] = torch.matmul(
            rows_of(matrix, index).to(vector.dtype), cols_of(vector, index).unsqueeze(-1)
        ).squeeze(-1)
    return out
