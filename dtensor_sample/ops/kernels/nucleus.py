"""top-p alone, where no top-k has left few tokens: each row's threshold, mostly by one reading.

A row's threshold is the largest value such that tokens at or above it have a given mass, its total
being known. All of the row may matter to it, so it is read by many programs, and not by one:

1. A first guess, by one program a row, from what fits into its registers. The blocks with the
   largest tops hold every token above some value: if those have the mass, the threshold is found.
   Otherwise all tops tell what lies below, and some blocks what else they have, and two values are
   noted that most likely enclose the threshold.
2. Programs of some columns each add up what lies in and above the bracket, and in it by value: BINS
   sums of as many neighbouring values each, by atomic additions of integers, in any order.
3. The bin in which the mass is reached is one value, if the bracket was right and narrow. Else the
   program of the row goes on alone, with the bin, or with the side of the bracket that it missed.

The guess decides how fast it is found, never what is found.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit_arguments, fetch, row_edits, value_dtype
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.passes import CHUNK
from dtensor_sample.ops.kernels.threshold import (
    SHIFT_OF,
    choose,
    fraction,
    held,
    largest_top,
    rank_of,
    reach,
    read,
    short_rank_of,
    value_of,
)
from dtensor_sample.ops.kernels.values import (
    EXACT_BITS,
    integer_sum,
    integer_weight,
    is_tame,
    load,
    row_limits,
    segment_count,
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
BINS = 256
_BINS = tl.constexpr(BINS)
_SPREAD = tl.constexpr(3.0)
"""How far a sampled mass may mislead, in its standard deviations."""
_MARGIN = tl.constexpr(0.03)
_WIDEST = tl.constexpr(1.5)
"""How far a bracket reaches from the guess to both sides, in binary exponents, and about how far at
most: a tail that is known too little is better missed than counted by value."""
_HELD = 4096
"""Logits that the program of a row holds in registers."""
_ITEM = 4096
"""Columns that a program adds up."""


@kernel
def _guess_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    top_ptr,  # [R, S, PARTS, blocks] of `value_dtype`
    list_ptr,  # scratch: [R, FEW] int32
    scale_ptr,  # [R] float32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] int64
    peak_ptr,  # [R] float32
    floor_ptr,  # in and out: [R] float32
    mass_ptr,  # [R, S, PARTS] int64, of the tokens at or above the floor
    bracket_ptr,  # out: [R, 3] int64: the lowest and the highest rank, none if found; the target
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    ALIGNED: tl.constexpr,  # width divides by CHUNK
    HAS_ROWS: tl.constexpr,
    SHIFT: tl.constexpr,  # float32 bits that `value_dtype` lacks
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    ALL_PARTS: tl.constexpr,  # S * PARTS, rounded up to a power of two
    ALL_BLOCKS: tl.constexpr,  # all blocks of a row, rounded up to a power of two
    BLOCKS: tl.constexpr,  # blocks of a part
    CHUNK: tl.constexpr,  # neighbouring columns of a block
    STEPS: tl.constexpr,  # chunks of a block, rounded up to a power of two
    FEW: tl.constexpr,  # blocks held at a time
):
    """The first guess.

    Example: of the values [3, 2, 1, 0] at scale 1, 0.9 of the mass 2**S * 1.875 lies at or above 1:
    if all blocks fit, the floor becomes 1 and the bracket is empty.
    """
    row = tl.program_id(0)
    top_p = tl.load(top_p_ptr + row)
    peak = tl.load(peak_ptr + row)
    alone = tl.load(top_k_ptr + row) >= vocab_size
    tl.store(bracket_ptr + row * 3, 1)
    tl.store(bracket_ptr + row * 3 + 1, 0)
    if alone & (top_p < _TOP_P_ONE) & (peak > -_INF):
        source = source_row(rows_ptr, row, HAS_ROWS)
        own = row_edits(row, edits)
        x = x_ptr + source * stride_n
        scale = tl.load(scale_ptr + row)
        floor = tl.load(floor_ptr + row)
        least, _ = row_limits(peak, floor, scale)
        part = tl.arange(0, ALL_PARTS)
        at = row.to(tl.int64) * segments * _PARTS + part
        have = tl.sum(tl.load(mass_ptr + at, mask=part < segments * _PARTS, other=0), 0)
        target = fraction(have, top_p)
        block = tl.arange(0, ALL_BLOCKS)
        all_blocks = segments * _PARTS * BLOCKS
        at = row.to(tl.int64) * all_blocks + block
        tops = tl.load(top_ptr + at, mask=block < all_blocks, other=-_INF).to(tl.float32)
        highest = rank_of(peak, SHIFT)
        listed = list_ptr + row.to(tl.int64) * FEW

        # All tokens at or above the bound are in blocks that are held: in fewer than all of those
        # with such a top if more than FEW are tied.
        bound = rank_of(tl.maximum(largest_top(tops, FEW, highest, SHIFT), least), SHIFT)
        if tl.sum((tops >= value_of(bound, SHIFT)).to(tl.int32), 0) > FEW:
            bound += 1
        few = choose(listed, tops >= value_of(bound, SHIFT), block)
        values, _, _, _ = read(
            x, own, listed, few, 0, stride_s, stride_v, first_ptr, source, width,
            part_columns, vocab_size, TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS,
            FEW * STEPS * CHUNK,
        )  # fmt: skip
        weights = integer_weight(values, peak, least, scale, unit_bits, EXACT)
        weights = tl.where(values >= value_of(bound, SHIFT), weights, tl.zeros_like(weights))
        inside = tl.sum(weights)
        if inside >= target:
            rank = reach(values, weights, None, None, bound, highest, target, SHIFT)
            tl.store(floor_ptr + row, tl.maximum(floor, value_of(rank, SHIFT)))
        else:
            # Of tokens below the bound, tops are known; of others, some blocks are asked.
            every = tl.cdiv(all_blocks, FEW)
            few = choose(listed, (block < all_blocks) & (block % every == every // 2), block)
            values, _, _, _ = read(
                x, own, listed, few, 0, stride_s, stride_v, first_ptr, source, width,
                part_columns, vocab_size, TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS,
                FEW * STEPS * CHUNK,
            )  # fmt: skip
            limit = value_of(bound, SHIFT)
            rest = values < tl.max(tl.max(values, 2), 1)[:, None, None]
            shares = tl.exp2((values - peak) * scale) * every
            shares = tl.where(rest & (values >= least) & (values < limit), shares, 0.0)
            top_shares = tl.exp2((tops - peak) * scale)
            top_shares = tl.where((tops >= least) & (tops < limit), top_shares, 0.0)
            left = (target - inside).to(tl.float32) / (have - inside).to(tl.float32)
            wanted = (tl.sum(shares) + tl.sum(top_shares)) * left
            lowest = rank_of(least, SHIFT)
            bound -= 1
            guess = reach(values, shares, tops, top_shares, lowest, bound, wanted, SHIFT)
            # How far the sample may mislead: if it has too much above the guess, or below.
            squares = shares * shares
            above = tl.sum(tl.where(values >= value_of(guess, SHIFT), squares, 0.0))
            below = tl.sum(squares) - above
            spread = _SPREAD * tl.sqrt(above * (1 - left) * (1 - left) + below * left * left)
            middle = value_of(guess, SHIFT)
            down = _MARGIN / scale
            up = down
            more = held(values, shares, tops, top_shares, middle - down)
            while (more < wanted + spread) & (down * scale < _WIDEST):
                down *= 2
                more = held(values, shares, tops, top_shares, middle - down)
            more = held(values, shares, tops, top_shares, middle + up)
            while (more > wanted - spread) & (up * scale < _WIDEST):
                up *= 2
                more = held(values, shares, tops, top_shares, middle + up)
            low = tl.minimum(guess - 1, rank_of(middle - down, SHIFT))
            high = tl.maximum(guess + 1, rank_of(middle + up, SHIFT))
            tl.store(bracket_ptr + row * 3, tl.maximum(low, lowest))
            tl.store(bracket_ptr + row * 3 + 1, tl.minimum(high, bound))
            tl.store(bracket_ptr + row * 3 + 2, target)


@kernel
def _bins_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    scale_ptr,  # [R] float32
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    bracket_ptr,  # [R, 3] int64
    bin_ptr,  # zeros, out: [R, BINS + 1] int64
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    SHIFT: tl.constexpr,  # float32 bits that `value_dtype` lacks
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    THREADS: tl.constexpr,
    ITEM: tl.constexpr,  # columns of a program
):
    """Masses by value in the bracket and, last, of all in and above it: of columns of a segment.

    Example: in a bracket of the values 2, 2.5 and 3, tokens [1, 2, 3, 4] add to the bins 0 and 2,
    and the last three to the last.
    """
    items = tl.cdiv(width, ITEM)
    row = tl.program_id(0) // (segments * items)
    segment = tl.program_id(0) // items % segments
    begin = tl.program_id(0) % items * ITEM
    low = tl.load(bracket_ptr + row * 3)
    high = tl.load(bracket_ptr + row * 3 + 1)
    if low <= high:
        source = source_row(rows_ptr, row, HAS_ROWS)
        own = row_edits(row, edits)
        x = x_ptr + source * stride_n + segment.to(tl.int64) * stride_s
        count = segment_count(first_ptr, segment, source, width, vocab_size)
        peak = tl.load(peak_ptr + row)
        scale = tl.load(scale_ptr + row)
        floor = tl.load(floor_ptr + row)
        mass = add_up(
            x, begin, tl.minimum(begin + ITEM, count), stride_v, segment * width, own,
            low, high, peak, floor, scale, bin_ptr + row * (_BINS + 1),
            TOP, UNIT, SHIFT, unit_bits, EXACT, THREADS,
        )  # fmt: skip
        tl.atomic_add(bin_ptr + row * (_BINS + 1) + _BINS, mass, sem="relaxed")


@kernel
def _settle_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    scale_ptr,  # [R] float32
    peak_ptr,  # [R] float32
    floor_ptr,  # in and out: [R] float32
    bracket_ptr,  # [R, 3] int64
    bin_ptr,  # [R, BINS + 1] int64
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    SHIFT: tl.constexpr,  # float32 bits that `value_dtype` lacks
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    THREADS: tl.constexpr,
):
    """The threshold of a row that has a bracket.

    Example: with a target of 5, bins [3, 2, 2] and 9 in and above them, it is reached in bin 1.
    """
    row = tl.program_id(0)
    low = tl.load(bracket_ptr + row * 3)
    high = tl.load(bracket_ptr + row * 3 + 1)
    if low <= high:
        target = tl.load(bracket_ptr + row * 3 + 2)
        source = source_row(rows_ptr, row, HAS_ROWS)
        own = row_edits(row, edits)
        x = x_ptr + source * stride_n
        peak = tl.load(peak_ptr + row)
        scale = tl.load(scale_ptr + row)
        floor = tl.load(floor_ptr + row)
        least, _ = row_limits(peak, floor, scale)
        bins = bin_ptr + row * (_BINS + 1)
        place = tl.arange(0, _BINS)
        while low <= high:
            # From beyond the first-level cache, which atomic additions do not reach.
            sums = tl.load(bins + place, cache_modifier=".cg")
            beyond = tl.load(bins + _BINS, cache_modifier=".cg") - tl.sum(sums, 0)
            shift = shift_of(low, high)
            reached = beyond + tl.cumsum(sums, 0, reverse=True) >= target
            found = tl.sum(reached.to(tl.int64), 0) - 1
            far = (high - low + 1) * 8
            if beyond >= target:
                low = high + 1
                high = tl.minimum(high + far, rank_of(peak, SHIFT))
            elif found < 0:
                high = low - 1
                low = tl.maximum(low - far, rank_of(least, SHIFT))
            else:
                low += found << shift
                high = tl.minimum(low + ((tl.full([], 1, tl.int64) << shift) - 1), high)
                if shift == 0:
                    tl.store(floor_ptr + row, tl.maximum(floor, value_of(low, SHIFT)))
                    high = low - 1
            if low <= high:
                tl.debug_barrier()  # all threads have read the bins
                tl.store(bins + place, tl.zeros([_BINS], tl.int64))
                tl.debug_barrier()
                mass = tl.zeros([], tl.int64)
                start = x
                for segment in range(segments):
                    count = segment_count(first_ptr, segment, source, width, vocab_size)
                    mass += add_up(
                        start, 0, count, stride_v, segment * width, own,
                        low, high, peak, floor, scale, bins,
                        TOP, UNIT, SHIFT, unit_bits, EXACT, THREADS,
                    )  # fmt: skip
                    start += stride_s
                tl.store(bins + _BINS, mass)
                tl.debug_barrier()


@triton.jit
def add_up(
    x, begin, end, stride_v, base, edits, low, high, peak, floor, scale, bins,
    TOP: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr, unit_bits, EXACT: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Add the weights of columns whose values are in a bracket to its bins.

    Returns the mass in and above it.
    """
    least, lowest = row_limits(peak, floor, scale)
    first = value_of(low, SHIFT)
    least = tl.maximum(least, first)
    total = tl.zeros([THREADS], tl.int64)
    full = begin
    if EXACT and len(edits) == 1:  # edits take care
        if is_tame(peak, scale, TOP):
            full += tl.maximum(end - begin, 0) // (8 * THREADS) * (8 * THREADS)
        for start in range(begin, full, 8 * THREADS):
            total = _add_tiles(
                x, start, end, stride_v, base, edits, low, high, peak, least, lowest,
                scale, bins, total, "least", TOP, UNIT, SHIFT, unit_bits, EXACT, THREADS,
            )  # fmt: skip
    for start in range(full, end, 8 * THREADS):
        total = _add_tiles(
            x, start, end, stride_v, base, edits, low, high, peak, least, lowest,
            scale, bins, total, "exact", TOP, UNIT, SHIFT, unit_bits, EXACT, THREADS,
        )  # fmt: skip
    return tl.sum(total, 0)


@triton.jit
def _add_tiles(
    x, start, end, stride_v, base, edits, low, high, peak, least, lowest, scale, bins, total,
    KEEP: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr, SHIFT: tl.constexpr,
    unit_bits, EXACT: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Eight tiles of `add_up`: the columns of whole ones if KEEP is "least", see `weight`.

    A thread takes one column of a tile, since it is so that atomic additions are laid out: eight
    neighbours would be exchanged through shared memory. Four weights of 2**EXACT_BITS are as many
    as a `unit_sum` holds.
    """
    first, last = value_of(low, SHIFT), value_of(high, SHIFT)
    lowest_rank, shift = low.to(tl.int32), shift_of(low, high).to(tl.uint32)
    for half in tl.static_range(2):
        if EXACT:
            sums = unit_sum(total, unit_bits)
        for turn in tl.static_range(4):
            column = start + (half * 4 + turn) * THREADS + tl.arange(0, THREADS)
            if KEEP == "least":
                values = load(x, column, stride_v, None, UNIT)
            else:
                here = column < end
                values = fetch(x, column, stride_v, here, here, base, edits, TOP, UNIT)
            if EXACT:
                units = weight(values, peak, least, lowest, scale, KEEP)
                sums += units
                weights = integer_sum(unit_sum(units, unit_bits) + units, unit_bits)
            else:
                weights = integer_weight(values, peak, least, scale, unit_bits, EXACT)
                total += weights
            inside = (values >= first) & (values <= last)
            ranks = short_rank_of(values + 0.0, SHIFT) - lowest_rank  # -0 is +0
            place = ranks.to(tl.uint32, bitcast=True) >> shift
            tl.atomic_add(bins + place, weights, mask=inside, sem="relaxed")
        if EXACT:
            total += integer_sum(sums, unit_bits)
    return total


@triton.jit
def shift_of(low, high):
    """The least number of low bits of ranks without which a bracket has at most BINS of them."""
    shift = tl.full([], 0, tl.int64)
    while ((high - low) >> shift) >= _BINS:
        shift += 1
    return shift


def nucleus(
    logits: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor], int],
    wanted: tuple[Tensor, Tensor, Tensor],
    top_RSCb: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    mass_RSC: Tensor,
) -> None:
    """Raise the floors of rows with top-p, but of none with top-k.

    Args:
        logits: x_NSv, first_id_S, rows_R, edits, vocab_size.
        wanted: scale_R, top_k_R, top_p_R.
        top_RSCb: of `first_pass`.
        peak_R: [R] float32.
        floor_R: [R] float32, in and out.
        mass_RSC: [R, S, PARTS] int64, of tokens at or above the floors that come in.
    """
    x_NSv, first_id_S, rows_R, edits, vocab_size = logits
    (_, S, v), R, blocks = x_NSv.shape, len(peak_R), top_RSCb.shape[3]
    if R == 0:
        return
    bits, told = weight_bits(vocab_size), edit_arguments(edits, first_id_S)
    steps = triton.next_power_of_2(triton.cdiv(part_width(v), blocks * CHUNK))
    few = max(1, _HELD // (steps * CHUNK))
    bracket_R3 = first_id_S.new_empty((R, 3))
    bin_RB = first_id_S.new_zeros((R, BINS + 1))
    row = (x_NSv, *x_NSv.stride(), first_id_S, rows_R)
    constant = {
        "TOP": torch.finfo(x_NSv.dtype).max,
        "UNIT": x_NSv.stride(2) == 1,
        "HAS_ROWS": rows_R is not None,
        "SHIFT": SHIFT_OF[value_dtype(edits, x_NSv.dtype)],
        "unit_bits": bits,
        "EXACT": bits <= EXACT_BITS,
        "enable_fp_fusion": False,
    }
    _guess_kernel[(R,)](
        *row,
        top_RSCb,
        first_id_S.new_empty((R, few), dtype=torch.int32),
        *wanted,
        peak_R,
        floor_R,
        mass_RSC,
        bracket_R3,
        told,
        S,
        v,
        part_width(v),
        vocab_size,
        ALIGNED=v % CHUNK == 0,
        ALL_PARTS=triton.next_power_of_2(S * PARTS),
        ALL_BLOCKS=triton.next_power_of_2(S * PARTS * blocks),
        BLOCKS=blocks,
        CHUNK=CHUNK,
        STEPS=steps,
        FEW=few,
        num_warps=8,
        **constant,
    )
    of_row = (wanted[0], peak_R, floor_R, bracket_R3, bin_RB, told, S, v, vocab_size)
    _bins_kernel[(R * S * triton.cdiv(v, _ITEM),)](
        *row, *of_row, THREADS=128, ITEM=_ITEM, num_warps=4, **constant
    )
    _settle_kernel[(R,)](*row, *of_row, THREADS=512, num_warps=16, **constant)
