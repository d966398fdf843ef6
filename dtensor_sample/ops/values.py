"""What a logit is worth: its value, whether it is kept, and its integer weight. Plain torch.

Every float operation that precedes a decision is in this file and in `edits.py` (and, for GPUs, in
their counterparts in `kernels/`), and runs only inside the custom ops of this package, so tracing
never computes it in another way. Weights are integers: they add up to the same sum in any order,
over any blocks and shards, which is what makes every layout agree.

The exponential uses nothing but float32 operations that IEEE 754 rounds in one way, fused
multiply-adds among them, so CPUs and GPUs agree on it. An exponent y, the difference to the largest
logit times log2(e) / temperature, is split without loss into the nearest integer n and a fraction
f, which is then rounded; 2**f comes from a polynomial within 1.6e-7, monotone, and 1 at 0.

Rejected (H200, torch 2.11, 2026-11-29; sums of weights of 256 x 129280 bf16 logits, 16 us to read
them): an integer polynomial of degree 6 with 31-bit coefficients, error 3e-9, took 55 us, since the
high word of a product is a quarter-rate instruction; fused multiply-adds 29 us; the GPU's own
approximate `exp2` 23 us, but no CPU knows its bits. Float32 `exp` on CPUs differs between vector
body and tail, and between eager and compiled code.
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.edits import Edits, edited

COEFFICIENTS = (1.0, 0.69314702, 0.24022232, 0.05550685, 0.00967197, 0.00132777)
"""Of 2**f on [-1/2, 1/2], constant term first; as float32."""
LOWEST_EXPONENT = -64.0
"""A token with a smaller exponent weighs nothing, whatever the vocabulary size."""

_AT_ONCE = 1 << 16
"""Tokens to weigh at once: what lies between the passes over them then stays in a core's cache."""
_BY_ROWS = 1 << 22
"""Tokens of as many rows as `values_by_rows` yields at once."""


def weight_bits(vocab_size: int) -> int:
    """S: the largest token of a row weighs 2**S, and a whole row at most 2**62."""
    return 62 - (vocab_size - 1).bit_length()


def token_ids(x_NSv: Tensor, first_id_S: Tensor) -> Tensor:
    """[S, v] int64: the vocabulary id of each column of each segment."""
    return first_id_S[:, None] + torch.arange(x_NSv.shape[2], device=x_NSv.device)


def values(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
) -> Tensor:
    """[R, S, v] float32 values of some rows of logits, edited.

    NaN and ids beyond the vocabulary are -inf, +inf is the largest finite value, -0 is +0.

    Args:
        x_NSv: [N, S, v] logits, any strides, float32, bfloat16 or float16.
        first_id_S: [S] int64, the vocabulary id of each segment's first column; where there are
            edits, of segments that follow one another without a gap.
        rows_R: [R] int64, which rows; -1 stands for a row of -inf. None: all N.
        edits: of the R rows, see `edited`.
        vocab_size: ids from here on do not exist.
    """
    value_RSv = _clean(_rows(x_NSv, rows_R))
    if edits:
        value_RX = value_RSv.flatten(1)
        column_1X = torch.arange(value_RX.shape[1], device=x_NSv.device)[None]
        value_RSv = edited(value_RX, column_1X, first_id_S, edits).view(value_RSv.shape)
    value_RSv.masked_fill_(token_ids(x_NSv, first_id_S) >= vocab_size, -torch.inf)
    if rows_R is not None:
        value_RSv.masked_fill_((rows_R < 0)[:, None, None], -torch.inf)
    return value_RSv


def values_by_rows(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
) -> Iterator[tuple[slice, Tensor]]:
    """Which rows, and their values [r, S, v], a few rows at a time; arguments as in `values`."""
    step = max(1, _BY_ROWS // max(1, x_NSv.shape[1] * x_NSv.shape[2]))
    for begin in range(0, count_rows(x_NSv, rows_R), step):
        part = slice(begin, begin + step)
        own = Edits(*edits).at(part) if edits else ()
        if rows_R is None:
            yield part, values(x_NSv[part], first_id_S, None, own, vocab_size)
        else:
            yield part, values(x_NSv, first_id_S, rows_R[part], own, vocab_size)


def values_at(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    segment_RW: Tensor,
    column_RW: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """[R, 1, W] values of a few columns of each row, and their ids; arguments as in `values`.

    Of columns that there are not the value is -inf, and the id means nothing.
    """
    row_R = torch.arange(len(x_NSv), device=x_NSv.device) if rows_R is None else rows_R
    exists_RW = (row_R >= 0)[:, None] & (column_RW >= 0) & (column_RW < x_NSv.shape[2])
    id_RW = first_id_S[segment_RW] + column_RW
    exists_RW &= id_RW < vocab_size
    column_RW = column_RW.clamp(0, x_NSv.shape[2] - 1)
    value_RW = _clean(x_NSv[row_R.clamp(min=0)[:, None], segment_RW, column_RW])
    value_RW = edited(value_RW, segment_RW * x_NSv.shape[2] + column_RW, first_id_S, edits)
    return torch.where(exists_RW, value_RW, -torch.inf)[:, None], id_RW[:, None]


def _clean(x: Tensor) -> Tensor:
    """A float32 copy without NaN, +inf and -0."""
    copy = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    top = torch.finfo(x.dtype).max
    return copy.add_(0.0).nan_to_num_(nan=-torch.inf, posinf=top, neginf=-torch.inf)


def count_nans(x_NSv: Tensor, first_id_S: Tensor, rows_R: Tensor | None, vocab_size: int) -> Tensor:
    """[R, S] int64: NaN among the logits of the vocabulary; arguments as in `values`."""
    nan_RSv = _rows(x_NSv, rows_R).isnan() & (token_ids(x_NSv, first_id_S) < vocab_size)
    nans_RS = nan_RSv.sum(2)
    return nans_RS if rows_R is None else nans_RS * (rows_R >= 0)[:, None]


def _rows(x_NSv: Tensor, rows_R: Tensor | None) -> Tensor:
    return x_NSv if rows_R is None else x_NSv[rows_R.clamp(min=0)]


def count_rows(x_NSv: Tensor, rows_R: Tensor | None) -> int:
    """R, for the fakes of ops."""
    return x_NSv.shape[0] if rows_R is None else rows_R.shape[0]


def weights(
    value_RSv: Tensor, peak_R: Tensor, floor_R: Tensor, scale_R: Tensor, vocab_size: int
) -> Tensor:
    """[R, S, v] int64: 2**S * 2**((value - peak) * scale) to the nearest integer; 0 where not kept.

    Args:
        value_RSv: float32 from `values`.
        peak_R: float32, the largest value of each row; others larger than it weigh as it does.
        floor_R: float32, the threshold: kept are values >= it, and never -inf.
        scale_R: float32, log2(e) / temperature.
        vocab_size: V, fixes S.
    """
    weight_RSv = torch.empty_like(value_RSv, dtype=torch.int64)
    R, S, v = value_RSv.shape
    columns = max(1, _AT_ONCE // max(S, 1))
    rows = max(1, _AT_ONCE // max(S * min(columns, v), 1))
    for r, c in itertools.product(range(0, R, rows), range(0, v, columns)):
        here = (slice(r, r + rows), slice(None), slice(c, c + columns))
        peak, floor, scale = (x[r : r + rows, None, None] for x in (peak_R, floor_R, scale_R))
        weight_RSv[here] = _weights(value_RSv[here], peak, floor, scale, vocab_size)
    return weight_RSv


def _weights(value: Tensor, peak: Tensor, floor: Tensor, scale: Tensor, vocab_size: int) -> Tensor:
    lowest = -torch.finfo(torch.float32).max
    dropped = value < floor.clamp(min=lowest)
    below = (value - peak).clamp_(min=lowest, max=0.0)
    exponent = below.double().mul_(scale.double())
    exponent.masked_fill_(dropped, LOWEST_EXPONENT).clamp_(min=LOWEST_EXPONENT)
    whole = exponent.round()
    power = _power((exponent - whole).float().double())
    biased = whole.add_(weight_bits(vocab_size) + 1023).to(torch.int64)
    return power.mul_((biased << 52).view(torch.float64)).add_(0.5).to(torch.int64)


def spreads(
    value_RSv: Tensor, peak_R: Tensor, floor_R: Tensor, scale_R: Tensor, vocab_size: int
) -> Tensor:
    """[R, S, v] int64: w * -y of each weight w = 2**(S + y), rounded down; arguments of `weights`.

    No more than 0.54 * 2**S, so that a row's sum stays below 2**62.
    """
    weight_RSv = weights(value_RSv, peak_R, floor_R, scale_R, vocab_size)
    lowest = -torch.finfo(torch.float32).max
    below_RSv = (value_RSv - peak_R[:, None, None]).clamp_(min=lowest)
    exponent_RSv = below_RSv.double().mul_(scale_R.double()[:, None, None])
    exponent_RSv.masked_fill_(weight_RSv == 0, 0)
    return exponent_RSv.neg_().mul_(weight_RSv).to(torch.int64)


def _power(fraction: Tensor) -> Tensor:
    """2**fraction by fused multiply-adds of float32 numbers, which float64 holds here."""
    coefficients = torch.tensor(COEFFICIENTS, dtype=torch.float32).tolist()
    power = torch.full_like(fraction, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        power = _fused_multiply_add(power, fraction, coefficient)
    return power


def _fused_multiply_add(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Float32 a * b + c > 0 rounded once, for |a * b| <= c; all held in float64.

    Float64 holds the product exactly. The sum may have to be rounded to float64 and then again to
    float32, which goes wrong where the first rounding ends halfway between two float32: there the
    error of the first decides.
    """
    total = torch.addcmul(torch.full((), c, dtype=a.dtype, device=a.device), a, b)
    # Halfway, the low 29 bits are a one and zeros: so rare that one look at all low words pays.
    if (total.view(torch.int32) << 3).amin() == -(1 << 31):
        halfway = (total.view(torch.int64) & (1 << 29) - 1) == 1 << 28
        error = a * b - (total - c)
        total = (total.view(torch.int64) + error.sign().to(torch.int64) * halfway).view(total.dtype)
    return total.float().double()


def ordered_keys(value: Tensor) -> Tensor:
    """Float32 values as int64 in [0, 2**32) of the same order; values must not be NaN or -0."""
    bits = value.view(torch.int32)
    return (bits ^ (bits >> 31 & (1 << 31) - 1)).to(torch.int64) + (1 << 31)


def from_ordered_keys(key: Tensor) -> Tensor:
    """The float32 values of ordered keys."""
    bits = torch.where(key >= 1 << 31, key - (1 << 31), -1 - key)
    return bits.to(torch.int32).view(torch.float32)


def key_value(prefix: Tensor, bits: int) -> Tensor:
    """The float32 value whose ordered key begins with `bits` given bits.

    The bits left out of a 16-bit float are zeros in the float: zeros in the key of a positive
    value, ones in that of a negative one.
    """
    rest = 32 - bits
    fill = torch.where(prefix >> bits - 1 == 1, 0, (1 << rest) - 1)
    return from_ordered_keys(prefix << rest | fill)
