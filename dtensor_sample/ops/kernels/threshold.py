"""Searching thresholds: the largest value such that tokens at or above it amount to a target.

The first pass over a row keeps the largest value of each block of about 128 logits, its top: only
blocks with a top that large can hold values of a certain size, and only those are read.

If those blocks hold few tokens of that size, as they mostly do for top-k, all are listed and each
is compared with all others: what lies at or above each is known at once. Otherwise the threshold is
searched among all values between two bounds: each turn adds up what lies at or above three of them,
the middle one by rank, which halves the range, and two close around where a straight line through
the amounts at both bounds would meet the target, which often does much better.
"""

import torch
import triton
import triton.language as tl

from dtensor_sample.ops.kernels.edits import fetch
from dtensor_sample.ops.kernels.values import integer_sum, integer_weight, unit_sum, weight
from dtensor_sample.ops.parts import PARTS

_PARTS = tl.constexpr(PARTS)
_INF = tl.constexpr(float("inf"))
SHIFT_OF = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that are zeros when it comes from a shorter float."""
LISTED = 256
"""Tokens that a list has room for."""
_LISTED = tl.constexpr(LISTED)
_AT_ONCE = tl.constexpr(16)
"""Listed tokens that all others are compared with at once."""


@triton.jit
def rank_of(value, SHIFT: tl.constexpr):
    """An int64 that orders as the values do: 0 for +0, and the next for the next value."""
    return short_rank_of(value, SHIFT).to(tl.int64)


@triton.jit
def short_rank_of(value, SHIFT: tl.constexpr):
    """An int32 that orders as the values do."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def value_of(rank, SHIFT: tl.constexpr):
    """The float32 value of a rank."""
    bits = (rank << SHIFT) | tl.where(rank < 0, (1 << SHIFT) - 1, 0)
    bits = bits.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def fraction(mass, top_p):
    """ceil(top_p * mass / 2**31), at least 1."""
    low = top_p * (mass & 0x7FFFFFFF) + 0x7FFFFFFF
    return tl.maximum(top_p * (mass >> 31) + (low >> 31), 1)


@triton.jit
def largest_top(tops, k, highest, SHIFT: tl.constexpr):
    """The k-th largest top; about the least float32 if there are fewer than k."""
    low = rank_of(tl.full([], -3.4028234663852886e38, tl.float32), SHIFT)
    high = highest
    while low < high:
        step = (high - low + 3) // 4
        r1 = tl.minimum(low + step, high)
        r2 = tl.minimum(r1 + step, high)
        r3 = tl.minimum(r2 + step, high)
        # Three counts of at most 2**20 in one integer.
        each = (tops >= value_of(r1, SHIFT)).to(tl.int64)
        each += (tops >= value_of(r2, SHIFT)).to(tl.int64) << 21
        each += (tops >= value_of(r3, SHIFT)).to(tl.int64) << 42
        counts = tl.sum(each, 0)
        enough1 = (counts & 0x1FFFFF) >= k
        enough2 = ((counts >> 21) & 0x1FFFFF) >= k
        enough3 = (counts >> 42) >= k
        high = tl.where(enough2, tl.where(enough3, high, r3 - 1), tl.where(enough1, r2, r1) - 1)
        low = tl.where(enough2, tl.where(enough3, r3, r2), tl.where(enough1, r1, low))
    return value_of(low, SHIFT)


@triton.jit
def reach(x, x_amounts, y, y_amounts, low, high, target, SHIFT: tl.constexpr):
    """The highest rank from low to high at which held values amount to a target.

    At `low` they are taken to. Amounts of x and, if there is one, y: none is negative.
    """
    while low < high:
        step = (high - low + 3) // 4
        r1 = tl.minimum(low + step, high)
        r2 = tl.minimum(r1 + step, high)
        r3 = tl.minimum(r2 + step, high)
        enough1 = held(x, x_amounts, y, y_amounts, value_of(r1, SHIFT)) >= target
        enough2 = held(x, x_amounts, y, y_amounts, value_of(r2, SHIFT)) >= target
        enough3 = held(x, x_amounts, y, y_amounts, value_of(r3, SHIFT)) >= target
        above = tl.where(enough2, tl.where(enough3, high, r3 - 1), tl.where(enough1, r2, r1) - 1)
        low = tl.where(enough2, tl.where(enough3, r3, r2), tl.where(enough1, r1, low))
        high = above
    return low


@triton.jit
def held(x, x_amounts, y, y_amounts, value):
    """What held values at or above one amount to."""
    total = tl.sum(tl.where(x >= value, x_amounts, tl.zeros_like(x_amounts)))
    if y is not None:
        total += tl.sum(tl.where(y >= value, y_amounts, tl.zeros_like(y_amounts)))
    return total


@triton.jit
def choose(listed, chosen, block):
    """List the chosen blocks; returns how many."""
    tl.debug_barrier()  # all threads are done with the last list
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), 0) - 1, block, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def read(
    x, edits, listed, few, start, stride_s, stride_v, first_ptr, source, width,
    part_columns, vocab_size,
    TOP: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Listed blocks, b of them.

    Returns:
        [b, STEPS, CHUNK] values and their columns among those of the whole row; [b] parts, and
        whether there are as many blocks.
    """
    entry = start + tl.arange(0, TILE // (STEPS * CHUNK))
    exists = entry < few
    block = tl.load(listed + entry, mask=exists, other=0)
    part = block // BLOCKS
    segment = part // _PARTS
    count = tl.minimum(tl.maximum(vocab_size - tl.load(first_ptr + segment), 0), width)
    count = tl.where(exists & (source >= 0), count, 0).to(tl.int32)
    step = tl.arange(0, STEPS)[None, :, None]
    offset = (block % BLOCKS * CHUNK)[:, None, None] + step * (BLOCKS * CHUNK)
    chunk = (part % _PARTS * part_columns)[:, None, None] + offset
    column = chunk + tl.arange(0, CHUNK)[None, None, :]
    present = exists[:, None, None] & (offset < part_columns)
    if ALIGNED:  # chunks are read whole or not at all, hence in one load each
        present = tl.broadcast_to(present & (chunk < width), column.shape)
    else:
        present = present & (column < width)
    x += segment.to(tl.int64)[:, None, None] * stride_s
    wanted = present & (column < count[:, None, None])
    base = segment.to(tl.int64)[:, None, None] * width
    values = fetch(x, column, stride_v, present, wanted, base, edits, TOP, UNIT)
    return values, base.to(tl.int32) + column, part, exists


@triton.jit
def list_tokens(
    tokens, x, edits, listed, few, least,
    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
    TOP: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many tokens of listed blocks are >= least; the first LISTED of them are listed.

    Args:
        tokens: [2, LISTED] int32, out: the bits of their values, and their columns.
        least: a finite value.
    """
    have = tl.zeros([], tl.int32)
    for start in range(0, few, TILE // (STEPS * CHUNK)):
        values, column, _, _ = read(
            x, edits, listed, few, start, stride_s, stride_v, first_ptr, source, width,
            part_columns, vocab_size, TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS, TILE,
        )  # fmt: skip
        values = tl.reshape(values, [TILE]) + 0.0  # -0 is +0
        chosen = (values >= least).to(tl.int32)
        place = have + tl.cumsum(chosen, 0) - 1
        room = (chosen > 0) & (place < _LISTED)
        tl.store(tokens + place, values.to(tl.int32, bitcast=True), mask=room)
        tl.store(tokens + _LISTED + place, tl.reshape(column, [TILE]), mask=room)
        have += tl.sum(chosen, 0)
    tl.debug_barrier()  # all is written
    return have


@triton.jit
def listed_amounts(
    tokens, have, peak, least, scale, unit_bits, weighted, EXACT: tl.constexpr
):  # fmt: skip
    """[LISTED] listed values, -inf beyond the last; how many are as large, and what those weigh.

    Nothing if not `weighted`.
    """
    entry = tl.arange(0, _LISTED)
    value = _listed_value(tokens, entry, have)
    counts = tl.zeros([_LISTED, _AT_ONCE], tl.int32)
    masses = tl.zeros([_LISTED, _AT_ONCE], tl.int64)
    for start in range(0, have, _AT_ONCE):
        theirs = _listed_value(tokens, start + tl.arange(0, _AT_ONCE), have)
        as_large = theirs[None, :] >= value[:, None]
        counts += as_large.to(tl.int32)
        if weighted:
            weights = integer_weight(theirs, peak, least, scale, unit_bits, EXACT)
            masses += tl.where(as_large, weights[None, :], 0)
    return value, tl.sum(counts, 1), tl.sum(masses, 1)


@triton.jit
def listed_columns(tokens, have):
    """[LISTED] columns of listed tokens among those of the whole row; 0 beyond the last."""
    entry = tl.arange(0, _LISTED)
    return tl.load(tokens + _LISTED + entry, mask=entry < have, other=0)


@triton.jit
def _listed_value(tokens, entry, have):
    nothing = tl.full([], -_INF, tl.float32).to(tl.int32, bitcast=True)
    bits = tl.load(tokens + entry, mask=entry < have, other=nothing)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def amounts(
    x, edits, listed, few, v0, v1, v2, peak, least, lowest, scale,
    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
    WEIGHTED: tl.constexpr, PACKED: tl.constexpr, TOP: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, unit_bits, EXACT: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number or weight of tokens of listed blocks that are >= least and >= each of 3 values."""
    IN_FLOATS: tl.constexpr = WEIGHTED and EXACT
    zeros = tl.zeros([TILE // (STEPS * CHUNK), STEPS, CHUNK], tl.int64)
    if IN_FLOATS:
        zeros = unit_sum(zeros, unit_bits)
    a0, a1, a2 = zeros, zeros, zeros
    for start in range(0, few, TILE // (STEPS * CHUNK)):
        values, _, _, _ = read(
            x, edits, listed, few, start, stride_s, stride_v, first_ptr, source, width,
            part_columns, vocab_size, TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS, TILE,
        )  # fmt: skip
        if IN_FLOATS:
            amount = weight(values, peak, least, lowest, scale, "exact")
        elif WEIGHTED:
            amount = integer_weight(values, peak, least, scale, unit_bits, EXACT)
        else:
            amount = ((values >= least) & (values > -_INF)).to(tl.int64)
        nothing = tl.zeros_like(amount)
        if PACKED and not WEIGHTED:  # three counts in one integer
            a0 += tl.where(values >= v0, amount, nothing)
            a0 += tl.where(values >= v1, amount << 21, nothing)
            a0 += tl.where(values >= v2, amount << 42, nothing)
        else:
            a0 += tl.where(values >= v0, amount, nothing)
            a1 += tl.where(values >= v1, amount, nothing)
            a2 += tl.where(values >= v2, amount, nothing)
    if PACKED and not WEIGHTED:
        counts = tl.sum(a0)
        a0, a1, a2 = counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42
    else:
        if IN_FLOATS:
            a0, a1, a2 = (
                integer_sum(a0, unit_bits),
                integer_sum(a1, unit_bits),
                integer_sum(a2, unit_bits),
            )
        a0, a1, a2 = tl.sum(a0), tl.sum(a1), tl.sum(a2)
    return a0, a1, a2


@triton.jit
def search(
    x, edits, listed, few, low, high, at_low, beyond, target, r1, r2,
    peak, least, lowest, scale,
    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
    WEIGHTED: tl.constexpr, PACKED: tl.constexpr, TOP: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, SHIFT: tl.constexpr, unit_bits,
    EXACT: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The highest rank from low to high at which tokens amount to the target.

    At `low` they amount to at_low >= target, beyond `high` to beyond < target. It is expected to
    lie between r1 and r2.
    """
    while low < high:
        middle = low + (high - low + 1) // 2
        r1 = tl.minimum(tl.maximum(r1, low + 1), high)
        r2 = tl.minimum(tl.maximum(r2, low + 1), high)
        a0, a1, a2 = amounts(
            x, edits, listed, few,
            value_of(middle, SHIFT), value_of(r1, SHIFT), value_of(r2, SHIFT),
            peak, least, lowest, scale,
            stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
            WEIGHTED, PACKED, TOP, UNIT, ALIGNED, unit_bits, EXACT,
            BLOCKS, CHUNK, STEPS, TILE,
        )  # fmt: skip
        low, at_low, high, beyond = _narrow(low, at_low, high, beyond, middle, a0, target)
        low, at_low, high, beyond = _narrow(low, at_low, high, beyond, r1, a1, target)
        low, at_low, high, beyond = _narrow(low, at_low, high, beyond, r2, a2, target)
        r1, r2 = expect(low, at_low, high, beyond, target, SHIFT)
    return low


@triton.jit
def expect(low, at_low, high, beyond, target, SHIFT: tl.constexpr):
    """Two ranks around where a straight line through the amounts at both bounds would arrive."""
    share = (at_low - target).to(tl.float32) / tl.maximum(at_low - beyond, 1).to(tl.float32)
    from_value = value_of(low, SHIFT)
    guess = rank_of(from_value + (value_of(high, SHIFT) - from_value) * share, SHIFT)
    near = (high - low) // 32 + 1
    return guess - near, guess + near


@triton.jit
def _narrow(low, at_low, high, beyond, rank, amount, target):
    """Bounds of a search after one more amount is known."""
    enough = amount >= target
    raised = enough & (rank > low)
    lowered = (amount < target) & (rank <= high)
    return (
        tl.where(raised, rank, low),
        tl.where(raised, amount, at_low),
        tl.where(lowered, rank - 1, high),
        tl.where(lowered, amount, beyond),
    )
