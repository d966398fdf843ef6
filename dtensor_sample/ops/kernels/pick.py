"""Finding the token that a uniform number points at in a row's running sum."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit, edit_arguments, fetch
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.residual import (
    NO_DRAFT,
    DraftArguments,
    draft_arguments,
    draft_row,
    residual,
)
from dtensor_sample.ops.kernels.values import (
    EXACT_BITS,
    clean,
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
from dtensor_sample.ops.parts import PARTS, part_width
from dtensor_sample.ops.values import count_rows, weight_bits

_PARTS = tl.constexpr(PARTS)
_BLOCK = tl.constexpr(128)
_TILE = 4096


@kernel
def _pick_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    sum_ptr,  # [R, P, PARTS] int64, of all parts of the vocabulary; this and uniforms if DRAWN
    row_stride,
    segment_stride,
    uniform_ptr,  # [R] int64
    argmax_ptr,  # [R] int64; this and what follows unused if only tokens are wanted
    nans_ptr,  # [R] int64
    greedy_ptr,  # [R] bool
    found_ptr,  # out: [R] int64 tokens, or [R, 5] outcomes
    total_ptr,  # this and what follows as in `residual_mass`, if RESIDUAL
    ratio_ptr,
    draft_ptr,
    draft_stride_m,
    draft_stride_s,
    draft_stride_w,
    draft_rows_ptr,
    draft_peak_ptr,
    draft_floor_ptr,
    draft_scale_ptr,
    draft_total_ptr,
    one_hot_ptr,
    draft_width,
    edits,  # of `edit_arguments`
    draft_edits,  # likewise, if RESIDUAL
    parts,  # P * PARTS
    first_part,  # how many of them come before those here
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    DRAWN: tl.constexpr,  # whether there are sums
    RESIDUAL: tl.constexpr,  # pick by residuals instead of weights
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    DRAFT_TOP: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    ALL_PARTS: tl.constexpr,  # P * PARTS, rounded up to a power of two
    TILE: tl.constexpr,  # columns read at once
):
    """One row: the last part that starts at or before uniform * total / 2**62, and the token there.

    Example: of parts [4, 0, 2], which start at [0, 4, 4], a uniform of 2**61 points at 3, in the
    first, and one of 3 * 2**60 at 4, in the last.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.full([], -1, tl.int64)
    if DRAWN:
        part = tl.arange(0, ALL_PARTS)
        entry = (part // _PARTS).to(tl.int64) * segment_stride + part % _PARTS
        sums = tl.load(sum_ptr + row * row_stride + entry, mask=part < parts, other=0)
        # Both factors are at most 2**62: doubled, the high word of their product is the one wanted.
        total = (tl.sum(sums, 0) << 1).to(tl.uint64, bitcast=True)
        uniform = (tl.load(uniform_ptr + row) << 1).to(tl.uint64, bitcast=True)
        point = tl.umulhi(uniform, total).to(tl.int64, bitcast=True)
        starts = tl.cumsum(sums, 0) - sums
        last = tl.max(tl.where((starts <= point) & (part < parts), part, 0), 0)
        running = tl.sum(tl.where(part == last, starts, 0), 0)
        place = last - first_part
        if (place >= 0) & (place < segments * _PARTS):
            segment = place // _PARTS
            source = source_row(rows_ptr, row, HAS_ROWS)
            count = segment_count(first_ptr, segment, source, width, vocab_size)
            x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
            begin = place % _PARTS * part_columns
            end = tl.maximum(tl.minimum(begin + part_columns, count), begin)
            peak = tl.load(peak_ptr + row)
            scale = tl.load(scale_ptr + row)
            least, lowest = row_limits(peak, tl.load(floor_ptr + row), scale)
            target = (x, stride_v, peak, least, lowest, scale, segment * width, row)
            draft = None
            if RESIDUAL:
                draft = draft_row(
                    row, segment, total_ptr, ratio_ptr, draft_ptr, draft_stride_m, draft_stride_s,
                    draft_rows_ptr, draft_peak_ptr, draft_floor_ptr, draft_scale_ptr,
                    draft_total_ptr, one_hot_ptr, draft_width, first_ptr, width, vocab_size,
                )  # fmt: skip
            column = _column_beyond(
                target, draft, draft_stride_w, point, running, begin, end, edits, draft_edits,
                TOP, UNIT, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT, TILE,
            )  # fmt: skip
            token = tl.where(column < end, tl.load(first_ptr + segment) + column, -1)
    if argmax_ptr is None:
        tl.store(found_ptr + row, token)
    else:
        argmax = tl.load(argmax_ptr + row)
        if DRAWN:
            token = tl.where(tl.load(greedy_ptr + row) != 0, argmax, token)
        else:
            token = argmax
        failed = (argmax < 0).to(tl.int64)
        outcome = found_ptr + row * 5
        tl.store(outcome, token)
        tl.store(outcome + 1, 1 - failed)
        tl.store(outcome + 2, tl.zeros_like(failed))
        tl.store(outcome + 3, tl.load(nans_ptr + row))
        tl.store(outcome + 4, failed)


@triton.jit
def _column_beyond(
    target, draft, draft_stride, point, running, begin, end, edits, draft_edits,
    TOP: tl.constexpr, UNIT: tl.constexpr, DRAFT_TOP: tl.constexpr, DRAFT_UNIT: tl.constexpr,
    unit_bits, EXACT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The first column from `begin` to `end` at which the running sum exceeds the point, or `end`.

    Block by block, then token by token in the block that holds the point.

    Args:
        target, draft, draft_stride: see `_amounts`.
        running: the sum of all before `begin`.
    """
    block = tl.arange(0, TILE // _BLOCK)
    column = begin + block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    first = end
    before = running
    for step in range(0, end - begin, TILE):
        amount = _amounts(
            column + step, end, target, draft, draft_stride, edits, draft_edits,
            TOP, UNIT, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
        )  # fmt: skip
        sums = tl.sum(amount, 1)
        beyond = running + tl.cumsum(sums, 0)
        here = (beyond > point) & (beyond - sums <= point)
        first = tl.minimum(first, tl.min(tl.where(here, begin + step + block * _BLOCK, end), 0))
        before = tl.maximum(before, tl.max(tl.where(here, beyond - sums, 0), 0))
        running += tl.sum(sums, 0)
    columns = first + tl.arange(0, _BLOCK)
    amounts = _amounts(
        columns, end, target, draft, draft_stride, edits, draft_edits,
        TOP, UNIT, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
    )  # fmt: skip
    found = (before + tl.cumsum(amounts, 0) > point) & (columns < end)
    return tl.min(tl.where(found, columns, end), 0)


@triton.jit
def _amounts(
    column, end, target, draft, draft_stride, edits, draft_edits,
    TOP: tl.constexpr, UNIT: tl.constexpr, DRAFT_TOP: tl.constexpr, DRAFT_UNIT: tl.constexpr,
    unit_bits, EXACT: tl.constexpr,
):  # fmt: skip
    """The int64 weights of columns before `end`, or with a draft the residuals; 0 from there on.

    Args:
        target: a pointer to column 0, the stride between columns, peak, limits, scale, what columns
            of the segment follow, and the row.
        draft: what `draft_row` tells, or None.
        draft_stride: between its columns.
    """
    x, stride, peak, least, lowest, scale, base, row = target
    there = column < end
    if draft is not None:
        factor, draft_x, left, hot, draft_peak, draft_least, _, draft_scale, draft_factor = draft
        values = fetch(x, column, stride, there, there, base, row, edits, TOP, UNIT)
        amount = residual(
            values, column, peak, least, scale, factor, draft_x, draft_stride, left, hot,
            draft_peak, draft_least, draft_scale, draft_factor, base, row, draft_edits,
            DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
        )  # fmt: skip
    else:
        quick = False
        if EXACT and edits[0] is None:
            quick = is_tame(peak, scale, TOP)
        if quick:
            values = load(x, column, stride, there, UNIT)
            units = weight(values, peak, least, lowest, scale, "least")
            amount = integer_sum(unit_sum(column, unit_bits) + units, unit_bits)
        else:
            values = fetch(x, column, stride, there, there, base, row, edits, TOP, UNIT)
            amount = integer_weight(values, peak, least, scale, unit_bits, EXACT)
    return amount


@kernel
def _lookup_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    token_ptr,  # [R] int64
    weight_ptr,  # out: [R] int64
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    HAS_ROWS: tl.constexpr,
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    ALL_SEGMENTS: tl.constexpr,  # S, rounded up to a power of two
):
    """The weight of one token of a row: of the segment that has its id, if any."""
    row = tl.program_id(0).to(tl.int64)
    source = source_row(rows_ptr, row, HAS_ROWS)
    token = tl.load(token_ptr + row)
    segment = tl.arange(0, ALL_SEGMENTS)
    first = tl.load(first_ptr + segment, mask=segment < segments, other=0)
    column = token - first
    known = (token >= 0) & (token < vocab_size) & (source >= 0)
    here = (segment < segments) & (column >= 0) & (column < tl.where(known, width, 0))
    at = tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s + column * stride_v
    x = clean(tl.load(x_ptr + at, mask=here, other=-float("inf")).to(tl.float32), here, TOP)
    if edits[0] is not None:
        x = edit(x, segment.to(tl.int64) * width + column, here, row, edits)
    peak = tl.load(peak_ptr + row)
    scale = tl.load(scale_ptr + row)
    least, _ = row_limits(peak, tl.load(floor_ptr + row), scale)
    weights = integer_weight(x, peak, least, scale, unit_bits, EXACT)
    tl.store(weight_ptr + row, tl.sum(weights, 0))


def pick(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    first_segment: int,
    uniform_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.pick`."""
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
    token_R = first_id_S.new_empty(count_rows(x_NSv, rows_R))
    _pick(row, (mass_RPC, first_segment, uniform_R), None, None, token_R, vocab_size)
    return token_R


def draw(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    first_segment: int,
    uniform_R: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
    greedy_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.draw`."""
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
    outcome_R5 = first_id_S.new_empty((count_rows(x_NSv, rows_R), 5))
    told = (argmax_R, nans_R, greedy_R)
    _pick(row, (mass_RPC, first_segment, uniform_R), told, None, outcome_R5, vocab_size)
    return outcome_R5


def residual_pick(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    total_R: Tensor,
    ratio_R: Tensor,
    draft_MSw: Tensor,
    draft_rows_R: Tensor,
    draft_edits: Sequence[Tensor],
    draft_peak_R: Tensor,
    draft_floor_R: Tensor,
    draft_scale_R: Tensor,
    draft_total_R: Tensor,
    one_hot_R: Tensor,
    spare_RPC: Tensor,
    first_segment: int,
    uniform_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.residual_pick`."""
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
    of_draft = draft_arguments(
        total_R, ratio_R, draft_MSw, draft_rows_R, draft_edits, draft_peak_R, draft_floor_R,
        draft_scale_R, draft_total_R, one_hot_R, first_id_S, x_NSv.shape[2],
    )  # fmt: skip
    token_R = first_id_S.new_empty(count_rows(x_NSv, rows_R))
    _pick(row, (spare_RPC, first_segment, uniform_R), None, of_draft, token_R, vocab_size)
    return token_R


def _pick(
    row: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor], Tensor, Tensor, Tensor],
    drawn: tuple[Tensor, int, Tensor],
    told: tuple[Tensor, Tensor, Tensor] | None,
    draft: DraftArguments | None,
    found: Tensor,
    vocab_size: int,
) -> None:
    """Write to `found` tokens, or if argmax, NaN counts and greedy rows are given, outcomes."""
    x_NSv, first_id_S, rows_R, edits, *of_row = row
    sum_RPC, first_segment, uniform_R = drawn
    (_, S, v), R, (P, C) = x_NSv.shape, found.shape[0], sum_RPC.shape[1:]
    if C > 0 and sum_RPC.stride(2) != 1:
        sum_RPC = sum_RPC.contiguous()
    bits = weight_bits(vocab_size)
    if R > 0:
        _pick_kernel[(R,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            *(x_R.contiguous() for x_R in of_row),
            sum_RPC,
            *sum_RPC.stride()[:2],
            uniform_R.contiguous(),
            *((None, None, None) if told is None else (x_R.contiguous() for x_R in told)),
            found,
            *(NO_DRAFT if draft is None else draft).values,
            edit_arguments(edits, first_id_S),
            (NO_DRAFT if draft is None else draft).edits,
            P * C,
            first_segment * C,
            S,
            v,
            part_width(v),
            vocab_size,
            DRAWN=C > 0,
            RESIDUAL=draft is not None,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            HAS_ROWS=rows_R is not None,
            DRAFT_TOP=0.0 if draft is None else draft.top,
            DRAFT_UNIT=draft is not None and draft.unit,
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            ALL_PARTS=triton.next_power_of_2(max(P * C, 1)),
            TILE=min(_TILE, max(128, triton.next_power_of_2(part_width(v)))),
            num_warps=8,
            enable_fp_fusion=False,
        )


def lookup(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    token_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.lookup`."""
    (_, S, v), R = x_NSv.shape, count_rows(x_NSv, rows_R)
    weight_R = first_id_S.new_empty(R)
    bits = weight_bits(vocab_size)
    if R > 0:
        _lookup_kernel[(R,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            token_R.contiguous(),
            weight_R,
            edit_arguments(edits, first_id_S),
            S,
            v,
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            HAS_ROWS=rows_R is not None,
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            ALL_SEGMENTS=triton.next_power_of_2(S),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return weight_R
