"""SR-Sinkhorn: balance the rows and columns of a gradient (arXiv 2502.06742, algorithm 3), in factored form.

The paper scales each row of an iterate to L2 norm √n, then each column to √m, L times. Every iterate is the gradient
with its rows and columns multiplied by positive numbers, so only those numbers are kept:

    X = diag(r) · G · diag(c)            G (m, n), r (m,), c (n,)
    r_i = √n / ‖(G · diag(c))_i‖         c_j = √m / ‖(diag(r) · G)_:j‖

A pass reads G and writes a vector. No iterate exists, so no scratch of the matrix's size is needed, and rounding errors
of G's dtype do not accumulate. r and c are multipliers of G itself, not of G∘G: for gradients around 1e-30 the latter
would not fit in float32. Where a square under- or overflows nevertheless, the matrix is balanced once more with rows
and columns first multiplied by powers of two, which leaves every digit of the result as it is.

Shapes here are (..., m, n) for matrices, (..., m) for r and (..., n) for c; leading axes are a batch.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Pass = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]

CHUNK_BYTES = 1 << 20  # of a float32 temporary in the uncompiled passes: stays in a CPU's cache
BLOCK_ROWS = 16  # summed first in a pass over columns, which by itself would walk down each column for its own sake
_MARGIN = 2.0**56  # a sum of squares this near to the smallest or largest number may have lost digits
_BOUND = 2.0**40  # for the c of one update as the start of the next: without total support r and c drift apart for ever
_MAX_DRIFT = 8  # binary orders of c's geometric mean, which grows a little with every warm-started step


def accumulation_dtype(gradient: Tensor) -> torch.dtype:
    """Return the dtype that sums and scale vectors of ``gradient`` use: at least float32."""
    return torch.promote_types(gradient.dtype, torch.float32)


def _sum_of_squares(x: Tensor, unscaled: Tensor, axis: int) -> Tensor:
    """Return Σ x², which is positive where an entry of ``unscaled`` is not zero, however small.

    What is added for that is at most the smallest normal number, far below the last digit of a sum that can be used.
    """
    return x.square().sum(axis) + unscaled.abs().sum(axis).clamp(max=torch.finfo(x.dtype).tiny)


def row_pass(gradient: Tensor, c: Tensor, row_unit: Tensor | None = None) -> Tensor:
    """Return Σ_j (u_i G_ij c_j)² (..., m), zero only for rows of zeros."""
    x = gradient.to(c.dtype)
    if row_unit is not None:
        x = x * row_unit.unsqueeze(-1)
    return _sum_of_squares(x * c.unsqueeze(-2), x, -1)


def col_pass(gradient: Tensor, r: Tensor, col_unit: Tensor | None = None) -> Tensor:
    """Return Σ_i (r_i G_ij u_j)² (..., n), zero only for columns of zeros."""
    x = gradient.to(r.dtype) * r.unsqueeze(-1)
    if col_unit is not None:
        x = x * col_unit.unsqueeze(-2)
    return _sum_of_squares(x, x, -2)


def by_blocks(sum_rows: Callable[[Tensor, Tensor], Tensor], matrix: Tensor, vector: Tensor) -> Tensor:
    """Sum over rows, blocks of rows first; a compiled sum then takes scratch of 1/16 of a float32 matrix.

    Args:
        sum_rows: takes a matrix (..., m, n) and a vector (..., m) to a sum over rows (..., n).
        matrix: (..., m, n).
        vector: (..., m).
    """
    count = matrix.shape[-2] // BLOCK_ROWS
    whole = count * BLOCK_ROWS
    blocks = (count, BLOCK_ROWS)
    matrices = torch.unflatten(matrix[..., :whole, :], -2, blocks)
    vectors = torch.unflatten(vector[..., :whole], -1, blocks)
    return sum_rows(matrices, vectors).sum(-2) + sum_rows(matrix[..., whole:, :], vector[..., whole:])


def blocked_col_pass(gradient: Tensor, r: Tensor, col_unit: Tensor | None = None) -> Tensor:
    """Do :func:`col_pass` :func:`by_blocks`."""
    if col_unit is None:
        return by_blocks(col_pass, gradient, r)
    x = gradient.to(r.dtype) * col_unit.unsqueeze(-2)
    return by_blocks(col_pass, x, r)


def row_slices(matrix: Tensor, limit: int | None = None) -> Iterator[tuple[Any, ...]]:
    """Cut ``matrix`` (..., m, n) into runs of rows of about ``limit`` (by default CHUNK_BYTES) bytes in float32.

    Yields indices into its first axes.
    """
    limit = CHUNK_BYTES if limit is None else limit
    if matrix.numel() * 4 <= limit:
        yield (..., slice(None))
    elif matrix.ndim > 2:
        for i, part in enumerate(matrix.unbind(0)):
            yield from ((i, *index) for index in row_slices(part, limit))
    else:
        pieces = -(-matrix.shape[0] // max(1, limit // (4 * matrix.shape[-1])))
        rows = -(-matrix.shape[0] // pieces)
        yield from ((slice(start, start + rows),) for start in range(0, matrix.shape[0], rows))


def rows_of(matrix: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Return the rows of ``matrix`` (..., m, n) that an index of :func:`row_slices` names."""
    return matrix[*index, slice(None)]


def cols_of(vector: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Return the part of ``vector`` (..., n) that belongs to the matrix of an index of :func:`row_slices`."""
    return vector[*index[:-1], slice(None)]


def chunked_row_pass(gradient: Tensor, c: Tensor, row_unit: Tensor | None = None) -> Tensor:
    """Do :func:`row_pass` with bounded scratch and no compiler."""
    sums = c.new_empty(gradient.shape[:-1])
    for index in row_slices(gradient):
        unit = None if row_unit is None else row_unit[index]
        sums[index] = row_pass(rows_of(gradient, index), cols_of(c, index), unit)
    return sums


def chunked_col_pass(gradient: Tensor, r: Tensor, col_unit: Tensor | None = None) -> Tensor:
    """Do :func:`col_pass` with bounded scratch and no compiler."""
    sums = r.new_zeros(*gradient.shape[:-2], gradient.shape[-1])
    for index in row_slices(gradient):
        unit = None if col_unit is None else cols_of(col_unit, index)
        cols_of(sums, index).add_(col_pass(rows_of(gradient, index), r[index], unit))
    return sums


def _unchanged(x: Tensor) -> Tensor:
    return x


def iterate(
    gradient: Tensor,
    c: Tensor,
    rows: int | Tensor,
    cols: int | Tensor,
    iterations: int,
    row_unit: Tensor | None = None,
    col_unit: Tensor | None = None,
    keep: Tensor | None = None,
    row_pass: Pass = row_pass,
    col_pass: Pass = col_pass,
    sum_over_cols: Callable[[Tensor], Tensor] = _unchanged,
    sum_over_rows: Callable[[Tensor], Tensor] = _unchanged,
    mean_over_cols: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do ``iterations`` of SR-Sinkhorn, starting from ``c``.

    A row or column whose sum is zero keeps its previous scale.

    Args:
        gradient: (..., m, n), any floating dtype; the local part if it is sharded.
        c: (..., n), in the accumulation dtype: start, see :func:`bounded`.
        rows: m of the whole matrix, (..., 1) the number of rows to keep, or (..., n) the entries of each column.
        cols: n of the whole matrix, or (..., m) the entries of each row.
        iterations: L, at least 1.
        row_unit: (..., m), in the accumulation dtype: see :func:`units`; None stands for ones.
        col_unit: (..., n), given if ``row_unit`` is.
        keep: (..., m), which rows take part, the others being treated as zero; None keeps all.
        row_pass: sums over columns, local part.
        col_pass: sums over rows, local part.
        sum_over_cols: completes sums over columns where the columns are sharded.
        sum_over_rows: completes sums over rows where the rows are sharded.
        mean_over_cols: mean of a vector (..., n) over the whole matrix's columns, (..., 1); None: by ``sum_over_cols``
            and ``cols``.

    Returns:
        r (..., m); c (..., n); and a flag (...) if they are not to be used: G is not finite or, without units, a square
        has under- or overflowed.
    """

    smallest = torch.finfo(c.dtype).tiny * _MARGIN

    def next_scale(target: int | Tensor, sums: Tensor, unit: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
        new = (target / sums).sqrt()
        if unit is None:
            fit = (sums == 0) | ((sums >= smallest) & (sums <= 1 / smallest))
        else:
            fit = sums.isfinite()
            new = new * unit
        return torch.where(sums > 0, new.clamp(max=largest_scale(c.dtype)), scale), ~fit

    if mean_over_cols is None:
        mean_exponent = sum_over_cols(c.log2().sum(-1, keepdim=True)) / cols
    else:
        mean_exponent = mean_over_cols(c.log2())
    recentre = torch.where(mean_exponent.abs() > _MAX_DRIFT, torch.exp2(-mean_exponent.round()), 1.0)
    r = c.new_ones(gradient.shape[:-1]) if row_unit is None else row_unit
    flags = torch.zeros(gradient.shape[:-2], dtype=torch.bool, device=gradient.device)
    for _ in range(iterations):
        r, unfit_rows = next_scale(cols, sum_over_cols(row_pass(gradient, c, row_unit)), row_unit, r)
        if keep is not None:
            r, unfit_rows = r * keep, unfit_rows & keep
        c, unfit_cols = next_scale(rows, sum_over_rows(col_pass(gradient, r, col_unit)), col_unit, c)
        flags = flags | unfit_rows.any(-1) | unfit_cols.any(-1)
    return r / recentre, c * recentre, flags


def largest_scale(dtype: torch.dtype) -> float:
    """Return a power of two below the largest number of ``dtype``: as a scale it keeps products finite."""
    return float(2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - 2))


def bounded(c: Tensor) -> Tensor:
    """Return the column scales of one update as the start of the next."""
    return c.clamp(1 / _BOUND, _BOUND)


def units(gradient: Tensor, c: Tensor, sum_over_cols: Callable[[Tensor], Tensor] = _unchanged) -> Tensor:
    """Return the powers of two that bring Σ_j |G_ij| c_j into [1/2, 1), of shape (..., m); 1 for a row of zeros.

    Args:
        gradient: (..., m, n).
        c: (..., n), positive.
        sum_over_cols: completes sums over columns where they are sharded.
    """
    sizes = torch.empty(gradient.shape[:-1], dtype=torch.float64, device=gradient.device)
    for index in row_slices(gradient):
        weights = cols_of(c, index).to(torch.float64).unsqueeze(-2)
        sizes[index] = (rows_of(gradient, index).to(torch.float64).abs() * weights).sum(-1)
    return powers(sum_over_cols(sizes), c.dtype)


def powers(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the powers of two that bring ``sizes`` into [1/2, 1), as ``dtype``; 1 where that is not possible."""
    largest = largest_scale(dtype)
    unit = torch.ldexp(torch.ones_like(sizes), -torch.frexp(sizes)[1]).clamp(1 / largest, largest)
    return torch.where((sizes > 0) & sizes.isfinite(), unit, 1.0).to(dtype)


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
    if c is None:
        c = torch.ones(*gradient.shape[:-2], cols, dtype=dtype, device=gradient.device)
    c = bounded(c.to(dtype))
    row_unit = col_unit = None
    for _ in range(2):
        r, balanced, flags = iterate(
            gradient, c, rows, cols, iterations, row_unit, col_unit, None, chunked_row_pass, chunked_col_pass
        )
        if not bool(flags.any()):
            return r, balanced
        row_unit = units(gradient, c)
        col_unit = units(gradient.mT, row_unit)
    raise ValueError("gradient must be finite, got infinite or NaN entries")


def balance(gradient: Tensor, iterations: int = 1, c: Tensor | None = None) -> Tensor:
    """Return the balanced gradient X = diag(r) · G · diag(c) as a matrix.

    Arguments, errors and source: see :func:`scale_vectors`. X has the shape of ``gradient``, is float32 (float64 for a
    float64 gradient), and its entries have RMS 1.
    """
    r, c = scale_vectors(gradient, iterations, c)
    return gradient.to(r.dtype) * r.unsqueeze(-1) * c.unsqueeze(-2)


def row_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return Σ_j M_ij v_j (..., m) in the dtype of ``vector``."""
    return (matrix.to(vector.dtype) * vector.unsqueeze(-2)).sum(-1)


def col_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return Σ_i M_ij v_i (..., n) in the dtype of ``vector``."""
    return (matrix.to(vector.dtype) * vector.unsqueeze(-1)).sum(-2)


def blocked_col_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Do :func:`col_product` :func:`by_blocks`."""
    return by_blocks(col_product, matrix, vector)


def chunked_row_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Do :func:`row_product` with bounded scratch and no compiler."""
    if matrix.dtype == vector.dtype:
        return torch.matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)
    out = vector.new_empty(matrix.shape[:-1])
    for index in row_slices(matrix):
        part = rows_of(matrix, index).to(vector.dtype)
        out[index] = torch.matmul(part, cols_of(vector, index).unsqueeze(-1)).squeeze(-1)
    return out


def chunked_col_product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Do :func:`col_product` with bounded scratch and no compiler."""
    return chunked_row_product(matrix.mT, vector)


def power_iteration(
    gradient: Tensor,
    r: Tensor,
    c: Tensor,
    v: Tensor,
    iterations: int = 1,
    row_product: Product = chunked_row_product,
    col_product: Product = chunked_col_product,
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
        row_product: G times a vector (..., n), local part.
        col_product: Gᵀ times a vector (..., m), local part.
        sum_over_cols: completes sums over columns where they are sharded.
        sum_over_rows: completes sums over rows where they are sharded.

    Returns:
        σ (...), from below; and the right singular vectors v (..., n) to start from next time. Where X v is zero, σ is
        0 and v is unchanged.
    """
    sigma = torch.zeros(gradient.shape[:-2], dtype=c.dtype, device=c.device)
    for _ in range(iterations):
        u = r * sum_over_cols(row_product(gradient, c * v))
        next_v = c * sum_over_rows(col_product(gradient, r * u))
        u_norm, v_norm = sum_over_rows(u.square().sum(-1)).sqrt(), sum_over_cols(next_v.square().sum(-1)).sqrt()
        alive = v_norm > 0
        sigma = torch.where(alive, v_norm / u_norm, 0.0)
        v = torch.where(alive.unsqueeze(-1), next_v / v_norm.unsqueeze(-1), v)
    return sigma, v
