"""Rows whose whole vocabulary is here: all stages of `weigh`, with top-k and top-p.

The first pass keeps the largest value of each block of about 128 logits, its top. At least k logits
are as large as the k-th largest top, so only blocks with a top that large can hold the k largest
logits: some 50 of 1000 for top-k 50. Then one program a row finds its thresholds and masses from
such blocks alone. Where more are needed (top-p alone on a flat row), it reads more: it is exact for
every row.

A threshold is the largest value such that tokens at or above it amount to a target, a count or a
mass. It is searched among all values between two bounds: each turn adds up what lies at or above
three of them, the middle one by rank, which halves the range, and two close around where a straight
line through the amounts at both bounds would meet the target, which often does much better.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit_arguments, fetch, value_dtype
from dtensor_sample.ops.kernels.passes import (
    CHUNK,
    first_of,
    first_pass,
    row_peak,
    second_pass,
)
from dtensor_sample.ops.kernels.values import (
    EXACT_BITS,
    SIZES,
    integer_sum,
    integer_weight,
    row_limits,
    source_row,
    unit_sum,
    weight,
)
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.ops.parts import PARTS, part_width
from dtensor_sample.ops.values import weight_bits

_PARTS = tl.constexpr(PARTS)
_INF = tl.constexpr(float("inf"))
_TOP_P_ONE = tl.constexpr(TOP_P_ONE)
_FEW = tl.constexpr(64)
"""Blocks that top-p tries to do with before it reads all."""
_MARGIN = tl.constexpr(0.15)
"""How far, in binary exponents, a sample of a row may mislead about its nucleus."""
WARPS = 16
TILE = WARPS * 32 * CHUNK
SHIFT_OF = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits of a float32 that are zeros when it comes from a shorter float."""


@triton.jit(do_not_specialize=SIZES)
def _whole_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    part_peak_ptr,  # [R, S, PARTS] float32
    part_nans_ptr,  # [R, S, PARTS] int32
    top_ptr,  # [R, S, PARTS, blocks] of `value_dtype`
    list_ptr,  # scratch: [programs, S * PARTS * blocks] int32
    min_p_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] int64
    peak_ptr,  # out: [R] float32
    floor_ptr,  # out: [R] float32
    mass_ptr,  # zeros, out: [R, S, PARTS] int64
    argmax_ptr,  # out: [R] int64
    nans_ptr,  # out: [R] int64
    edits,  # of `edit_arguments`
    rows,  # R
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    ALIGNED: tl.constexpr,  # width divides by CHUNK
    PACKED: tl.constexpr,  # counts of tokens of a row fit 21 bits
    HAS_ROWS: tl.constexpr,
    TOP_K: tl.constexpr,  # whether any row uses top-k
    TOP_P: tl.constexpr,  # whether any row uses top-p
    SHIFT: tl.constexpr,  # float32 bits that `value_dtype` lacks
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    ALL_PARTS: tl.constexpr,  # S * PARTS, rounded up to a power of two
    ALL_BLOCKS: tl.constexpr,  # all blocks of a row, rounded up to a power of two
    BLOCKS: tl.constexpr,  # blocks of a part
    CHUNK: tl.constexpr,  # neighbouring columns of a block
    STEPS: tl.constexpr,  # chunks of a block, rounded up to a power of two
    TILE: tl.constexpr,  # columns read at once
):
    """One row after another: top-k's threshold, then top-p's, then masses.

    Example: logits [1, 3, 3, 2], top-k 3, top-p 0.6 at scale 1: the third largest value is 2; of
    the mass 2**S * (1 + 1 + 1/2) at least 0.6 lies at or above 3, which is the threshold.
    """
    listed = list_ptr + tl.program_id(0).to(tl.int64) * segments * _PARTS * BLOCKS
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = turn * tl.num_programs(0) + tl.program_id(0)
        source = source_row(rows_ptr, row, HAS_ROWS)
        x = x_ptr + tl.maximum(source, 0) * stride_n
        peak, holder, nans = row_peak(part_peak_ptr, part_nans_ptr, row, segments, ALL_PARTS)
        scale = tl.load(scale_ptr + row)
        floor = peak + tl.load(min_p_ptr + row)
        block = tl.arange(0, ALL_BLOCKS)
        all_blocks = segments * _PARTS * BLOCKS
        at = row.to(tl.int64) * all_blocks + block
        tops = tl.load(top_ptr + at, mask=block < all_blocks, other=-_INF).to(tl.float32)
        highest = rank_of(peak, SHIFT)

        if TOP_K:
            top_k = tl.load(top_k_ptr + row)
            if (top_k < vocab_size) & (holder >= 0):
                least = tl.maximum(floor, largest_top(tops, top_k, highest, SHIFT))
                few = choose(listed, tops >= least, block)
                have, _, _ = amounts(
                    x, row, edits, listed, few, least, least, least, peak, least, 0.0, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    False, 1, PACKED, TOP, UNIT, ALIGNED, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                low = rank_of(least, SHIFT)
                target = tl.minimum(have, top_k)
                beyond = tl.zeros([], tl.int64)
                r1, r2 = expect(low, have, highest, beyond, target, SHIFT)
                rank = search(
                    x, row, edits, listed, few, low, highest, have, beyond, target, r1, r2,
                    peak, least, 0.0, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    False, 1, PACKED, TOP, UNIT, ALIGNED, SHIFT, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                floor = tl.maximum(floor, value_of(rank, SHIFT))

        if TOP_P:
            top_p = tl.load(top_p_ptr + row)
            if (top_p < _TOP_P_ONE) & (holder >= 0):
                least, lowest = row_limits(peak, floor, scale)
                few = choose(listed, tops >= least, block)
                # Is the threshold among the largest blocks?
                bound = least
                if few > 2 * _FEW:
                    bound = tl.maximum(least, largest_top(tops, _FEW, highest, SHIFT))
                have, inside, _ = amounts(
                    x, row, edits, listed, few, least, bound, bound, peak, least, lowest, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    True, 1, PACKED, TOP, UNIT, ALIGNED, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                target = fraction(have, top_p)
                low = rank_of(least, SHIFT)
                high = highest
                beyond = tl.zeros([], tl.int64)
                if inside >= target:
                    low = rank_of(bound, SHIFT)
                    have = inside
                    few = choose(listed, tops >= bound, block)
                    r1, r2 = expect(low, have, high, beyond, target, SHIFT)
                else:
                    high = rank_of(bound, SHIFT) - 1
                    beyond = inside
                    # Ask every 16th block first what lies below the bound: of the few tokens
                    # above it, which may weigh most, it might have none.
                    had, over, _ = amounts(
                        x, row, edits, listed, few, least, bound, bound, peak, least, lowest, scale,
                        stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                        True, 16, PACKED, TOP, UNIT, ALIGNED, unit_bits, EXACT,
                        BLOCKS, CHUNK, STEPS, TILE,
                    )  # fmt: skip
                    share = (target - inside).to(tl.float32) / (have - inside).to(tl.float32)
                    wanted = over + ((had - over).to(tl.float32) * share).to(tl.int64)
                    wanted = tl.maximum(tl.minimum(wanted, had), 1)
                    r1, r2 = expect(low, had, high, over, wanted, SHIFT)
                    guess = value_of(search(
                        x, row, edits, listed, few, low, high, had, over, wanted, r1, r2,
                        peak, least, lowest, scale,
                        stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                        True, 16, PACKED, TOP, UNIT, ALIGNED, SHIFT, unit_bits, EXACT,
                        BLOCKS, CHUNK, STEPS, TILE,
                    ), SHIFT)  # fmt: skip
                    margin = _MARGIN / scale
                    r1, r2 = rank_of(guess - margin, SHIFT), rank_of(guess + margin, SHIFT)
                rank = search(
                    x, row, edits, listed, few, low, high, have, beyond, target, r1, r2,
                    peak, least, lowest, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    True, 1, PACKED, TOP, UNIT, ALIGNED, SHIFT, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                floor = tl.maximum(floor, value_of(rank, SHIFT))

        least, lowest = row_limits(peak, floor, scale)
        few = choose(listed, tops >= least, block)
        for start in range(0, few, TILE // (STEPS * CHUNK)):
            values, part, exists = read(
                x, row, edits, listed, few, start, stride_s, stride_v, first_ptr, source, width,
                part_columns, vocab_size, 1, TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS, TILE,
            )  # fmt: skip
            weights = integer_weight(values, peak, least, scale, unit_bits, EXACT)
            sums = tl.sum(tl.sum(weights, 2), 1)
            tl.atomic_add(
                mass_ptr + row.to(tl.int64) * segments * _PARTS + part,
                sums,
                mask=exists,
                sem="relaxed",
            )
        tl.store(peak_ptr + row, peak)
        tl.store(floor_ptr + row, floor)
        tl.store(nans_ptr + row, nans)
        if holder < 0:
            tl.store(argmax_ptr + row, tl.full([], -1, tl.int64))
        else:
            segment = holder // _PARTS
            first = tl.load(first_ptr + segment)
            count = tl.minimum(tl.maximum(vocab_size - first, 0), width).to(tl.int32)
            x += segment.to(tl.int64) * stride_s
            column = first_of(
                x, holder % _PARTS, stride_v, width, part_columns, count, peak, segment * width,
                row, edits, TOP, UNIT, TILE,
            )  # fmt: skip
            tl.store(argmax_ptr + row, first + column)


@triton.jit
def rank_of(value, SHIFT: tl.constexpr):
    """An int64 that orders as the values do: 0 for +0, and the next for the next value."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


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
    ranks = rank_of(tops, SHIFT)
    low = rank_of(tl.full([], -3.4028234663852886e38, tl.float32), SHIFT)
    high = highest
    while low < high:
        middle = low + (high - low + 1) // 2
        enough = tl.sum((ranks >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return value_of(low, SHIFT)


@triton.jit
def choose(listed, chosen, block):
    """List the chosen blocks; returns how many."""
    tl.debug_barrier()  # all threads are done with the last list
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), 0) - 1, block, mask=chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32), 0)


@triton.jit
def read(
    x, row, edits, listed, few, start, stride_s, stride_v, first_ptr, source, width,
    part_columns, vocab_size,
    EVERY: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Values [b, STEPS, CHUNK] of b listed blocks, [b] their parts, [b] whether there are any."""
    entry = start + tl.arange(0, TILE // (STEPS * CHUNK)) * EVERY
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
    values = fetch(x, column, stride_v, present, wanted, base, row, edits, TOP, UNIT)
    return values, part, exists


@triton.jit
def amounts(
    x, row, edits, listed, few, v0, v1, v2, peak, least, lowest, scale,
    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
    WEIGHTED: tl.constexpr, EVERY: tl.constexpr, PACKED: tl.constexpr, TOP: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, unit_bits, EXACT: tl.constexpr,
    BLOCKS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number or weight of tokens that are >= least and >= each of 3 values.

    Of all listed blocks, or of EVERY so-manieth.
    """
    IN_FLOATS: tl.constexpr = WEIGHTED and EXACT
    zeros = tl.zeros([TILE // (STEPS * CHUNK), STEPS, CHUNK], tl.int64)
    if IN_FLOATS:
        zeros = unit_sum(zeros, unit_bits)
    a0, a1, a2 = zeros, zeros, zeros
    for start in range(0, few, TILE // (STEPS * CHUNK) * EVERY):
        values, _, _ = read(
            x, row, edits, listed, few, start, stride_s, stride_v, first_ptr, source, width,
            part_columns, vocab_size, EVERY, TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS, TILE,
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
    x, row, edits, listed, few, low, high, at_low, beyond, target, r1, r2,
    peak, least, lowest, scale,
    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
    WEIGHTED: tl.constexpr, EVERY: tl.constexpr, PACKED: tl.constexpr, TOP: tl.constexpr,
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
            x, row, edits, listed, few,
            value_of(middle, SHIFT), value_of(r1, SHIFT), value_of(r2, SHIFT),
            peak, least, lowest, scale,
            stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
            WEIGHTED, EVERY, PACKED, TOP, UNIT, ALIGNED, unit_bits, EXACT,
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


def weigh(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    scale_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    filter_top_k: bool,
    filter_top_p: bool,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernels of the op `weigh`."""
    (_, S, v), R = x_NSv.shape, scale_R.shape[0]
    logits = (x_NSv, first_id_S, rows_R, edits, vocab_size)
    scale_R, min_p_R, top_k_R, top_p_R = (
        of_row.contiguous() for of_row in (scale_R, min_p_R, top_k_R, top_p_R)
    )
    filtered = filter_top_k or filter_top_p
    part_peak_RSC, part_nans_RSC, top_RSCb = first_pass(*logits, tops=filtered)
    peak_R, floor_R = torch.empty_like(scale_R), torch.empty_like(scale_R)
    argmax_R, nans_R = first_id_S.new_empty(R), first_id_S.new_empty(R)
    mass_RSC = first_id_S.new_empty((R, S, PARTS))
    found = (peak_R, floor_R, mass_RSC, argmax_R, nans_R)
    if top_RSCb is None:
        second_pass(logits, (part_peak_RSC, part_nans_RSC, min_p_R, scale_R), found)
    elif R > 0:
        bits, blocks = weight_bits(vocab_size), top_RSCb.shape[3]
        programs = min(R, programs_of(x_NSv.device))
        list_Pb = first_id_S.new_empty((programs, S * PARTS * blocks), dtype=torch.int32)
        _whole_kernel[(programs,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            part_peak_RSC,
            part_nans_RSC,
            top_RSCb,
            list_Pb,
            min_p_R,
            scale_R,
            top_k_R,
            top_p_R,
            peak_R,
            floor_R,
            mass_RSC.zero_(),
            argmax_R,
            nans_R,
            edit_arguments(edits, first_id_S),
            R,
            S,
            v,
            part_width(v),
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            ALIGNED=v % CHUNK == 0,
            PACKED=S * v < 1 << 21,
            HAS_ROWS=rows_R is not None,
            TOP_K=filter_top_k,
            TOP_P=filter_top_p,
            SHIFT=SHIFT_OF[value_dtype(edits, x_NSv.dtype)],
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            ALL_PARTS=triton.next_power_of_2(S * PARTS),
            ALL_BLOCKS=triton.next_power_of_2(S * PARTS * blocks),
            BLOCKS=blocks,
            CHUNK=CHUNK,
            STEPS=triton.next_power_of_2(triton.cdiv(part_width(v), blocks * CHUNK)),
            TILE=TILE,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return peak_R, floor_R, mass_RSC, argmax_R, nans_R


def programs_of(device: torch.device) -> int:
    """Programs that take row after row, as many as run at a time."""
    if device.type != "cuda":
        return 2
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count
