"""Finding the token at a point of a row's running sum, and making the point."""

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
    integer_weight,
    row_limits,
    segment_count,
    source_row,
)
from dtensor_sample.ops.parts import PARTS, part_width
from dtensor_sample.ops.values import count_rows, weight_bits

_PARTS = tl.constexpr(PARTS)
_BLOCK = tl.constexpr(128)
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_TILE = 4096


@kernel
def _aim_kernel(
    sum_ptr,  # [R, P, PARTS] int64
    uniform_ptr,  # [R] int64
    start_ptr,  # out: [R, P, PARTS] int64
    point_ptr,  # out: [R] int64
    parts,  # P * PARTS
    ALL_PARTS: tl.constexpr,  # rounded up to a power of two
):
    """Exclusive sums of each row's parts, and uniform * total / 2**62.

    Example: sums [4, 0, 2] and a uniform of 2**61 give starts [0, 4, 4] and the point 3.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, ALL_PARTS)
    sums = tl.load(sum_ptr + row * parts + part, mask=part < parts, other=0)
    tl.store(start_ptr + row * parts + part, tl.cumsum(sums, 0) - sums, mask=part < parts)
    # Both factors are at most 2**62: doubled, the high word of their product is the one wanted.
    total = (tl.sum(sums, 0) << 1).to(tl.uint64, bitcast=True)
    uniform = (tl.load(uniform_ptr + row) << 1).to(tl.uint64, bitcast=True)
    tl.store(point_ptr + row, tl.umulhi(uniform, total).to(tl.int64, bitcast=True))


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
    start_ptr,  # [R, S, PARTS] int64, any row stride
    start_stride,
    point_ptr,  # [R] int64
    id_ptr,  # out: [R] int64
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
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    RESIDUAL: tl.constexpr,  # pick by residuals instead of weights
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    DRAFT_TOP: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    ALL_PARTS: tl.constexpr,  # S * PARTS, rounded up to a power of two
    TILE: tl.constexpr,  # columns read at once
):
    """One row: the last part that starts at or before the point, then the token in it.

    Example: parts that start at [0, 4, 4] hold the points 0 to 3 and, in the last, 4 and up.
    """
    row = tl.program_id(0).to(tl.int64)
    point = tl.load(point_ptr + row)
    part = tl.arange(0, ALL_PARTS)
    starts = tl.load(
        start_ptr + row * start_stride + part,
        mask=part < segments * _PARTS,
        other=0x7FFFFFFFFFFFFFFF,
    )
    at = tl.max(tl.where(starts <= point, part, -1), 0)
    running = tl.sum(tl.where(part == at, starts, 0), 0)
    segment = tl.maximum(at, 0) // _PARTS
    source = source_row(rows_ptr, row, HAS_ROWS)
    count = segment_count(first_ptr, segment, source, width, vocab_size)
    x_ptr += tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
    base = segment * width
    peak = tl.load(peak_ptr + row)
    scale = tl.load(scale_ptr + row)
    least, _ = row_limits(peak, tl.load(floor_ptr + row), scale)
    if RESIDUAL:
        factor, draft, left, hot, draft_peak, draft_least, _, draft_scale, draft_factor = draft_row(
            row, segment, total_ptr, ratio_ptr, draft_ptr, draft_stride_m, draft_stride_s,
            draft_rows_ptr, draft_peak_ptr, draft_floor_ptr, draft_scale_ptr, draft_total_ptr,
            one_hot_ptr, draft_width, first_ptr, width, vocab_size,
        )  # fmt: skip
    begin = (tl.maximum(at, 0) % _PARTS) * part_columns
    end = tl.where(at < 0, begin, tl.minimum(begin + part_columns, count))
    # Block by block of the part, then token by token in the block that holds the point.
    block = tl.arange(0, TILE // _BLOCK)
    column = begin + block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    first_column = end
    before = running
    for step in range(0, end - begin, TILE):
        x = fetch(
            x_ptr, column + step, stride_v, column + step < width, column + step < end,
            base, row, edits, TOP, UNIT,
        )  # fmt: skip
        if RESIDUAL:
            amount = residual(
                x, column + step, peak, least, scale, factor, draft, draft_stride_w, left, hot,
                draft_peak, draft_least, draft_scale, draft_factor, base, row, draft_edits,
                DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
            )  # fmt: skip
        else:
            amount = integer_weight(x, peak, least, scale, unit_bits, EXACT)
        sums = tl.sum(amount, 1)
        beyond = running + tl.cumsum(sums, 0)
        here = (beyond > point) & (beyond - sums <= point)
        first_column = tl.minimum(
            first_column, tl.min(tl.where(here, begin + step + block * _BLOCK, end), 0)
        )
        before = tl.maximum(before, tl.max(tl.where(here, beyond - sums, 0), 0))
        running += tl.sum(sums, 0)
    column = first_column + tl.arange(0, _BLOCK)
    x = fetch(x_ptr, column, stride_v, column < end, column < end, base, row, edits, TOP, UNIT)
    if RESIDUAL:
        amount = residual(
            x, column, peak, least, scale, factor, draft, draft_stride_w, left, hot,
            draft_peak, draft_least, draft_scale, draft_factor, base, row, draft_edits,
            DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
        )  # fmt: skip
    else:
        amount = integer_weight(x, peak, least, scale, unit_bits, EXACT)
    beyond = before + tl.cumsum(amount, 0)
    found = tl.min(tl.where(beyond > point, column, _NOWHERE), 0)
    token = tl.load(first_ptr + segment) + found
    tl.store(id_ptr + row, tl.where(found < _NOWHERE, token, -1))


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


def aim(sum_RPC: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel of `ops.aim`."""
    sum_RPC = sum_RPC.contiguous()
    start_RPC, point_R = torch.empty_like(sum_RPC), uniform_R.new_empty(uniform_R.shape)
    R, P, C = sum_RPC.shape
    if R > 0:
        _aim_kernel[(R,)](
            sum_RPC,
            uniform_R.contiguous(),
            start_RPC,
            point_R.contiguous(),
            P * C,
            ALL_PARTS=triton.next_power_of_2(P * C),
            num_warps=1,
        )
    return start_RPC, point_R


def pick(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    start_RSC: Tensor,
    point_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.pick`."""
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
    return _pick(row, None, start_RSC, point_R, vocab_size)


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
    start_RSC: Tensor,
    point_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.residual_pick`."""
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
    of_draft = draft_arguments(
        total_R, ratio_R, draft_MSw, draft_rows_R, draft_edits, draft_peak_R, draft_floor_R,
        draft_scale_R, draft_total_R, one_hot_R, first_id_S, x_NSv.shape[2],
    )  # fmt: skip
    return _pick(row, of_draft, start_RSC, point_R, vocab_size)


def _pick(
    row: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor], Tensor, Tensor, Tensor],
    draft: DraftArguments | None,
    start_RSC: Tensor,
    point_R: Tensor,
    vocab_size: int,
) -> Tensor:
    x_NSv, first_id_S, rows_R, edits, *of_row = row
    (_, S, v), R = x_NSv.shape, count_rows(x_NSv, rows_R)
    id_R = first_id_S.new_empty(R)
    bits = weight_bits(vocab_size)
    if R > 0:
        _pick_kernel[(R,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            *(x_R.contiguous() for x_R in of_row),
            start_RSC,
            start_RSC.stride(0),
            point_R.contiguous(),
            id_R,
            *(NO_DRAFT if draft is None else draft).values,
            edit_arguments(edits, first_id_S),
            (NO_DRAFT if draft is None else draft).edits,
            S,
            v,
            part_width(v),
            vocab_size,
            RESIDUAL=draft is not None,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            HAS_ROWS=rows_R is not None,
            DRAFT_TOP=0.0 if draft is None else draft.top,
            DRAFT_UNIT=draft is not None and draft.unit,
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            ALL_PARTS=triton.next_power_of_2(S * PARTS),
            TILE=min(_TILE, max(128, triton.next_power_of_2(part_width(v)))),
            num_warps=8,
            enable_fp_fusion=False,
        )
    return id_R


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
