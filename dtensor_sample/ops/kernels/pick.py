"""Finding the token that a uniform number points at in a row's running sum."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit, edit_arguments, fetch, row_edits
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.residual import (
    NO_PLACES,
    PlaceArguments,
    place_arguments,
    place_of,
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
from dtensor_sample.ops.values import weight_bits

_PARTS = tl.constexpr(PARTS)
_BLOCK = tl.constexpr(128)
_INF = tl.constexpr(float("inf"))
_MANY = 512
"""So many programs keep the chip busy, and do best with few columns at a time."""


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
    index_ptr,  # [Q] int64, or unused: Q = R
    uniform_ptr,  # [Q] int64
    argmax_ptr,  # [R] int64; this and what follows unused if only tokens are wanted
    nans_ptr,  # [R] int64
    greedy_ptr,  # [R] bool
    found_ptr,  # out: [Q] int64 tokens, or [R, 5] outcomes
    spare_ptr,  # as `sum_ptr` of places or, without OF_PLACES, of the Q; what follows if RESIDUAL
    spare_row_stride,
    spare_segment_stride,
    wanted_ptr,  # [Q] int64
    place_row_ptr,  # this and what follows as in `residual_mass`
    total_ptr,
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
    draft_edits,  # likewise
    parts,  # P * PARTS
    first_part,  # how many of them come before those here
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    DRAWN: tl.constexpr,  # whether there are sums
    RESIDUAL: tl.constexpr,  # pick by the residuals of places where any are left
    OF_PLACES: tl.constexpr,
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
    number = tl.program_id(0).to(tl.int64)
    row = number
    if index_ptr is not None:
        row = tl.load(index_ptr + number)
    # What waits for nothing is loaded here: a load after another takes as long as a few thousand
    # weights.
    if argmax_ptr is not None:
        argmax, nans = tl.load(argmax_ptr + number), tl.load(nans_ptr + number)
        if DRAWN:
            greedy = tl.load(greedy_ptr + number) != 0
    token = tl.full([], -1, tl.int64)
    if DRAWN:
        part = tl.arange(0, ALL_PARTS)
        column = part % _PARTS
        uniform = tl.load(uniform_ptr + number)
        if RESIDUAL:
            place = tl.load(wanted_ptr + number)
            if place >= 0:
                of_row = _of_row(
                    tl.load(place_row_ptr + place), rows_ptr, peak_ptr, floor_ptr, scale_ptr,
                    HAS_ROWS,
                )  # fmt: skip
                of = number
                if OF_PLACES:
                    of = place
                entry = (part // _PARTS).to(tl.int64) * spare_segment_stride + column
                sums = tl.load(
                    spare_ptr + of * spare_row_stride + entry, mask=part < parts, other=0
                )
                if tl.sum(sums, 0) > 0:
                    chosen, running, point = _aim(sums, uniform, part, parts)
                    chosen -= first_part
                    if (chosen >= 0) & (chosen < segments * _PARTS):
                        draft = place_of(
                            place, chosen // _PARTS, total_ptr, ratio_ptr, draft_ptr,
                            draft_stride_m, draft_stride_s, draft_rows_ptr, draft_peak_ptr,
                            draft_floor_ptr, draft_scale_ptr, draft_total_ptr, one_hot_ptr,
                            draft_width, first_ptr, width, vocab_size,
                        )  # fmt: skip
                        token = _token_of(
                            of_row, chosen, point, running,
                            x_ptr, stride_n, stride_s, stride_v, first_ptr, draft, draft_stride_w,
                            edits, row_edits(place, draft_edits), width, part_columns, vocab_size,
                            True, draft_ptr is not None, TOP, UNIT, DRAFT_TOP, DRAFT_UNIT,
                            unit_bits, EXACT, TILE,
                        )  # fmt: skip
                    row = tl.full([], -1, tl.int64)  # it is drawn from nothing else
        if row >= 0:
            entry = (part // _PARTS).to(tl.int64) * segment_stride + column
            sums = tl.load(sum_ptr + row * row_stride + entry, mask=part < parts, other=0)
            of_row = _of_row(row, rows_ptr, peak_ptr, floor_ptr, scale_ptr, HAS_ROWS)
            chosen, running, point = _aim(sums, uniform, part, parts)
            chosen -= first_part
            if (chosen >= 0) & (chosen < segments * _PARTS):
                token = _token_of(
                    of_row, chosen, point, running,
                    x_ptr, stride_n, stride_s, stride_v, first_ptr, None, 0, edits, edits,
                    width, part_columns, vocab_size,
                    False, False, TOP, UNIT, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT, TILE,
                )  # fmt: skip
    if argmax_ptr is None:
        tl.store(found_ptr + number, token)
    else:
        if DRAWN:
            token = tl.where(greedy, argmax, token)
        else:
            token = argmax
        failed = (argmax < 0).to(tl.int64)
        outcome = found_ptr + number * 5
        tl.store(outcome, token)
        tl.store(outcome + 1, 1 - failed)
        tl.store(outcome + 2, tl.zeros_like(failed))
        tl.store(outcome + 3, nans)
        tl.store(outcome + 4, failed)


@triton.jit
def _aim(sums, uniform, part, parts):
    """The part that a uniform number points at, the sum of those before it, and the point."""
    # Both factors are at most 2**62: doubled, the high word of their product is the one wanted.
    total = (tl.sum(sums, 0) << 1).to(tl.uint64, bitcast=True)
    point = tl.umulhi((uniform << 1).to(tl.uint64, bitcast=True), total).to(tl.int64, bitcast=True)
    starts = tl.cumsum(sums, 0) - sums
    reached = (starts <= point) & (part < parts)
    last, start = tl.reduce(
        (tl.where(reached, part, 0), tl.where(reached, starts, 0)), 0, _larger_two
    )
    return last, start, point


@triton.jit
def _larger_two(a1, a2, b1, b2):
    return tl.maximum(a1, b1), tl.maximum(a2, b2)


@triton.jit
def _larger_three(a1, a2, a3, b1, b2, b3):
    return tl.maximum(a1, b1), tl.maximum(a2, b2), tl.maximum(a3, b3)


@triton.jit
def _of_row(row, rows_ptr, peak_ptr, floor_ptr, scale_ptr, HAS_ROWS: tl.constexpr):
    """Where a row lies among the logits, its index, peak, floor and scale."""
    source = source_row(rows_ptr, row, HAS_ROWS)
    return source, row, tl.load(peak_ptr + row), tl.load(floor_ptr + row), tl.load(scale_ptr + row)


@triton.jit
def _token_of(
    of_row, part, point, running,
    x_ptr, stride_n, stride_s, stride_v, first_ptr, draft, draft_stride, edits, draft_edits,
    width, part_columns, vocab_size,
    RESIDUAL: tl.constexpr, DRAFTED: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr,
    DRAFT_TOP: tl.constexpr, DRAFT_UNIT: tl.constexpr, unit_bits, EXACT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The token of a row in one of the parts here that the point lies in, or -1.

    Args:
        of_row: see `_of_row`.
        draft, draft_stride: see `_amounts`.
        running: the sum of all before the part.
    """
    source, row, peak, floor, scale = of_row
    segment = part // _PARTS
    first = tl.load(first_ptr + segment)
    count = segment_count(first_ptr, segment, source, width, vocab_size)
    x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
    begin = part % _PARTS * part_columns
    stop = tl.maximum(tl.minimum(begin + part_columns, width), begin)
    end = tl.maximum(tl.minimum(stop, count), begin)
    least, lowest = row_limits(peak, floor, scale)
    target = (x, stride_v, peak, least, lowest, scale, segment * width)
    edits = row_edits(row, edits)
    column = _column_beyond(
        target, draft, draft_stride, point, running, begin, stop, end, edits, draft_edits,
        RESIDUAL, DRAFTED, TOP, UNIT, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT, TILE,
    )  # fmt: skip
    return tl.where(column < end, first + column, -1)


@triton.jit
def _column_beyond(
    target, draft, draft_stride, point, running, begin, stop, end, edits, draft_edits,
    RESIDUAL: tl.constexpr, DRAFTED: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr,
    DRAFT_TOP: tl.constexpr, DRAFT_UNIT: tl.constexpr, unit_bits, EXACT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The first column from `begin` to `end` at which the running sum exceeds the point, or `end`.

    Block by block, then token by token in the block that holds the point.

    Args:
        target, draft, draft_stride, stop: see `_amounts`.
        running: the sum of all before `begin`.
    """
    block = tl.arange(0, TILE // _BLOCK)
    column = begin + block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    first = end
    before = running
    for step in range(0, stop - begin, TILE):
        amount = _amounts(
            column + step, stop, end, target, draft, draft_stride, edits, draft_edits,
            RESIDUAL, DRAFTED, TOP, UNIT, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
        )  # fmt: skip
        after = running + tl.cumsum(tl.sum(amount, 1), 0)
        left = tl.where(after > point, end - (begin + step + block * _BLOCK), 0)
        left, before, running = tl.reduce(
            (left, tl.where(after > point, before, after), after), 0, _larger_three
        )
        first = tl.minimum(first, end - left)
    columns = first + tl.arange(0, _BLOCK)
    amounts = _amounts(
        columns, stop, end, target, draft, draft_stride, edits, draft_edits,
        RESIDUAL, DRAFTED, TOP, UNIT, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
    )  # fmt: skip
    found = (before + tl.cumsum(amounts, 0) > point) & (columns < end)
    return tl.min(tl.where(found, columns, end), 0)


@triton.jit
def _amounts(
    column, stop, end, target, draft, draft_stride, edits, draft_edits,
    RESIDUAL: tl.constexpr, DRAFTED: tl.constexpr, TOP: tl.constexpr, UNIT: tl.constexpr,
    DRAFT_TOP: tl.constexpr, DRAFT_UNIT: tl.constexpr, unit_bits, EXACT: tl.constexpr,
):  # fmt: skip
    """The int64 weights of columns before `end`, or if RESIDUAL the residuals; 0 from there on.

    Args:
        stop: columns before it may be read.
        target: a pointer to column 0, the stride between columns, peak, limits, scale, and how many
            columns of the row's segments are before this one.
        draft: what `place_of` tells, if RESIDUAL.
        draft_stride: between its columns.
        edits, draft_edits: of `row_edits`.
        DRAFTED: whether any draft has logits.
    """
    x, stride, peak, least, lowest, scale, base = target
    present, wanted = column < stop, column < end
    if RESIDUAL:
        factor, draft_x, left, hot, draft_peak, draft_least, _, draft_scale, draft_factor = draft
        values = fetch(x, column, stride, present, wanted, base, edits, TOP, UNIT)
        amount = residual(
            values, column, peak, least, scale, factor, draft_x, draft_stride, left, hot,
            draft_peak, draft_least, draft_scale, draft_factor, base, draft_edits,
            DRAFTED, DRAFT_TOP, DRAFT_UNIT, unit_bits, EXACT,
        )  # fmt: skip
    else:
        quick = False
        if EXACT and len(edits) == 1:
            quick = is_tame(peak, scale, TOP)
        if quick:
            values = tl.where(wanted, load(x, column, stride, present, UNIT), -_INF)
            units = weight(values, peak, least, lowest, scale, "least")
            amount = integer_sum(unit_sum(column, unit_bits) + units, unit_bits)
        else:
            values = fetch(x, column, stride, present, wanted, base, edits, TOP, UNIT)
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
    index_ptr,  # [G] int64, or unused: G = R
    token_ptr,  # [G] int64
    weight_ptr,  # out: [G] int64
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
    number = tl.program_id(0).to(tl.int64)
    row = number
    if index_ptr is not None:
        row = tl.load(index_ptr + number)
    source = tl.where(row < 0, -1, source_row(rows_ptr, tl.maximum(row, 0), HAS_ROWS))
    row = tl.maximum(row, 0)
    token = tl.load(token_ptr + number)
    segment = tl.arange(0, ALL_SEGMENTS)
    first = tl.load(first_ptr + segment, mask=segment < segments, other=0)
    column = token - first
    known = (token >= 0) & (token < vocab_size) & (source >= 0)
    here = (segment < segments) & (column >= 0) & (column < tl.where(known, width, 0))
    at = tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s + column * stride_v
    x = clean(tl.load(x_ptr + at, mask=here, other=-_INF).to(tl.float32), here, TOP)
    if edits[0] is not None:
        x = edit(x, segment.to(tl.int64) * width + column, here, row_edits(row, edits))
    peak = tl.load(peak_ptr + row)
    scale = tl.load(scale_ptr + row)
    least, _ = row_limits(peak, tl.load(floor_ptr + row), scale)
    weights = integer_weight(x, peak, least, scale, unit_bits, EXACT)
    tl.store(weight_ptr + number, tl.sum(weights, 0))


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
    index_Q: Tensor | None,
    uniform_Q: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.pick`."""
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
    token_Q = uniform_Q.new_empty(uniform_Q.shape)
    _pick(row, (mass_RPC, first_segment, index_Q, uniform_Q), token_Q, vocab_size)
    return token_Q


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
    outcome_R5 = argmax_R.new_empty((argmax_R.shape[0], 5))
    told = (argmax_R, nans_R, greedy_R)
    drawn = (mass_RPC, first_segment, None, uniform_R)
    _pick(row, drawn, outcome_R5, vocab_size, told=told)
    return outcome_R5


def recover(
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
    mass_RPC: Tensor,
    spare_XPC: Tensor,
    of_places: bool,
    place_Q: Tensor,
    end_Q: Tensor,
    first_segment: int,
    uniform_Q: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.recover`."""
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
    places = place_arguments(
        row_G, total_G, ratio_G, draft_MSw, draft_rows_G, draft_edits, draft_peak_G, draft_floor_G,
        draft_scale_G, draft_total_G, one_hot_G, first_id_S, x_NSv.shape[2],
    )  # fmt: skip
    token_Q = uniform_Q.new_empty(uniform_Q.shape)
    drawn = (mass_RPC, first_segment, end_Q, uniform_Q)
    spare = (_by_parts(spare_XPC), of_places, place_Q)
    _pick(row, drawn, token_Q, vocab_size, spare=spare, places=places)
    return token_Q


def _by_parts(sum_RPC: Tensor) -> Tensor:
    """Sums of which the parts of a segment lie side by side."""
    return sum_RPC.contiguous() if sum_RPC.shape[2] > 0 and sum_RPC.stride(2) != 1 else sum_RPC


def _pick(
    row: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor], Tensor, Tensor, Tensor],
    drawn: tuple[Tensor, int, Tensor | None, Tensor],
    found: Tensor,
    vocab_size: int,
    *,
    told: tuple[Tensor, Tensor, Tensor] | None = None,
    spare: tuple[Tensor, bool, Tensor] | None = None,
    places: PlaceArguments = NO_PLACES,
) -> None:
    """Write to `found` tokens, or outcomes.

    Args:
        row: the leading arguments of `ops.pick`.
        drawn: masses of all parts, which segment is the first one here, and for each number which
            row it is for, and the number.
        told: argmax, NaN count and whether it is greedy of each row, if outcomes are wanted.
        spare: residuals of all parts, of all places or of those wanted, and the places wanted.
    """
    x_NSv, first_id_S, rows_R, edits, *of_row = row
    mass_RPC, first_segment, index_Q, uniform_Q = drawn
    sum_RPC, (P, C) = _by_parts(mass_RPC), mass_RPC.shape[1:]
    spare_XPC, of_places, place_Q = (None, False, None) if spare is None else spare
    (_, S, v), bits = x_NSv.shape, weight_bits(vocab_size)
    if spare is None:
        warps, most = 4, 2048 if found.shape[0] >= _MANY else 8192
    else:
        warps, most = 8, 4096
    if found.shape[0] > 0:
        _pick_kernel[(found.shape[0],)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            *(x_R.contiguous() for x_R in of_row),
            sum_RPC,
            *sum_RPC.stride()[:2],
            None if index_Q is None else index_Q.contiguous(),
            uniform_Q.contiguous(),
            *((None, None, None) if told is None else (x_R.contiguous() for x_R in told)),
            found,
            spare_XPC,
            *((0, 0) if spare_XPC is None else spare_XPC.stride()[:2]),
            None if place_Q is None else place_Q.contiguous(),
            *places.values,
            edit_arguments(edits, first_id_S),
            places.edits,
            P * C,
            first_segment * C,
            S,
            v,
            part_width(v),
            vocab_size,
            DRAWN=C > 0,
            RESIDUAL=spare is not None,
            OF_PLACES=of_places,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            HAS_ROWS=rows_R is not None,
            DRAFT_TOP=places.top,
            DRAFT_UNIT=places.unit,
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            ALL_PARTS=triton.next_power_of_2(max(P * C, 1)),
            TILE=min(most, max(128, triton.next_power_of_2(part_width(v)))),
            num_warps=warps,
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
    index_G: Tensor | None,
    token_G: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.lookup`."""
    (_, S, v), G = x_NSv.shape, token_G.shape[0]
    weight_G = first_id_S.new_empty(G)
    bits = weight_bits(vocab_size)
    if G > 0:
        _lookup_kernel[(G,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            None if index_G is None else index_G.contiguous(),
            token_G.contiguous(),
            weight_G,
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
    return weight_G
