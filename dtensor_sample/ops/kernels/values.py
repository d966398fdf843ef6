"""What `ops/values.py` computes, as device functions: the same operations, hence the same bits.

A weight is handed on as a float64 in units in which adding it to `unit_sum` rounds it to the
nearest integer, half up: the sum's bits then are those of `unit_sum` plus the integer. So one
float64 addition rounds a weight and adds it to an integer sum, where 64-bit shifts and additions
would take ten integer instructions. The lowest bit of a weight is always set, below all bits that
it has, so that no half is left to round to even.
"""

import os

import triton
import triton.language as tl

from dtensor_sample.ops.values import COEFFICIENTS, LOWEST_EXPONENT

SIZES = (
    "K", "blocks", "cache_width", "column_stride", "draft_width", "first_part", "floors", "level",
    "parts", "requests", "row_stride", "rows", "segment_stride", "segments", "size",
    "spare_row_stride", "spare_segment_stride", "step", "stride_v", "tokens", "unit_bits",
    "use_top_k", "use_top_p", "vocab_size", "width",
)  # fmt: skip
"""Arguments of kernels whose values bring no variant of the kernel's own: compiling takes long."""
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in COEFFICIENTS)
_LOWEST = tl.constexpr(LOWEST_EXPONENT)
_INF = tl.constexpr(float("inf"))
_LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)
_SMALL_SCALE = tl.constexpr(1e-36)
_NEAREST = tl.constexpr(1.5 * 2**23)
"""A sum with it is rounded to the nearest integer, which its low bits then hold."""
_ONE = tl.constexpr(127)
"""The float64 exponent field of a weight of 2**S."""
EXACT_BITS = 50
"""Up to this S, sums of `unit_sum` and weights are exact; vocabularies up to 2048 exceed it."""


@triton.jit
def fused_multiply_add(a, b, c):
    """A * b + c in float32, rounded once."""
    c = tl.zeros_like(a) + c
    if _INTERPRETED:  # the interpreter's tl.fma rounds twice; see `_fused_multiply_add` of the twin
        product = a.to(tl.float64) * b.to(tl.float64)
        total = product + c.to(tl.float64)
        error = product - (total - c.to(tl.float64))
        bits = total.to(tl.int64, bitcast=True)
        up = tl.where(error > 0, 1, tl.where(error < 0, -1, 0))
        bits += tl.where((bits & 0x1FFFFFFF) == 0x10000000, up, 0)
        rounded = bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        rounded = tl.fma(a, b, c)
    return rounded


@triton.jit
def nearest(x, dtype: tl.constexpr):
    """Float32 numbers in a dtype of logits, each the nearest one, half to even."""
    if _INTERPRETED and dtype == tl.bfloat16:  # the interpreter cuts bits off
        bits = x.to(tl.uint32, bitcast=True)
        up = bits + 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, up & 0xFFFF0000, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def unit_sum(like, unit_bits):
    """A float64 for each of `like` to which weights are added: 2**52 units."""
    bits = tl.full(like.shape, _ONE - unit_bits + 52, tl.int64) << 52
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def integer_sum(total, unit_bits):
    """The integer that was added to `unit_sum`."""
    return total.to(tl.int64, bitcast=True) - (tl.full([], _ONE - unit_bits + 52, tl.int64) << 52)


@triton.jit
def weight(x, peak, least, lowest, scale, KEEP: tl.constexpr):
    """2**((x - peak) * scale) as a float64 to add to `unit_sum`; almost 0 where not kept.

    Args:
        x: float32 values, or NaN, which is never kept.
        peak, least, lowest, scale: of the row, see `row_limits`.
        KEEP: "any" keeps all that weighs anything; "least" of it what is >= least. Both need a row
            that is tame, see `is_tame`. "exact" does what "least" does, for every row, even one
            that has larger values than its peak.
    """
    below = x - peak
    if KEEP == "any":
        below = tl.maximum(below, lowest)  # of NaN, too, the latter
    elif KEEP == "least":
        below = tl.where(x >= least, below, lowest)
    else:
        below = tl.minimum(tl.maximum(below, -_LARGEST_FLOAT32), 0.0)
        kept = (x >= least) & (below * scale >= _LOWEST)
        below = tl.where(kept, below, 0.0)
    whole = fused_multiply_add(below, scale, _NEAREST)
    fraction = fused_multiply_add(below, scale, _NEAREST - whole)
    power = fused_multiply_add(tl.zeros_like(fraction) + _C5, fraction, _C4)
    power = fused_multiply_add(power, fraction, _C3)
    power = fused_multiply_add(power, fraction, _C2)
    power = fused_multiply_add(power, fraction, _C1)
    power = fused_multiply_add(power, fraction, _C0)
    bits = power.to(tl.uint32, bitcast=True)
    high = (bits >> 3) + (whole.to(tl.uint32, bitcast=True) << 20)
    if KEEP == "exact":
        high = tl.where(kept, high, 0)
    low = (bits << 29) | 1
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.float64, bitcast=True)


@triton.jit
def integer_weight(x, peak, least, scale, unit_bits, EXACT: tl.constexpr):
    """The int64 weight of each x, of any row."""
    units = weight(x, peak, least, 0.0, scale, "exact")
    if EXACT:
        rounded = integer_sum(unit_sum(x, unit_bits) + units, unit_bits)
    else:
        bits = (units.to(tl.int64, bitcast=True) & -2) + (
            (1023 + unit_bits - _ONE).to(tl.int64) << 52
        )
        rounded = (bits.to(tl.float64, bitcast=True) + 0.5).to(tl.int64)
    return rounded


@triton.jit
def share(
    x, peak, least, lowest, scale, factor,
    KEEP: tl.constexpr, unit_bits, EXACT: tl.constexpr,
):  # fmt: skip
    """The products of integer weights and a float64 factor of their row, rounded to float64.

    KEEP: as in `weight`; "exact" unless EXACT.
    """
    if EXACT:
        # The weight as a float64 in the units of `unit_sum`; the factor takes the rest.
        unit = unit_sum(x, unit_bits)
        total = unit + weight(x, peak, least, lowest, scale, KEEP)
        lift = tl.full([], 1023 + 1023 - _ONE + unit_bits, tl.int64) << 52
        factor *= lift.to(tl.float64, bitcast=True)
        if _INTERPRETED:
            product = (total - unit) * factor
        else:  # the same in one instruction: nothing but the result is rounded
            product = tl.fma(total, tl.zeros_like(total) + factor, unit * -factor)
    else:
        product = integer_weight(x, peak, least, scale, unit_bits, EXACT).to(tl.float64) * factor
    return product


@triton.jit
def add_truncated(total, x):
    """Total + x, the latter truncated: float64 total whole, in [2**52, 2**53), and x >= 0.

    Totals of that size have no bits for fractions, so that rounding down drops those of x.
    """
    if _INTERPRETED:
        total += tl.floor(x)
    else:
        total = tl.inline_asm_elementwise(
            "add.rm.f64 $0, $1, $2;", "=d,d,d", [total, x], tl.float64, is_pure=True, pack=1
        )
    return total


@triton.jit
def row_limits(peak, floor, scale):
    """The least value kept, and the lowest difference to the peak that need be told apart.

    What is below `floor`, -inf, or weighs nothing is below `least` or makes `weight` 0. In a tame
    row, what lies lower than `lowest` below the peak weighs nothing.
    """
    lowest = _LOWEST / tl.maximum(scale, _SMALL_SCALE)
    least = tl.maximum(floor, tl.where(scale > _SMALL_SCALE, peak + lowest, -_INF))
    return tl.maximum(least, -_LARGEST_FLOAT32), lowest


@triton.jit
def is_tame(peak, scale, TOP: tl.constexpr):
    """Whether a row has no logit of +inf and no exponent of it overflows."""
    return (peak < TOP) & (scale > _SMALL_SCALE)


@triton.jit
def load(pointer, column, stride, present, UNIT: tl.constexpr):
    """Float32 values of a block of columns of one segment, as they are; -inf where not present.

    Args:
        pointer: to column 0.
        column: int32.
        stride: between columns; 1 if UNIT.
        present: mask of what may be read, or None for all.
        UNIT: whether the stride is 1.
    """
    if not UNIT:
        column = column.to(tl.int64) * stride
    if present is None:
        x = tl.load(pointer + column)
    else:
        x = tl.load(pointer + column, mask=present, other=-_INF)
    return x.to(tl.float32)


@triton.jit
def clean(x, wanted, TOP: tl.constexpr):
    """Values as they count: -inf where not wanted, +inf as the largest finite one. NaN stays."""
    x = tl.where(wanted, x, -_INF)
    return tl.where(x > TOP, TOP, x)


@triton.jit
def source_row(rows_ptr, row, HAS_ROWS: tl.constexpr):
    """Where a row lies among the logits; -1: it has no tokens."""
    if HAS_ROWS:
        source = tl.load(rows_ptr + row)
    else:
        source = row.to(tl.int64)
    return source


@triton.jit
def segment_count(first_ptr, segment, source, width, vocab_size):
    """Columns of a segment that are ids of the vocabulary; none in a row without tokens."""
    left = tl.minimum(tl.maximum(vocab_size - tl.load(first_ptr + segment), 0), width)
    return tl.where(source < 0, 0, left).to(tl.int32)
