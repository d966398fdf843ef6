"""Rows whose whole vocabulary is here: all stages of `weigh`, with top-k and top-p.

The first pass keeps the largest value of each block of about 128 logits, its top. At least k logits
are as large as the k-th largest top, so only blocks with a top that large can hold the k largest
logits: some 50 of 1000 for top-k 50. Then one program a row finds its thresholds and masses from
such blocks alone: from a list of their tokens that are as large or, where that has no room for all,
by searching. Rows with top-p and no top-k are left to `nucleus`, if the batch may have any.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit_arguments, row_edits, value_dtype
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.nucleus import nucleus
from dtensor_sample.ops.kernels.passes import (
    CHUNK,
    first_of,
    first_pass,
    row_peak,
    second_pass,
)
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
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.ops.parts import PARTS, part_width
from dtensor_sample.ops.values import weight_bits

_PARTS = tl.constexpr(PARTS)
_INF = tl.constexpr(float("inf"))
_TOP_P_ONE = tl.constexpr(TOP_P_ONE)
_LISTED = tl.constexpr(LISTED)
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_MOST_PROGRAMS = 512
"""Turns of 1024 rows are even then: 217 us on an H200 instead of 223 with four programs each."""


@kernel
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
    token_ptr,  # scratch: [programs, 2, LISTED] int32
    min_p_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    top_k_ptr,  # [R] int64
    top_p_ptr,  # [R] int64
    peak_ptr,  # out: [R] float32
    floor_ptr,  # out: [R] float32
    mass_ptr,  # zeros, out: [R, S, PARTS] int64; this and what follows unless `floors`
    argmax_ptr,  # out: [R] int64
    nans_ptr,  # out: [R] int64
    edits,  # of `edit_arguments`
    use_top_k,  # above 0: rows may use it
    use_top_p,
    floors,  # above 0: only floors are wanted, and only of rows with top-k
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
    tokens = token_ptr + tl.program_id(0) * 2 * _LISTED
    for turn in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = turn * tl.num_programs(0) + tl.program_id(0)
        source = source_row(rows_ptr, row, HAS_ROWS)
        own = row_edits(row, edits)
        x = x_ptr + tl.maximum(source, 0) * stride_n
        peak, holder, nans = row_peak(part_peak_ptr, part_nans_ptr, row, segments, ALL_PARTS)
        scale = tl.load(scale_ptr + row)
        floor = peak + tl.load(min_p_ptr + row)
        block = tl.arange(0, ALL_BLOCKS)
        all_blocks = segments * _PARTS * BLOCKS
        at = row.to(tl.int64) * all_blocks + block
        tops = tl.load(top_ptr + at, mask=block < all_blocks, other=-_INF).to(tl.float32)
        highest = rank_of(peak, SHIFT)
        have = tl.full([], _LISTED + 1, tl.int32)
        top_k = tl.where(use_top_k > 0, tl.load(top_k_ptr + row), vocab_size)
        top_p = tl.where(use_top_p > 0, tl.load(top_p_ptr + row), _TOP_P_ONE)
        mass = mass_ptr + row.to(tl.int64) * segments * _PARTS

        if (top_k < vocab_size) & (holder >= 0):
            least = tl.maximum(floor, largest_top(tops, top_k, highest, SHIFT))
            few = choose(listed, tops >= least, block)
            if top_k <= _LISTED:
                have = list_tokens(
                    tokens, x, own, listed, few, least,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    TOP, UNIT, ALIGNED, BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
            if have > _LISTED:
                count, _more, _most = amounts(
                    x, own, listed, few, least, least, least, peak, least, 0.0, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    False, PACKED, TOP, UNIT, ALIGNED, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                low = rank_of(least, SHIFT)
                target = tl.minimum(count, top_k)
                beyond = tl.zeros([], tl.int64)
                r1, r2 = expect(low, count, highest, beyond, target, SHIFT)
                rank = search(
                    x, own, listed, few, low, highest, count, beyond, target, r1, r2,
                    peak, least, 0.0, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    False, PACKED, TOP, UNIT, ALIGNED, SHIFT, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                floor = tl.maximum(floor, value_of(rank, SHIFT))

        if have <= _LISTED:  # every token that is kept is
            least, _ = row_limits(peak, floor, scale)
            value, counts, masses = listed_amounts(
                tokens, have, peak, least, scale, unit_bits, top_p < _TOP_P_ONE, EXACT
            )
            enough = counts >= tl.minimum(have, top_k)
            floor = tl.maximum(floor, tl.max(tl.where(enough, value, -_INF), 0))
            if top_p < _TOP_P_ONE:
                enough = masses >= fraction(tl.max(tl.where(value >= floor, masses, 0), 0), top_p)
                floor = tl.maximum(floor, tl.max(tl.where(enough, value, -_INF), 0))
            if floors == 0:
                column = listed_columns(tokens, have)
                least, _ = row_limits(peak, floor, scale)
                weights = integer_weight(value, peak, least, scale, unit_bits, EXACT)
                part = column // width * _PARTS + column % width // part_columns
                tl.atomic_add(mass + part, weights, mask=weights > 0, sem="relaxed")
                column = tl.min(tl.where(value == peak, column, _NOWHERE), 0)
                token = tl.load(first_ptr + column // width) + column % width
                tl.store(argmax_ptr + row, token)
        else:
            mine = (floors == 0) | (top_k < vocab_size)
            if mine & (holder >= 0) & (top_p < _TOP_P_ONE):
                least, lowest = row_limits(peak, floor, scale)
                few = choose(listed, tops >= least, block)
                all_mass, _more, _most = amounts(
                    x, own, listed, few, least, least, least, peak, least, lowest, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    True, PACKED, TOP, UNIT, ALIGNED, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                target = fraction(all_mass, top_p)
                low = rank_of(least, SHIFT)
                beyond = tl.zeros([], tl.int64)
                r1, r2 = expect(low, all_mass, highest, beyond, target, SHIFT)
                rank = search(
                    x, own, listed, few, low, highest, all_mass, beyond, target, r1, r2,
                    peak, least, lowest, scale,
                    stride_s, stride_v, first_ptr, source, width, part_columns, vocab_size,
                    True, PACKED, TOP, UNIT, ALIGNED, SHIFT, unit_bits, EXACT,
                    BLOCKS, CHUNK, STEPS, TILE,
                )  # fmt: skip
                floor = tl.maximum(floor, value_of(rank, SHIFT))
            if floors == 0:
                least, lowest = row_limits(peak, floor, scale)
                few = choose(listed, tops >= least, block)
                for start in range(0, few, TILE // (STEPS * CHUNK)):
                    values, _column, part, exists = read(
                        x, own, listed, few, start, stride_s, stride_v, first_ptr, source,
                        width, part_columns, vocab_size, TOP, UNIT, ALIGNED,
                        BLOCKS, CHUNK, STEPS, TILE,
                    )  # fmt: skip
                    weights = integer_weight(values, peak, least, scale, unit_bits, EXACT)
                    sums = tl.sum(tl.sum(weights, 2), 1)
                    tl.atomic_add(mass + part, sums, mask=exists, sem="relaxed")
                if holder < 0:
                    tl.store(argmax_ptr + row, tl.full([], -1, tl.int64))
                else:
                    segment = holder // _PARTS
                    first = tl.load(first_ptr + segment)
                    count = tl.minimum(tl.maximum(vocab_size - first, 0), width).to(tl.int32)
                    column = first_of(
                        x + segment.to(tl.int64) * stride_s, holder % _PARTS, stride_v, width,
                        part_columns, count, peak, segment * width, own, TOP, UNIT, TILE,
                    )  # fmt: skip
                    tl.store(argmax_ptr + row, first + column)
        tl.store(floor_ptr + row, floor)
        if floors == 0:
            tl.store(peak_ptr + row, peak)
            tl.store(nans_ptr + row, nans)


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
    filter_top_p_alone: bool,
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
    if top_RSCb is None or filter_top_p_alone:
        second_pass(logits, (part_peak_RSC, part_nans_RSC, min_p_R, scale_R), found)
    if top_RSCb is not None and (filter_top_k or not filter_top_p_alone) and R > 0:
        bits, blocks = weight_bits(vocab_size), top_RSCb.shape[3]
        programs, warps, registers = programs_of(R, x_NSv.device)
        steps = triton.next_power_of_2(triton.cdiv(part_width(v), blocks * CHUNK))
        list_Pb = first_id_S.new_empty((programs, S * PARTS * blocks), dtype=torch.int32)
        token_P2n = first_id_S.new_empty((programs, 2, LISTED), dtype=torch.int32)
        _whole_kernel[(programs,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            part_peak_RSC,
            part_nans_RSC,
            top_RSCb,
            list_Pb,
            token_P2n,
            min_p_R,
            scale_R,
            top_k_R,
            top_p_R,
            peak_R,
            floor_R,
            mass_RSC if filter_top_p_alone else mass_RSC.zero_(),
            argmax_R,
            nans_R,
            edit_arguments(edits, first_id_S),
            int(filter_top_k),
            int(filter_top_p),
            int(filter_top_p_alone),
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
            SHIFT=SHIFT_OF[value_dtype(edits, x_NSv.dtype)],
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            ALL_PARTS=triton.next_power_of_2(S * PARTS),
            ALL_BLOCKS=triton.next_power_of_2(S * PARTS * blocks),
            BLOCKS=blocks,
            CHUNK=CHUNK,
            STEPS=steps,
            TILE=CHUNK * max(warps * 32, steps),
            num_warps=warps,
            maxnreg=registers,
            enable_fp_fusion=False,
        )
    if top_RSCb is not None and filter_top_p_alone:
        nucleus(logits, (scale_R, top_k_R, top_p_R), top_RSCb, peak_R, floor_R, mass_RSC)
        second_pass(logits, (None, None, None, scale_R), (peak_R, floor_R, mass_RSC, None, None))
    return found


def programs_of(rows: int, device: torch.device) -> tuple[int, int, int | None]:
    """Programs that take row after row, warps of each, and registers of a thread at most.

    As many as run at a time. Where there are more rows than multiprocessors, several programs
    share one, of fewer warps each and of registers that all of them have, though some are spilled.
    """
    if device.type != "cuda":
        return min(rows, 2), 8, None
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if rows <= processors:
        return rows, 8, None
    programs = min(rows, 4 * processors, _MOST_PROGRAMS)
    return programs, 4, 128 if rows > 3 * processors else None
