"""What the target has and the draft has not, in one reading of both rows' logits."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import NO_EDITS, edit_arguments, fetch, row_edits
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.passes import chunked, in_chunks, item_parts, item_place
from dtensor_sample.ops.kernels.values import (
    EXACT_BITS,
    add_truncated,
    is_tame,
    load,
    row_limits,
    segment_count,
    share,
    source_row,
)
from dtensor_sample.ops.parts import PARTS, part_width
from dtensor_sample.ops.residual import ONE, SHIFT
from dtensor_sample.ops.values import weight_bits

_ONE = tl.constexpr(ONE)
_SHIFT = tl.constexpr(SHIFT)
_UNITS = tl.constexpr(0.5 ** (SHIFT + 1))
"""Of 2**-60 to those of factors, see `place_of`."""
_WHOLE = tl.constexpr(2.0**52)
"""Float64 numbers from here on have no bits for fractions."""
_WARPS = 4
_TILE = _WARPS * 32 * 8


class PlaceArguments(NamedTuple):
    """What kernels are told about places and their drafts."""

    values: tuple[Any, ...]
    """Pointers, strides and width, as in `_residual_mass_kernel`."""
    top: float
    """The largest finite value of the draft logits' dtype."""
    unit: bool
    """Whether neighbouring columns lie side by side."""
    edits: tuple[Any, ...]
    """Of the drafts' rows, see `edit_arguments`."""


NO_PLACES = PlaceArguments(
    (None, None, None, None, 0, 0, 0, None, None, None, None, None, None, 0), 0.0, True, NO_EDITS
)


def place_arguments(
    row_G: Tensor,
    total_G: Tensor,
    ratio_G: Tensor | None,
    draft_MSw: Tensor | None,
    draft_rows_G: Tensor | None,
    draft_edits: Sequence[Tensor],
    draft_peak_G: Tensor | None,
    draft_floor_G: Tensor | None,
    draft_scale_G: Tensor | None,
    draft_total_G: Tensor | None,
    one_hot_G: Tensor,
    first_id_S: Tensor,
    width: int,
) -> PlaceArguments:
    """The arguments of `ops.residual_mass` about places, as kernels take them.

    `first_id_S`, `width`: first ids and columns of the segments of the target's.
    """
    of_places = (row_G, total_G, ratio_G)
    of_drafts = (draft_rows_G, draft_peak_G, draft_floor_G, draft_scale_G, draft_total_G)
    x_MSw = one_hot_G[:0].view(0, 1, 0) if draft_MSw is None else draft_MSw
    values = (
        *(x_G if x_G is None else x_G.contiguous() for x_G in of_places),
        draft_MSw,
        x_MSw.stride(0),
        x_MSw.stride(2) * width,
        x_MSw.stride(2),
        *(x_G if x_G is None else x_G.contiguous() for x_G in of_drafts),
        one_hot_G.contiguous(),
        x_MSw.shape[2],
    )
    top = 0.0 if draft_MSw is None else torch.finfo(draft_MSw.dtype).max
    edits = edit_arguments(draft_edits, first_id_S)
    return PlaceArguments(values, top, x_MSw.stride(2) == 1, edits)


@triton.jit
def place_of(
    place, segment, total_ptr, ratio_ptr, draft_ptr, draft_stride_m, draft_stride_s,
    draft_rows_ptr, draft_peak_ptr, draft_floor_ptr, draft_scale_ptr, draft_total_ptr,
    one_hot_ptr, draft_width, first_ptr, width, vocab_size,
):  # fmt: skip
    """What `residual` wants to know about a segment at a place.

    Returns:
        The target's factor, a pointer to the draft logits beside the segment's, how many of those
        there are, the column whose token is one-hot (or any that no column has), and the draft's
        peak, limits (see `row_limits`), scale and factor. Factors are in units of 2**-50.
    """
    one = tl.full([], _ONE, tl.int64)
    ratio = one
    if ratio_ptr is not None:
        ratio = tl.load(ratio_ptr + place)
    total = tl.maximum(tl.load(total_ptr + place), 1).to(tl.float64)
    factor = ratio.to(tl.float64) * _UNITS / total
    hot = tl.load(one_hot_ptr + place) - tl.load(first_ptr + segment)
    segment = segment.to(tl.int64)
    if draft_ptr is not None:
        source = tl.load(draft_rows_ptr + place)
        draft = draft_ptr + tl.maximum(source, 0) * draft_stride_m + segment * draft_stride_s
        left = tl.minimum(draft_width, vocab_size - tl.load(first_ptr)) - segment * width
        left = tl.where(source < 0, 0, tl.maximum(left, 0)).to(tl.int32)
        peak = tl.load(draft_peak_ptr + place)
        scale = tl.load(draft_scale_ptr + place)
        least, lowest = row_limits(peak, tl.load(draft_floor_ptr + place), scale)
        draft_total = tl.maximum(tl.load(draft_total_ptr + place), 1).to(tl.float64)
        draft_factor = one.to(tl.float64) * _UNITS / draft_total
    else:  # none of it is read
        draft, left = one_hot_ptr, tl.full([], 0, tl.int32)
        peak = tl.full([], 0.0, tl.float32)
        least, lowest, scale, draft_factor = peak, peak, peak, factor
    return factor, draft, left, hot, peak, least, lowest, scale, draft_factor


@triton.jit
def residual(
    values, column, peak, least, scale, factor, draft, draft_stride_w, left, hot,
    draft_peak, draft_least, draft_scale, draft_factor, base, draft_edits,
    DRAFTED: tl.constexpr, DRAFT_TOP: tl.constexpr, DRAFT_UNIT: tl.constexpr,
    unit_bits, EXACT: tl.constexpr,
):  # fmt: skip
    """The int64 max(ratio * p - q, 0) of columns of a segment, given the target's clean values.

    `draft_edits`: of `row_edits`. DRAFTED: whether any draft has logits.
    """
    p = share(values, peak, least, 0.0, scale, factor, "exact", unit_bits, EXACT)
    if DRAFTED:
        there = column < left
        drafted = fetch(
            draft, column, draft_stride_w, there, there, base, draft_edits,
            DRAFT_TOP, DRAFT_UNIT,
        )  # fmt: skip
        q = share(
            drafted, draft_peak, draft_least, 0.0, draft_scale, draft_factor, "exact", unit_bits,
            EXACT,
        )  # fmt: skip
    else:
        q = tl.zeros_like(p)
    return tl.where(column == hot, 0, _surplus(p, q).to(tl.int64) << _SHIFT)


@triton.jit
def _surplus(p, q):
    """Max(p - q, 0) in units of half the size, to be truncated."""
    difference = p - q
    return difference + tl.abs(difference)


@triton.jit
def _quick_sums(
    p, q, begin, part_columns, count,
    DRAFTED: tl.constexpr, KEEP: tl.constexpr, UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr,
    unit_bits, G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[G, LANES] int64: sums of residuals over every LANES-th column, where none needs care.

    Args:
        p, q: of the target and of the draft a pointer to column 0, the stride between columns, and
            peak, limits, scale and factor, see `place_of`.
        begin, part_columns, count: of the item, whose columns are `in_chunks`.
        DRAFTED: whether there are draft logits beside all of them; or else beside none.
        KEEP: see `weight`.
    """
    lane = tl.arange(0, LANES)[None, :]
    column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
    total = tl.full([G, LANES], _WHOLE, tl.float64)
    full = chunked(begin + G - 1, part_columns, count) // LANES * LANES
    for step in range(0, full, LANES):
        total = _add_surplus(
            total, p, q, column + step, None, DRAFTED, KEEP, UNIT, DRAFT_UNIT, unit_bits
        )
    left = chunked(begin + tl.arange(0, G)[:, None], part_columns, count)
    for step in range(full, chunked(begin, part_columns, count), LANES):
        present = lane + step < left
        total = _add_surplus(
            total, p, q, column + step, present, DRAFTED, KEEP, UNIT, DRAFT_UNIT, unit_bits
        )
    return (total - _WHOLE).to(tl.int64) << _SHIFT


@triton.jit
def _add_surplus(
    total, p, q, column, present, DRAFTED: tl.constexpr, KEEP: tl.constexpr,
    UNIT: tl.constexpr, DRAFT_UNIT: tl.constexpr, unit_bits,
):  # fmt: skip
    """Total and `_surplus` of columns of tame rows; those that are not present have none."""
    values = load(p[0], column, p[1], present, UNIT)
    some = True
    if KEEP == "least":  # where the target keeps no token, there is nothing to compute
        some = tl.max(tl.max((values >= p[3]).to(tl.int32), 1), 0) > 0
    if some:
        share_p = _quick_share(values, p, KEEP, unit_bits)
        share_q = tl.zeros_like(share_p)
        if DRAFTED:
            drafted = load(q[0], column, q[1], present, DRAFT_UNIT)
            share_q = _quick_share(drafted, q, KEEP, unit_bits)
        total = add_truncated(total, _surplus(share_p, share_q))
    return total


@triton.jit
def _quick_share(values, of_row, KEEP: tl.constexpr, unit_bits):
    """`share` of values of a tame row."""
    _pointer, _stride, peak, least, lowest, scale, factor = of_row
    return share(values, peak, least, lowest, scale, factor, KEEP, unit_bits, True)


@kernel
def _residual_mass_kernel(
    x_ptr,  # [N, S, v] the target's logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    place_row_ptr,  # [G] int64
    total_ptr,  # [G] int64
    ratio_ptr,  # [G] int64, or unused
    draft_ptr,  # [M, 1, w] the draft's logits; this and what follows may be unused
    draft_stride_m,
    draft_stride_s,  # of as many columns as a segment has
    draft_stride_w,
    draft_rows_ptr,  # [G] int64
    draft_peak_ptr,  # [G] float32
    draft_floor_ptr,  # [G] float32
    draft_scale_ptr,  # [G] float32
    draft_total_ptr,  # [G] int64
    one_hot_ptr,  # [G] int64
    draft_width,  # w
    index_ptr,  # [Q] int64, or unused
    mass_ptr,  # out: [Q, S, PARTS] int64
    edits,  # of `edit_arguments`
    draft_edits,  # likewise
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    DRAFT_TOP: tl.constexpr,
    DRAFT_UNIT: tl.constexpr,
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    G: tl.constexpr,  # parts of a program
    LANES: tl.constexpr,  # columns of each that are read at once
):
    """Sums of residuals over parts.

    Example: p [1/2, 1/2], q [1, 0] and ratio 1: the part weighs 2**59.
    """
    item = tl.program_id(0)
    place, segment, begin = item_place(item, segments, G)
    place = place.to(tl.int64)
    if index_ptr is not None:
        place = tl.load(index_ptr + place)
    row = tl.load(place_row_ptr + place, mask=place >= 0, other=-1)
    mass = mass_ptr + item.to(tl.int64) * G + tl.arange(0, G)
    if row < 0:  # in block verification, most places
        tl.store(mass, tl.zeros([G], tl.int64))
        return
    source = source_row(rows_ptr, row, HAS_ROWS)
    own = row_edits(row, edits)
    draft_own = row_edits(place, draft_edits)
    count = segment_count(first_ptr, segment, source, width, vocab_size)
    x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
    peak = tl.load(peak_ptr + row)
    scale = tl.load(scale_ptr + row)
    least, lowest = row_limits(peak, tl.load(floor_ptr + row), scale)
    (
        factor, draft, left, hot,
        draft_peak, draft_least, draft_lowest, draft_scale, draft_factor,
    ) = place_of(
        place, segment, total_ptr, ratio_ptr, draft_ptr, draft_stride_m, draft_stride_s,
        draft_rows_ptr, draft_peak_ptr, draft_floor_ptr, draft_scale_ptr, draft_total_ptr,
        one_hot_ptr, draft_width, first_ptr, width, vocab_size,
    )  # fmt: skip
    lane = tl.arange(0, LANES)[None, :]
    column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
    total = tl.zeros([G, LANES], tl.int64)
    # Quickly where nothing needs care.
    alone, drafted = False, False
    if EXACT and edits[0] is None and draft_edits[0] is None:
        end = tl.minimum((begin + G) * part_columns, count)
        quick = (hot < begin * part_columns) | (hot >= end)
        quick = quick & in_chunks(begin, part_columns, count, G) & is_tame(peak, scale, TOP)
        alone = quick & (left == 0)
        if draft_ptr is not None:
            drafted = quick & (left >= end) & is_tame(draft_peak, draft_scale, DRAFT_TOP)
    p = (x, stride_v, peak, least, lowest, scale, factor)
    q = (
        draft, draft_stride_w,
        draft_peak, draft_least, draft_lowest, draft_scale, draft_factor,
    )  # fmt: skip
    if alone:
        total = _quick_sums(
            p, q, begin, part_columns, count, False, "least", UNIT, DRAFT_UNIT, unit_bits, G, LANES
        )
    elif drafted:
        if (least <= peak + lowest) & (draft_least <= draft_peak + draft_lowest):
            total = _quick_sums(
                p, q, begin, part_columns, count, True, "any", UNIT, DRAFT_UNIT, unit_bits,
                G, LANES,
            )  # fmt: skip
        else:
            total = _quick_sums(
                p, q, begin, part_columns, count, True, "least", UNIT, DRAFT_UNIT, unit_bits,
                G, LANES,
            )  # fmt: skip
    else:
        for step in range(0, tl.where(begin * part_columns < count, part_columns, 0), LANES):
            wanted = (lane + step < part_columns) & (column + step < count)
            base = segment * width
            values = fetch(x, column + step, stride_v, wanted, wanted, base, own, TOP, UNIT)
            total += residual(
                values, column + step, peak, least, scale, factor, draft, draft_stride_w, left,
                hot, draft_peak, draft_least, draft_scale, draft_factor, base, draft_own,
                draft_ptr is not None, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
            )  # fmt: skip
    tl.store(mass, tl.sum(total, 1))


def residual_mass(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    row_G: Tensor,
    total_G: Tensor,
    ratio_G: Tensor | None,
    draft_MSw: Tensor | None,
    draft_rows_G: Tensor | None,
    draft_edits: Sequence[Tensor],
    draft_peak_G: Tensor | None,
    draft_floor_G: Tensor | None,
    draft_scale_G: Tensor | None,
    draft_total_G: Tensor | None,
    one_hot_G: Tensor,
    index_Q: Tensor | None,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.residual_mass`."""
    places = place_arguments(
        row_G, total_G, ratio_G, draft_MSw, draft_rows_G, draft_edits, draft_peak_G, draft_floor_G,
        draft_scale_G, draft_total_G, one_hot_G, first_id_S, x_NSv.shape[2],
    )  # fmt: skip
    (_, S, v), Q = x_NSv.shape, (row_G if index_Q is None else index_Q).shape[0]
    mass_QSC = first_id_S.new_empty((Q, S, PARTS))
    bits, G = weight_bits(vocab_size), item_parts(Q, S, v)
    if Q > 0:
        _residual_mass_kernel[(Q * S * (PARTS // G),)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            *places.values,
            None if index_Q is None else index_Q.contiguous(),
            mass_QSC,
            edit_arguments(edits, first_id_S),
            places.edits,
            S,
            v,
            part_width(v),
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            HAS_ROWS=rows_R is not None,
            DRAFT_TOP=places.top,
            DRAFT_UNIT=places.unit,
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            G=G,
            LANES=_TILE // G,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return mass_QSC
