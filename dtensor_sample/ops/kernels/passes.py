"""Peaks and masses of rows: two passes over the logits.

The work comes in items: G neighbouring parts of one segment, of which LANES columns each are read
at a time, one item a program. The first pass finds peaks, and the second adds up weights.

Rejected (H200, torch 2.11, 2026-11-29; 256 and 1024 rows of 129280 bf16 logits, both passes): one
launch for both, in which programs of the second pass run beside those of the first and wait for
their rows by a counter, 46 and 145 us instead of 51 and 166; persistent programs that read one item
and weigh another in the same loop, 79 us; a program a row, 42 us, but nothing for few rows. On
2026-11-30: items that stay in registers between both, whose programs publish peaks and wait for
those of their row, 67 and 241 us instead of 54 and 173, since few of them fit a multiprocessor.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit, edit_arguments, fetch, row_edits, value_dtype
from dtensor_sample.ops.kernels.launch import kernel
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
_INF = tl.constexpr(float("inf"))
_NOWHERE = tl.constexpr(0x7FFFFFFF)
_WARPS = 4
CHUNK = 8
"""Neighbouring logits that one thread reads."""
_CHUNK = tl.constexpr(CHUNK)
_TILE = _WARPS * 32 * CHUNK


@kernel
def _peaks_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    peak_ptr,  # out: [R, S, PARTS] float32, the largest value of each part
    nans_ptr,  # out: [R, S, PARTS] int32, its NaN logits
    top_ptr,  # out: [R, S, PARTS, LANES / CHUNK] of `value_dtype`, or unused: see `_peaks`
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    ALIGNED: tl.constexpr,  # edited rows of whole chunks
    HAS_ROWS: tl.constexpr,
    HAS_TOPS: tl.constexpr,
    G: tl.constexpr,  # parts of an item
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The first pass.

    Example: parts [1, nan] and [7, inf] in float16 have peaks [1, 65504] and NaN counts [1, 0].
    """
    if ALIGNED:  # the compiler sees that it divides
        width = width // _CHUNK * _CHUNK
    item = tl.program_id(0)
    row, segment, begin = item_place(item, segments, G)
    source = source_row(rows_ptr, row, HAS_ROWS)
    own = row_edits(row, edits)
    count = segment_count(first_ptr, segment, source, width, vocab_size)
    x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
    if edits[0] is None:
        best, nans = _peaks(x, begin, stride_v, width, part_columns, count, UNIT, G, LANES)
        best = tl.minimum(best, TOP) + 0.0  # -0 is +0
    else:
        best, nans = _edited_peaks(
            x, begin, stride_v, width, part_columns, count, segment * width, own,
            TOP, UNIT, G, LANES,
        )  # fmt: skip
    part = item.to(tl.int64) * G + tl.arange(0, G)
    tl.store(peak_ptr + part, tl.max(best, 1))
    tl.store(nans_ptr + part, tl.sum(nans, 1))
    if HAS_TOPS:
        blocks: tl.constexpr = LANES // CHUNK
        tops = tl.max(tl.reshape(best, [G, blocks, CHUNK]), 2)
        block = part[:, None] * blocks + tl.arange(0, blocks)[None, :]
        tl.store(top_ptr + block, tops.to(top_ptr.dtype.element_ty))


@kernel
def _peak_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    part_peak_ptr,  # [R, S, PARTS] float32
    part_nans_ptr,  # [R, S, PARTS] int32
    packed_ptr,  # out: [R, S, 2] int64
    packed_stride,  # from segment to segment
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    TILE: tl.constexpr,  # columns read at once
):
    """A segment's peak with its lowest id, packed as by `ops.peak`, and its NaNs.

    Example: the peak 0.0 at id 5 is packed as 2**31 << 31 | 2**31 - 1 - 5.
    """
    row = tl.program_id(0) // segments
    segment = tl.program_id(0) % segments
    peak, holder, nans = row_peak(part_peak_ptr, part_nans_ptr, tl.program_id(0), 1, _PARTS)
    first = tl.load(first_ptr + segment)
    column = tl.zeros([], tl.int32)
    if holder >= 0:
        source = source_row(rows_ptr, row, HAS_ROWS)
        own = row_edits(row, edits)
        count = segment_count(first_ptr, segment, source, width, vocab_size)
        x = x_ptr + source * stride_n + segment.to(tl.int64) * stride_s
        column = first_of(
            x, holder, stride_v, width, part_columns, count, peak, segment * width, own,
            TOP, UNIT, TILE,
        )  # fmt: skip
    bits = peak.to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(bits >= 0, bits + (1 << 31), -1 - bits)
    packed = (key << 31) | (_NOWHERE - tl.minimum(first + column, _NOWHERE))
    packed_ptr += tl.program_id(0).to(tl.int64) * packed_stride
    tl.store(packed_ptr, packed)
    tl.store(packed_ptr + 1, nans)


@kernel
def _masses_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    part_peak_ptr,  # [R, S, PARTS] float32, if WHOLE
    part_nans_ptr,  # [R, S, PARTS] int32, if WHOLE
    min_p_ptr,  # [R] float32, if WHOLE
    scale_ptr,  # [R] float32
    peak_ptr,  # [R] float32: out if WHOLE, otherwise in
    floor_ptr,  # [R] float32: out if WHOLE, otherwise in
    mass_ptr,  # out: [R, S, PARTS] int64
    argmax_ptr,  # out, if WHOLE: [R] int64
    nans_ptr,  # out, if WHOLE: [R] int64
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    ALIGNED: tl.constexpr,  # edited rows of whole chunks
    HAS_ROWS: tl.constexpr,
    WHOLE: tl.constexpr,  # all segments are here: find peaks, argmaxes and NaN counts of rows too
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    ALL_PARTS: tl.constexpr,  # S * PARTS, rounded up to a power of two
    G: tl.constexpr,  # parts of an item
    LANES: tl.constexpr,
):
    """The second pass.

    Example: at scale 1, the part [7.5, -inf] of a row whose peak is 7.5 weighs 2**S.
    """
    if ALIGNED:  # the compiler sees that it divides
        width = width // _CHUNK * _CHUNK
    item = tl.program_id(0)
    row, segment, begin = item_place(item, segments, G)
    source = source_row(rows_ptr, row, HAS_ROWS)
    own = row_edits(row, edits)
    count = segment_count(first_ptr, segment, source, width, vocab_size)
    x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
    scale = tl.load(scale_ptr + row)
    if WHOLE:
        peak, holder, nans = row_peak(part_peak_ptr, part_nans_ptr, row, segments, ALL_PARTS)
        floor = peak + tl.load(min_p_ptr + row)
    else:
        peak = tl.load(peak_ptr + row)
        floor = tl.load(floor_ptr + row)
    mass = _masses(
        x, begin, stride_v, width, part_columns, count, peak, floor, scale,
        segment * width, own, TOP, UNIT, unit_bits, EXACT, G, LANES,
    )  # fmt: skip
    tl.store(mass_ptr + item.to(tl.int64) * G + tl.arange(0, G), mass)
    if WHOLE:
        if (segment == 0) & (begin == 0):
            tl.store(peak_ptr + row, peak)
            tl.store(floor_ptr + row, floor)
            tl.store(nans_ptr + row, nans)
            if holder < 0:
                tl.store(argmax_ptr + row, tl.full([], -1, tl.int64))
        place = holder - segment * _PARTS
        if (place >= begin) & (place < begin + G):
            column = first_of(
                x, place, stride_v, width, part_columns, count, peak, segment * width, own,
                TOP, UNIT, G * LANES,
            )  # fmt: skip
            tl.store(argmax_ptr + row, tl.load(first_ptr + segment) + column)


@triton.jit
def item_place(item, segments, G: tl.constexpr):
    """The row, the segment and the first part of an item."""
    begin = item % (_PARTS // G) * G
    item //= _PARTS // G
    return item // segments, item % segments, begin


@triton.jit
def in_chunks(begin, part_columns, count, G: tl.constexpr):
    """Whether the columns of an item that count are whole chunks: all are, or `count` divides."""
    return tl.minimum((begin + G) * part_columns, count) % _CHUNK == 0


@triton.jit
def chunked(part, part_columns, count):
    """How many columns of parts count, less those after the segment's last whole chunk.

    The compiler sees that it divides by CHUNK, and that a mask of columns below it therefore is the
    same for all that a thread reads at once.
    """
    chunks = count // _CHUNK * _CHUNK
    return tl.minimum(part_columns, tl.maximum(chunks - part * part_columns, 0))


@triton.jit
def _peaks(
    x, begin, stride_v, width, part_columns, count,
    UNIT: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[G, LANES] float32 and int32: the largest value of every LANES-th column, and its NaNs.

    CHUNK neighbours of these make a block, whose largest value is its top.
    """
    lane = tl.arange(0, LANES)[None, :]
    column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
    best = tl.full([G, LANES], -_INF, tl.float32)
    if in_chunks(begin, part_columns, count, G):
        # Four loads are under way at once, or two where they need masks.
        left = chunked(begin + tl.arange(0, G)[:, None], part_columns, count)
        fours = chunked(begin + G - 1, part_columns, count) // (4 * LANES) * (4 * LANES)
        for step in range(0, fours, 4 * LANES):
            x0 = load(x, column + step, stride_v, None, UNIT)
            x1 = load(x, column + step + LANES, stride_v, None, UNIT)
            x2 = load(x, column + step + 2 * LANES, stride_v, None, UNIT)
            x3 = load(x, column + step + 3 * LANES, stride_v, None, UNIT)
            best = _max(best, _max(_max(x0, x1), _max(x2, x3)))
        for step in range(fours, chunked(begin, part_columns, count), 2 * LANES):
            x0 = load(x, column + step, stride_v, lane + step < left, UNIT)
            x1 = load(x, column + step + LANES, stride_v, lane + step + LANES < left, UNIT)
            best = _max(best, _max(x0, x1))
    else:
        for step in range(0, tl.where(begin * part_columns < count, part_columns, 0), LANES):
            present = (lane + step < part_columns) & (column + step < width)
            values = load(x, column + step, stride_v, present, UNIT)
            best = _max(best, tl.where(column + step < count, values, -_INF))
    nans = (best != best).to(tl.int32)
    if tl.max(tl.max(nans, 1), 0) > 0:  # rare: once more, counting
        best = tl.full([G, LANES], -_INF, tl.float32)
        nans = tl.zeros([G, LANES], tl.int32)
        for step in range(0, part_columns, LANES):
            present = (lane + step < part_columns) & (column + step < width)
            values = load(x, column + step, stride_v, present, UNIT)
            values = tl.where(column + step < count, values, -_INF)
            nans += (values != values).to(tl.int32)
            best = tl.maximum(best, tl.where(values == values, values, -_INF))
    return best, nans


@triton.jit
def _edited_peaks(
    x, begin, stride_v, width, part_columns, count, base, edits,
    TOP: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What `_peaks` finds, of edited values; NaN are counted before."""
    lane = tl.arange(0, LANES)[None, :]
    column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
    best = tl.full([G, LANES], -_INF, tl.float32)
    nans = tl.zeros([G, LANES], tl.int32)
    for step in range(0, tl.where(begin * part_columns < count, part_columns, 0), LANES):
        present = (lane + step < part_columns) & (column + step < width)
        values = load(x, column + step, stride_v, present, UNIT)
        values = clean(values, column + step < count, TOP)
        nans += (values != values).to(tl.int32)
        best = tl.maximum(best, edit(values, base + column + step, present, edits, True))
    return best, nans


@triton.jit
def _max(a, b):
    """The larger value, or NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _masses(
    x, begin, stride_v, width, part_columns, count, peak, floor, scale, base, edits,
    TOP: tl.constexpr, UNIT: tl.constexpr, unit_bits, EXACT: tl.constexpr,
    G: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """[G] int64: the masses of parts from `begin` on."""
    lane = tl.arange(0, LANES)[None, :]
    column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
    least, lowest = row_limits(peak, floor, scale)
    if EXACT:
        total = unit_sum(column, unit_bits)
        quick = False
        if len(edits) == 1:  # edited values take care
            quick = in_chunks(begin, part_columns, count, G) & is_tame(peak, scale, TOP)
        if quick:
            # Two loads are under way at once; masked ones the compiler would put off.
            left = chunked(begin + tl.arange(0, G)[:, None], part_columns, count)
            twos = chunked(begin + G - 1, part_columns, count) // (2 * LANES) * (2 * LANES)
            if floor <= peak + lowest:
                for step in range(0, twos, 2 * LANES):
                    x0 = load(x, column + step, stride_v, None, UNIT)
                    x1 = load(x, column + step + LANES, stride_v, None, UNIT)
                    total += weight(x0, peak, least, lowest, scale, "any")
                    total += weight(x1, peak, least, lowest, scale, "any")
            else:
                for step in range(0, twos, 2 * LANES):
                    x0 = load(x, column + step, stride_v, None, UNIT)
                    x1 = load(x, column + step + LANES, stride_v, None, UNIT)
                    total += weight(x0, peak, least, lowest, scale, "least")
                    total += weight(x1, peak, least, lowest, scale, "least")
            for step in range(twos, chunked(begin, part_columns, count), LANES):
                values = load(x, column + step, stride_v, lane + step < left, UNIT)
                total += weight(values, peak, least, lowest, scale, "least")
        else:
            for step in range(0, tl.where(begin * part_columns < count, part_columns, 0), LANES):
                present = (lane + step < part_columns) & (column + step < width)
                values = fetch(
                    x, column + step, stride_v, present, column + step < count, base, edits,
                    TOP, UNIT, True,
                )  # fmt: skip
                total += weight(values, peak, least, lowest, scale, "exact")
        sums = integer_sum(total, unit_bits)
    else:
        sums = tl.zeros([G, LANES], tl.int64)
        for step in range(0, part_columns, LANES):
            present = (lane + step < part_columns) & (column + step < width)
            values = fetch(
                x, column + step, stride_v, present, column + step < count, base, edits,
                TOP, UNIT, True,
            )  # fmt: skip
            sums += integer_weight(values, peak, least, scale, unit_bits, EXACT)
    return tl.sum(sums, 1)


@triton.jit
def row_peak(part_peak_ptr, part_nans_ptr, row, segments, ALL_PARTS: tl.constexpr):
    """A row's largest value, the first part that has it (-1 without a token), and its NaNs."""
    part = tl.arange(0, ALL_PARTS)
    at = row.to(tl.int64) * segments * _PARTS + part
    exists = part < segments * _PARTS
    peaks = tl.load(part_peak_ptr + at, mask=exists, other=-_INF)
    nans = tl.load(part_nans_ptr + at, mask=exists, other=0)
    peak = tl.max(peaks, 0)
    holder = tl.min(tl.where(peaks == peak, part, ALL_PARTS), 0)
    return peak, tl.where(peak > -_INF, holder, -1), tl.sum(nans, 0).to(tl.int64)


@triton.jit
def first_of(
    x, part, stride_v, width, part_columns, count, value, base, edits,
    TOP: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The first column of a part that holds a value."""
    found = tl.full([TILE], _NOWHERE, tl.int32)
    quick = False
    if len(edits) == 1:  # +inf counts as TOP
        quick = value < TOP
    for step in range(0, part_columns, TILE):
        column = part * part_columns + step + tl.arange(0, TILE)
        if quick:
            values = load(x, column, stride_v, column < count, UNIT)
        else:
            values = fetch(
                x, column, stride_v, column < width, column < count, base, edits, TOP, UNIT
            )
        found = tl.minimum(found, tl.where(values == value, column, _NOWHERE))
    return tl.min(found, 0)


def first_pass(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    *,
    tops: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Peaks of parts.

    Returns:
        [R, S, PARTS] float32 and int32, the largest value and the number of NaNs of each part; and
        with `tops` [R, S, PARTS, blocks], the largest value of each block of a part.
    """
    (_, S, v), R = x_NSv.shape, count_rows(x_NSv, rows_R)
    peak_RSC = first_id_S.new_empty((R, S, PARTS), dtype=torch.float32)
    nans_RSC = first_id_S.new_empty((R, S, PARTS), dtype=torch.int32)
    G = wide_items(v) if tops else item_parts(R, S, v)
    step, top_RSCb = _TILE // G, None
    if tops:
        dtype = value_dtype(edits, x_NSv.dtype)
        top_RSCb = x_NSv.new_empty((R, S, PARTS, step // CHUNK), dtype=dtype)
    if R > 0:
        _peaks_kernel[(R * S * (PARTS // G),)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            peak_RSC,
            nans_RSC,
            top_RSCb,
            edit_arguments(edits, first_id_S),
            S,
            v,
            part_width(v),
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            ALIGNED=bool(edits) and v % CHUNK == 0,
            HAS_ROWS=rows_R is not None,
            HAS_TOPS=tops,
            G=G,
            LANES=step,
            CHUNK=CHUNK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return peak_RSC, nans_RSC, top_RSCb


def peak(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
) -> Tensor:
    """The kernels of `ops.peak`."""
    logits = (x_NSv, first_id_S, rows_R, edits, vocab_size)
    peak_RSC, nans_RSC, _ = first_pass(*logits)
    packed_RS2 = first_id_S.new_empty((*peak_RSC.shape[:2], 2))
    pack_peaks(logits, peak_RSC, nans_RSC, packed_RS2)
    return packed_RS2


def pack_peaks(
    logits: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor], int],
    peak_RSC: Tensor,
    nans_RSC: Tensor,
    packed_RS2: Tensor,
) -> None:
    """What `ops.peak` returns, from peaks and NaN counts of parts.

    Args:
        logits: x_NSv, first_id_S, rows_R, edits, vocab_size.
        peak_RSC, nans_RSC: of `first_pass`.
        packed_RS2: out, [R, S, 2] int64, the first two of as many integers as lie in a segment.
    """
    x_NSv, first_id_S, rows_R, edits, vocab_size = logits
    (R, S, _), v = peak_RSC.shape, x_NSv.shape[2]
    if R > 0:
        _peak_kernel[(R * S,)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            peak_RSC,
            nans_RSC,
            packed_RS2,
            packed_RS2.stride(1),
            edit_arguments(edits, first_id_S),
            S,
            v,
            part_width(v),
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            HAS_ROWS=rows_R is not None,
            TILE=_TILE,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def mass(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.mass`."""
    mass_RSC = first_id_S.new_empty((peak_R.shape[0], x_NSv.shape[1], PARTS))
    second_pass(
        (x_NSv, first_id_S, rows_R, edits, vocab_size),
        (None, None, None, scale_R.contiguous()),
        (peak_R.contiguous(), floor_R.contiguous(), mass_RSC, None, None),
    )
    return mass_RSC


def second_pass(
    logits: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor], int],
    given: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor],
    found: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
) -> None:
    """Masses of parts, and if parts' peaks and NaN counts are given, what those are of rows.

    Args:
        logits: x_NSv, first_id_S, rows_R, edits, vocab_size.
        given: peaks and NaN counts of all parts, min_p_R, scale_R.
        found: peak_R, floor_R, mass_RSC, argmax_R, nans_R.
    """
    x_NSv, first_id_S, rows_R, edits, vocab_size = logits
    (_, S, v), R = x_NSv.shape, found[0].shape[0]
    bits, G = weight_bits(vocab_size), item_parts(R, S, v)
    if R > 0:
        _masses_kernel[(R * S * (PARTS // G),)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            *given,
            *found,
            edit_arguments(edits, first_id_S),
            S,
            v,
            part_width(v),
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            ALIGNED=bool(edits) and v % CHUNK == 0,
            HAS_ROWS=rows_R is not None,
            WHOLE=given[0] is not None,
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            ALL_PARTS=triton.next_power_of_2(S * PARTS),
            G=G,
            LANES=_TILE // G,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def wide_items(v: int) -> int:
    """G: so many parts that an item has about 16 K columns."""
    wanted = max(1, 16384 // max(part_width(v), 1))
    return min(1 << (wanted - 1).bit_length(), PARTS)


def item_parts(R: int, S: int, v: int) -> int:
    """G, smaller if there would be few items."""
    G = wide_items(v)
    while G > 1 and R * S * (PARTS // G) < _ENOUGH_ITEMS:
        G //= 2
    return G


_ENOUGH_ITEMS = 1024
