"""Stochastic rounding of float32 values to bfloat16 weights.

A bfloat16 weight keeps 8 significant bits, so an update smaller than about 1/256 of the weight is lost when it is
rounded to nearest. Rounding to either neighbour at random, in proportion to how near it is, makes the expected weight
exact.

The random number of an element is (α_i + β_j) mod 1, where α belongs to its row and β to its column and both are
hashes of (seed, step, parameter, global index): no generator state has to be kept, and replicas, resumed runs and
re-sharded runs draw the same bits. Any two elements of a matrix draw independently of each other, which is all that the
expectation and the variance of a sum of rounding errors depend on; hashing m + n indices instead of m·n keeps integer
arithmetic out of the update's inner loop.
"""

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_BITS = 15  # of randomness; float32 has 16 more than bfloat16, and the last is set so that no sum is ever a tie at 0
_LARGEST = 2.0**100


def _splitmix64(*words: int) -> int:
    z = 0
    for word in words:
        z = ((z ^ (word & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        z ^= z >> 31
    return z


def stream_key(seed: int, step: int, parameter: int) -> int:
    """Hash the optimizer's seed, the number of the update and the position of the parameter to 63 bits."""
    return _splitmix64(seed, step, parameter) >> 1


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values below 2^32 so that every input bit reaches every output bit (a 32-bit finaliser)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _hash(indices: Tensor, key: Tensor) -> Tensor:
    mixed = _mix(_mix((indices ^ key) & 0xFFFFFFFF) ^ (((indices ^ key) >> 32) & 0xFFFFFFFF))
    return (mixed >> (32 - _BITS)).to(torch.float32) * 2.0**-_BITS


def uniforms(rows: Tensor, cols: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Hash global indices to the random numbers of rows and columns, in [0, 1).

    Those of columns are multiples of 2^-15, those of rows odd multiples of 2^-16, and so is the sum of two.

    Args:
        rows: int64, (..., m): global row numbers, leading axes counted in.
        cols: int64, (n,): global column numbers.
        keys: int64, broadcastable to (..., 1): see :func:`stream_key`.

    Returns:
        float32 tensors of shapes (..., m) and (..., n), as :func:`stochastic_round` takes them.
    """
    return _hash(rows, keys) + 2.0 ** -(_BITS + 1), _hash(cols, ~keys)


def element_uniforms(row_uniforms: Tensor, col_uniforms: Tensor) -> Tensor:
    """Return the random numbers of elements, float32 (..., m, n) in [0, 1), from those of rows and columns."""
    uniform = row_uniforms.unsqueeze(-1) + col_uniforms.unsqueeze(-2)
    return uniform - uniform.floor()


def _leading_power(x: Tensor) -> Tensor:
    """Return the largest power of two in float32 values below 2^104, with their sign; 0 for 0.

    After S. M. Rump, "Error estimation of floating-point summation and dot product" (2012), algorithm 3.5: rounding
    errors do what would else take integer arithmetic or comparisons, which compilers vectorise badly.
    """
    q = x * (2.0**23 + 1)
    return q - q * (1 - 2.0**-24)


def stochastic_round(values: Tensor, row_uniforms: Tensor, col_uniforms: Tensor) -> Tensor:
    """Round float32 values to one of their two bfloat16 neighbours, with the given randomness.

    The probability of either is right to 2^-16, and without a bias that would be common to all values.

    Args:
        values: float32, shape (..., m, n). From 2^100 on, not finite or subnormal, they are not rounded stochastically.
        row_uniforms: float32, shape (..., m): see :func:`uniforms`.
        col_uniforms: float32, shape (..., n).

    Returns:
        float32 tensor whose values are exact in bfloat16, but for the exceptions above.
    """
    uniform = row_uniforms.unsqueeze(-1) + col_uniforms.unsqueeze(-2)
    uniform = uniform - uniform.floor()
    power = _leading_power(values)
    # The distance of two bfloat16 values here is 2^-7 of that power; up to half of it, either way, is added.
    moved = values + power * (uniform * 2.0**-7 - 2.0**-8)
    shift = power * (1.5 * 2.0**16)  # of this size, a float32 has its last bit where a bfloat16 of values' size has it
    return torch.where(values.abs() < _LARGEST, (moved + shift) - shift, values)
