"""Shortlists of segments, from the blocks that can hold their largest values; and what follows.

As in `whole.py`, a block's largest value, its top, is known from the first pass, and only blocks
whose top is at least as large as the n-th largest top can hold the n largest values. As there, what
they hold is listed if there is room, and searched otherwise.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit_arguments, row_edits, value_dtype
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.passes import CHUNK, first_pass, pack_peaks, row_peak
from dtensor_sample.ops.kernels.threshold import (
    LISTED,
    SHIFT_OF,
    amounts,
    choose,
    expect,
    fraction,
    largest_top,
    list_tokens,
    listed_amounts,
    listed_columns,
    rank_of,
    read,
    search,
    value_of,
)
from dtensor_sample.ops.kernels.values import (
    EXACT_BITS,
    integer_weight,
    row_limits,
    source_row,
)
from dtensor_sample.ops.kernels.whole import programs_of
from dtensor_sample.ops.largest import TOP_P_ONE, shortlist_fields, shortlist_integers
from dtensor_sample.ops.parts import PARTS, part_width
from dtensor_sample.ops.values import weight_bits

_PARTS = tl.constexpr(PARTS)
_INF = tl.constexpr(float("inf"))
_TOP_P_ONE = tl.constexpr(TOP_P_ONE)
_LISTED = tl.constexpr(LISTED)


@kernel
def _shortlist_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    part_peak_ptr,  # [R, S, PARTS] float32
    part_nans_ptr,  # [R, S, PARTS] int32
    top_ptr,  # [R, S, PARTS, blocks] of `value_dtype`
    list_ptr,  # scratch: [programs, PARTS * blocks] int32
    token_ptr,  # scratch: [programs, 2, LISTED] int32
    value_ptr,  # out: [R, S, SIZE] int32, bits of float32; see `shortlist_fields`
    held_ptr,  # out: [R, S, SIZE] uint8, parts of these
    tied_ptr,  # out: [R, S, PARTS] int32
    stride,  # int64 from segment to segment of each
    edits,  # of `edit_arguments`
    rows,  # R
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    ALIGNED: tl.constexpr,  # width divides by CHUNK
    PACKED: tl.constexpr,  # counts of tokens of a segment fit 21 bits
    HAS_ROWS: tl.constexpr,
    SHIFT: tl.constexpr,  # float32 bits that `value_dtype` lacks
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of a part
    CHUNK: tl.constexpr,  # neighbouring columns of a block
    STEPS: tl.constexpr,  # chunks of a block, rounded up to a power of two
    TILE: tl.constexpr,  # columns read at once
):
    """One segment of a row after another: its SIZE-th largest value, then all that are larger.

    Example: of logits [1, 3, 3, 4, 3] the two largest are [4, 3], and three equal the last.
    """
    listed = list_ptr + tl.program_id(0).to(tl.int64) * _PARTS * BLOCKS
    tokens = token_ptr + tl.program_id(0) * 2 * _LISTED
    for turn in range(tl.cdiv(rows * segments - tl.program_id(0), tl.num_programs(0))):
        item = turn * tl.num_programs(0) + tl.program_id(0)
        row, segment = item // segments, item % segments
        source = source_row(rows_ptr, row, HAS_ROWS)
        own = row_edits(row, edits)
        x = x_ptr + tl.maximum(source, 0) * stride_n
        found = value_ptr + item.to(tl.int64) * stride * 2
        held = held_ptr + item.to(tl.int64) * stride * 8
        peak, holder, _ = row_peak(part_peak_ptr, part_nans_ptr, item, 1, _PARTS)
        last = tl.full([], -_INF, tl.float32)
        larger = tl.zeros([], tl.int32)
        tied = tl.zeros([_PARTS], tl.int32)
        if holder >= 0:
            block = tl.arange(0, _PARTS * BLOCKS)
            tops = tl.load(top_ptr + item.to(tl.int64) * _PARTS * BLOCKS + block).to(tl.float32)
            highest = rank_of(peak, SHIFT)
            least = largest_top(tops, SIZE, highest, SHIFT)
            few = choose(listed, tops >= least, segment * _PARTS * BLOCKS + block)
            have = list_tokens(
                tokens, x, own, listed, few, least,
                stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS, TILE,
            )  # fmt: skip
            if have <= _LISTED:
                token, counts, _masses = listed_amounts(
                    tokens, have, peak, least, 1.0, 0, False, False
                )  # fmt: skip
                last = tl.max(tl.where(counts >= SIZE, token, -_INF), 0)
                held_by = (listed_columns(tokens, have) - segment * width) // part_columns
                equal = (token == last) & (token > -_INF)
                within = held_by[:, None] == tl.arange(0, _PARTS)[None, :]
                tied = tl.sum((within & equal[:, None]).to(tl.int32), 0)
                chosen = (token > last).to(tl.int32)
                place = tl.cumsum(chosen, 0) - 1
                tl.store(found + place, token.to(tl.int32, bitcast=True), mask=chosen > 0)
                tl.store(held + place, held_by.to(tl.uint8), mask=chosen > 0)
                larger = tl.sum(chosen, 0)
            else:
                count, _more, _most = amounts(
                    x, own, listed, few, least, least, least, peak, least, 0.0, 1.0,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    False, PACKED, TOP, UNIT, ALIGNED, 0, False, BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                low = rank_of(least, SHIFT)
                target = tl.minimum(count, SIZE)
                beyond = tl.zeros([], tl.int64)
                r1, r2 = expect(low, count, highest, beyond, target, SHIFT)
                rank = search(
                    x, own, listed, few, low, highest, count, beyond, target, r1, r2,
                    peak, least, 0.0, 1.0,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    False, PACKED, TOP, UNIT, ALIGNED, SHIFT, 0, False, BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                last = tl.where(count < SIZE, -_INF, value_of(rank, SHIFT))
                for start in range(0, few, TILE // (STEPS * CHUNK)):
                    values, _column, part, _exists = read(
                        x, own, listed, few, start, stride_s, stride_v, first_ptr, source,
                        width, part_columns, vocab_size, TOP, UNIT, ALIGNED,
                        BLOCKS, CHUNK, STEPS, TILE,
                    )  # fmt: skip
                    values += 0.0  # -0 is +0
                    part %= _PARTS
                    equal = tl.sum(tl.sum((values == last).to(tl.int32), 2), 1)[:, None]
                    within = part[:, None] == tl.arange(0, _PARTS)[None, :]
                    tied += tl.sum(tl.where(within, equal, 0), 0)
                    part = tl.reshape(tl.broadcast_to(part[:, None, None], values.shape), [TILE])
                    values = tl.reshape(values, [TILE])
                    chosen = (values > last).to(tl.int32)
                    place = larger + tl.cumsum(chosen, 0) - 1
                    tl.store(found + place, values.to(tl.int32, bitcast=True), mask=chosen > 0)
                    tl.store(held + place, part.to(tl.uint8), mask=chosen > 0)
                    larger += tl.sum(chosen, 0)
                tied = tl.where(count < SIZE, 0, tied)
        tl.debug_barrier()  # all of the list is written
        place = tl.arange(0, SIZE)
        listed_here = place < larger
        bits = tl.load(found + place, mask=listed_here, other=0)
        part = tl.load(held + place, mask=listed_here, other=_PARTS).to(tl.int64)
        bits = tl.where(listed_here, bits, last.to(tl.int32, bitcast=True))
        tl.debug_barrier()  # and read
        # The largest first, and of equal ones those of the first part.
        order = tl.sort(_key(bits).to(tl.int64) * 256 - part, descending=True)
        part = -order & 255
        tl.store(found + place, _key(((order + part) >> 8).to(tl.int32)))
        tl.store(held + place, part.to(tl.uint8))
        tl.store(tied_ptr + item.to(tl.int64) * stride * 2 + tl.arange(0, _PARTS), tied)


@triton.jit
def _key(bits):
    """Int32 that order as the floats of which these are the bits; and the inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel
def _sift_kernel(
    value_ptr,  # [R, S, SIZE] int32, bits of float32
    held_ptr,  # [R, S, SIZE] uint8, parts of these
    tied_ptr,  # [R, S, PARTS] int32
    row_stride,  # int64 from row to row of each
    segment_stride,  # and from segment to segment
    peak_ptr,  # [R] float32
    min_floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] int64
    floor_ptr,  # out: [R] float32
    mass_ptr,  # out: [R, S, PARTS] int64
    segments,  # S
    vocab_size,
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    SIZE: tl.constexpr,
    ALL_SEGMENTS: tl.constexpr,  # S, rounded up to a power of two
):
    """One row: its thresholds, then its masses.

    Example: of the largest values [3, 3] and [2, 1], top-k 3 keeps those >= 2; of the mass of
    [3, 3, 2], at least 0.6 lies at or above 3, top-p's threshold.
    """
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, ALL_SEGMENTS)
    exists = (segment < segments)[:, None]
    at = row * row_stride + segment.to(tl.int64)[:, None] * segment_stride
    entry = tl.arange(0, SIZE)[None, :]
    nothing = tl.full([], -_INF, tl.float32).to(tl.int32, bitcast=True)
    bits = tl.load(value_ptr + at * 2 + entry, mask=exists, other=nothing)
    part = tl.load(held_ptr + at * 8 + entry, mask=exists, other=_PARTS).to(tl.int32)
    parts = tl.arange(0, _PARTS)[None, :]
    tied = tl.load(tied_ptr + at * 2 + parts, mask=exists, other=0).to(tl.int64)
    listed = bits.to(tl.float32, bitcast=True)
    last = tl.min(listed, 1)
    place = tl.arange(0, ALL_SEGMENTS * SIZE)
    keys = tl.reshape(_key(bits), [ALL_SEGMENTS * SIZE])
    values = _key(tl.sort(keys, descending=True)).to(tl.float32, bitcast=True)
    peak = tl.load(peak_ptr + row)
    floor = tl.load(min_floor_ptr + row)
    scale = tl.load(scale_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    kept = tl.minimum(tl.sum((values > -_INF).to(tl.int64), 0), top_k)
    if kept > 0:
        if top_k < vocab_size:
            floor = tl.maximum(floor, tl.max(tl.where(place == kept - 1, values, -_INF), 0))
        if top_p < _TOP_P_ONE:
            least, _ = row_limits(peak, floor, scale)
            amount = integer_weight(values, peak, least, scale, unit_bits, EXACT)
            more = tl.sum(tied, 1) - tl.sum((part == _PARTS).to(tl.int64), 1)
            more *= integer_weight(last, peak, least, scale, unit_bits, EXACT)
            reached = tl.cumsum(amount, 0)
            for s in range(segments):
                one = segment == s
                value = tl.max(tl.where(one, last, -_INF), 0)
                reached += tl.where(value >= values, tl.sum(tl.where(one, more, 0), 0), 0)
            target = fraction(tl.sum(amount, 0) + tl.sum(more, 0), top_p)
            beyond = tl.sum((reached < target).to(tl.int32), 0)
            floor = tl.maximum(floor, tl.max(tl.where(place == beyond, values, -_INF), 0))
    tl.store(floor_ptr + row, floor)
    least, _ = row_limits(peak, floor, scale)
    mass = mass_ptr + (row * segments + segment)[:, None] * _PARTS
    tied *= integer_weight(last, peak, least, scale, unit_bits, EXACT)[:, None]
    tl.store(mass + parts, tied, mask=exists)
    tl.debug_barrier()  # before more is added
    amounts = integer_weight(listed, peak, least, scale, unit_bits, EXACT)
    tl.atomic_add(mass + part, amounts, mask=(part < _PARTS) & (amounts > 0), sem="relaxed")


def shortlist(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    size: int,
) -> Tensor:
    """The kernels of `ops.shortlist`."""
    logits = (x_NSv, first_id_S, rows_R, edits, vocab_size)
    part_peak_RSC, part_nans_RSC, top_RSCb = first_pass(*logits, tops=True)
    (R, S, _), v = part_peak_RSC.shape, x_NSv.shape[2]
    assert top_RSCb is not None
    found_RSn = first_id_S.new_empty((R, S, shortlist_integers(size)))
    packed_RS2, *fields = shortlist_fields(found_RSn)
    pack_peaks(logits, part_peak_RSC, part_nans_RSC, packed_RS2)
    blocks = top_RSCb.shape[3]
    programs, warps, registers = programs_of(R * S, x_NSv.device)
    steps = triton.next_power_of_2(triton.cdiv(part_width(v), blocks * CHUNK))
    if R > 0:
        _shortlist_kernel[(programs,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            part_peak_RSC,
            part_nans_RSC,
            top_RSCb,
            first_id_S.new_empty((programs, PARTS * blocks), dtype=torch.int32),
            first_id_S.new_empty((programs, 2, LISTED), dtype=torch.int32),
            fields[0].view(torch.int32),
            *fields[1:],
            found_RSn.stride(1),
            edit_arguments(edits, first_id_S),
            R,
            S,
            v,
            part_width(v),
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            ALIGNED=v % CHUNK == 0,
            PACKED=v < 1 << 21,
            HAS_ROWS=rows_R is not None,
            SHIFT=SHIFT_OF[value_dtype(edits, x_NSv.dtype)],
            SIZE=size,
            BLOCKS=blocks,
            CHUNK=CHUNK,
            STEPS=steps,
            TILE=CHUNK * max(warps * 32, steps),
            num_warps=warps,
            maxnreg=registers,
            enable_fp_fusion=False,
        )
    return found_RSn


def sift(
    listed_RSn: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The kernel of `ops.sift`."""
    (R, S, _), bits = listed_RSn.shape, weight_bits(vocab_size)
    if listed_RSn.stride(2) != 1:
        listed_RSn = listed_RSn.contiguous()
    _, value_RSn, *fields = shortlist_fields(listed_RSn)
    sifted_R, mass_RSC = torch.empty_like(floor_R), listed_RSn.new_empty((R, S, PARTS))
    if R > 0:
        _sift_kernel[(R,)](
            value_RSn.view(torch.int32),
            *fields,
            *listed_RSn.stride()[:2],
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            top_k_R.contiguous(),
            top_p_R.contiguous(),
            sifted_R,
            mass_RSC,
            S,
            vocab_size,
            bits,
            EXACT=bits <= EXACT_BITS,
            SIZE=value_RSn.shape[2],
            ALL_SEGMENTS=triton.next_power_of_2(S),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return sifted_R, mass_RSC
