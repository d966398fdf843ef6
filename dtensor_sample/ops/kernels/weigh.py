"""Peaks and masses of rows: two passes over the logits, apart or interleaved.

The work comes in items: G neighbouring parts of one segment, of which LANES columns each are read
at a time. With few rows, one program an item finds peaks, then one program an item adds up weights.
With many rows, one launch does both. The first pass waits for memory and the second for arithmetic,
so its programs read a new item and, in the same loop, add up the weights of an item that they read
a step before: by then the row's other programs have done their share of the first pass, of which a
counter a row makes sure, and the logits are still in the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.values import (
    EXACT_BITS,
    clean,
    integer_sum,
    integer_weight,
    is_tame,
    least_kept,
    lightest,
    load,
    segment_count,
    source_row,
    unit_sum,
    weight,
)
from dtensor_sample.ops.parts import PARTS, lanes, part_width
from dtensor_sample.ops.values import count_rows, weight_bits

_PARTS = tl.constexpr(PARTS)
_INF = tl.constexpr(float("inf"))
_NOWHERE = tl.constexpr(0x7FFFFFFF)
WARPS = 8
INTERLEAVED_WARPS = 16
"""Warps of a program that does one pass, and of one that does both."""
RESIDENT = 2
"""Interleaving programs on one multiprocessor."""
INTERLEAVE_FROM = 24 << 20
"""Logits from which on the passes are interleaved."""


@triton.jit
def _weigh_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    part_peak_ptr,  # [R, S, PARTS] float32, the largest value of each part: out if PEAKS
    part_nans_ptr,  # [R, S, PARTS] int32, its NaN logits: out if PEAKS
    arrived_ptr,  # [R] int32, zeros: items whose peaks are known, if both passes
    min_p_ptr,  # [R] float32, unless HAS_FLOOR
    scale_ptr,  # [R] float32
    peak_ptr,  # [R] float32: out if WHOLE, otherwise in
    floor_ptr,  # [R] float32: in if HAS_FLOOR, otherwise out
    mass_ptr,  # out: [R, S, PARTS] int64
    argmax_ptr,  # out, if WHOLE: [R] int64
    nans_ptr,  # out, if WHOLE: [R] int64
    items,  # R * S * PARTS / G
    steps,  # items of each program
    lag,  # steps from an item's first pass to its second
    segments,  # S
    width,  # v
    part_columns,  # columns of a part
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    PEAKS: tl.constexpr,  # do the first pass
    MASSES: tl.constexpr,  # do the second pass
    WHOLE: tl.constexpr,  # all segments are here: find peaks, argmaxes and NaN counts of rows
    BITS: tl.constexpr,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether BITS allows exact float64 sums
    ALL_PARTS: tl.constexpr,  # S * PARTS, rounded up to a power of two
    G: tl.constexpr,  # parts of an item
    LANES: tl.constexpr,
):
    """First pass: peaks and NaN counts of parts. Second pass: their masses.

    Example: parts [1, nan] and [7, inf] in float16 have peaks [1, 65504] and NaN counts [1, 0];
    at scale 1 they weigh [0, 2**S].
    """
    for turn in range(steps + lag):
        item = turn * tl.num_programs(0) + tl.program_id(0)
        old = item - lag * tl.num_programs(0)
        if PEAKS:
            row, segment, begin = _place(item, items, segments, G)
            source = source_row(rows_ptr, row, HAS_ROWS)
            count = segment_count(first_ptr, segment, source, width, vocab_size)
            count = tl.where(item < items, count, 0)
            x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
        if MASSES:
            has_old = (old >= 0) & (old < items)
            old_row, old_segment, old_begin = _place(old, items, segments, G)
            old_source = source_row(rows_ptr, old_row, HAS_ROWS)
            old_count = segment_count(first_ptr, old_segment, old_source, width, vocab_size)
            old_count = tl.where(has_old, old_count, 0)
            old_x = x_ptr + tl.maximum(old_source, 0) * stride_n
            old_x += old_segment.to(tl.int64) * stride_s
            if PEAKS:
                if has_old:
                    _wait(arrived_ptr + old_row, segments * (_PARTS // G))
            if WHOLE:
                peak, holder = _row_peak(part_peak_ptr, old_row, segments, ALL_PARTS)
            else:
                peak = tl.load(peak_ptr + old_row)
            scale = tl.load(scale_ptr + old_row)
            if HAS_FLOOR:
                floor = tl.load(floor_ptr + old_row)
            else:
                floor = peak + tl.load(min_p_ptr + old_row)

        if PEAKS and MASSES:
            inner = (begin + G) * part_columns <= count
            old_inner = (old_begin + G) * part_columns <= old_count
            if inner & old_inner & is_tame(peak, scale, TOP):
                lane = tl.arange(0, LANES)[None, :]
                column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
                old_column = (old_begin + tl.arange(0, G))[:, None] * part_columns + lane
                least = least_kept(peak, floor, scale)
                if floor <= lightest(peak, scale):
                    best, total = _both(
                        x,
                        column,
                        old_x,
                        old_column,
                        lane,
                        stride_v,
                        part_columns,
                        peak,
                        least,
                        scale,
                        "any",
                        UNIT,
                        BITS,
                        LANES,
                    )
                else:
                    best, total = _both(
                        x,
                        column,
                        old_x,
                        old_column,
                        lane,
                        stride_v,
                        part_columns,
                        peak,
                        least,
                        scale,
                        "least",
                        UNIT,
                        BITS,
                        LANES,
                    )
                part_peak = tl.minimum(tl.max(best, 1), TOP) + 0.0  # -0 is +0
                part_nans = tl.max((best != best).to(tl.int32), 1)
                if tl.max(part_nans, 0) > 0:
                    part_peak, part_nans = _peaks(
                        x, begin, stride_v, width, part_columns, count, TOP, UNIT, G, LANES
                    )
                mass = tl.sum(integer_sum(total, BITS), 1)
            else:
                part_peak, part_nans = _peaks(
                    x, begin, stride_v, width, part_columns, count, TOP, UNIT, G, LANES
                )
                mass = _masses(
                    old_x,
                    old_begin,
                    stride_v,
                    width,
                    part_columns,
                    old_count,
                    peak,
                    floor,
                    scale,
                    TOP,
                    UNIT,
                    BITS,
                    EXACT,
                    G,
                    LANES,
                )
        elif PEAKS:
            part_peak, part_nans = _peaks(
                x, begin, stride_v, width, part_columns, count, TOP, UNIT, G, LANES
            )
        else:
            mass = _masses(
                old_x,
                old_begin,
                stride_v,
                width,
                part_columns,
                old_count,
                peak,
                floor,
                scale,
                TOP,
                UNIT,
                BITS,
                EXACT,
                G,
                LANES,
            )

        of_item = tl.arange(0, G)
        if PEAKS:
            at = item.to(tl.int64) * G + of_item
            tl.store(part_peak_ptr + at, part_peak, mask=of_item < (items - item) * G)
            tl.store(part_nans_ptr + at, part_nans, mask=of_item < (items - item) * G)
            if MASSES:
                if item < items:
                    _arrive(arrived_ptr + row)
        if MASSES:
            if has_old:
                tl.store(mass_ptr + old.to(tl.int64) * G + of_item, mass)
                if WHOLE:
                    if (old_segment == 0) & (old_begin == 0):
                        nans = _row_nans(part_nans_ptr, old_row, segments, ALL_PARTS)
                        tl.store(nans_ptr + old_row, nans)
                        tl.store(peak_ptr + old_row, peak)
                        if not HAS_FLOOR:
                            tl.store(floor_ptr + old_row, floor)
                        if holder < 0:
                            tl.store(argmax_ptr + old_row, tl.full([], -1, tl.int64))
                    place = holder - old_segment * _PARTS - old_begin
                    if (place >= 0) & (place < G):
                        found = _lowest(
                            old_x,
                            old_begin + place,
                            stride_v,
                            width,
                            part_columns,
                            old_count,
                            peak,
                            TOP,
                            UNIT,
                            G * LANES,
                        )
                        first = tl.load(first_ptr + old_segment)
                        tl.store(argmax_ptr + old_row, first + found)


@triton.jit
def _place(item, items, segments, G: tl.constexpr):
    """The row, segment and first part of an item; a valid one of no item."""
    item = tl.minimum(tl.maximum(item, 0), items - 1)
    begin = item % (_PARTS // G) * G
    item //= _PARTS // G
    return item // segments, item % segments, begin


@triton.jit
def _peaks(
    x,
    begin,
    stride_v,
    width,
    part_columns,
    count,
    TOP: tl.constexpr,
    UNIT: tl.constexpr,
    G: tl.constexpr,
    LANES: tl.constexpr,
):
    """[G] float32 and int32: the largest value and the NaNs of parts from `begin` on."""
    lane = tl.arange(0, LANES)[None, :]
    column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
    best = tl.full([G, LANES], -_INF, tl.float32)
    nans = tl.zeros([G, LANES], tl.int32)
    done = 0
    if (begin + G) * part_columns <= count:
        for step in range(0, part_columns // LANES * LANES, LANES):
            values = load(x, column + step, stride_v, None, UNIT)
            nans += (values != values).to(tl.int32)
            best = tl.maximum(best, values)
        done = part_columns // LANES * LANES
    for step in range(done, part_columns, LANES):
        present = (lane + step < part_columns) & (column + step < width)
        values = load(x, column + step, stride_v, present, UNIT)
        values = tl.where(column + step < count, values, -_INF)
        nans += (values != values).to(tl.int32)
        best = tl.maximum(best, values)
    peak = tl.minimum(tl.max(best, 1), TOP) + 0.0  # -0 is +0
    return peak, tl.sum(nans, 1)


@triton.jit
def _masses(
    x,
    begin,
    stride_v,
    width,
    part_columns,
    count,
    peak,
    floor,
    scale,
    TOP: tl.constexpr,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    EXACT: tl.constexpr,
    G: tl.constexpr,
    LANES: tl.constexpr,
):
    """[G] int64: the masses of parts from `begin` on."""
    lane = tl.arange(0, LANES)[None, :]
    column = (begin + tl.arange(0, G))[:, None] * part_columns + lane
    least = least_kept(peak, floor, scale)
    if EXACT:
        total = unit_sum(column, BITS)
        if ((begin + G) * part_columns <= count) & is_tame(peak, scale, TOP):
            if floor <= lightest(peak, scale):
                total = _sum(
                    total,
                    x,
                    column,
                    lane,
                    stride_v,
                    part_columns,
                    peak,
                    least,
                    scale,
                    "any",
                    UNIT,
                    LANES,
                )
            else:
                total = _sum(
                    total,
                    x,
                    column,
                    lane,
                    stride_v,
                    part_columns,
                    peak,
                    least,
                    scale,
                    "least",
                    UNIT,
                    LANES,
                )
        else:
            for step in range(0, part_columns, LANES):
                present = (lane + step < part_columns) & (column + step < width)
                values = load(x, column + step, stride_v, present, UNIT)
                values = clean(values, column + step < count, TOP)
                total += weight(values, peak, least, scale, "exact")
        sums = integer_sum(total, BITS)
    else:
        sums = tl.zeros([G, LANES], tl.int64)
        for step in range(0, part_columns, LANES):
            present = (lane + step < part_columns) & (column + step < width)
            values = load(x, column + step, stride_v, present, UNIT)
            values = clean(values, column + step < count, TOP)
            sums += integer_weight(values, peak, least, scale, BITS, EXACT)
    return tl.sum(sums, 1)


@triton.jit
def _sum(
    total,
    x,
    column,
    lane,
    stride_v,
    part_columns,
    peak,
    least,
    scale,
    KEEP: tl.constexpr,
    UNIT: tl.constexpr,
    LANES: tl.constexpr,
):
    """`total` and the weights of whole parts of a tame row."""
    full = part_columns // LANES * LANES
    for step in range(0, full, LANES):
        values = load(x, column + step, stride_v, None, UNIT)
        total += weight(values, peak, least, scale, KEEP)
    if full < part_columns:
        values = load(x, column + full, stride_v, lane + full < part_columns, UNIT)
        total += weight(values, peak, least, scale, KEEP)
    return total


@triton.jit
def _both(
    x,
    column,
    old_x,
    old_column,
    lane,
    stride_v,
    part_columns,
    peak,
    least,
    scale,
    KEEP: tl.constexpr,
    UNIT: tl.constexpr,
    BITS: tl.constexpr,
    LANES: tl.constexpr,
):
    """[G, LANES]: largest values of some whole parts, or NaN, and weights of others, tame ones."""
    best = tl.full(column.shape, -_INF, tl.float32)
    total = unit_sum(column, BITS)
    full = part_columns // LANES * LANES
    for step in range(0, full, LANES):
        values = load(x, column + step, stride_v, None, UNIT)
        old_values = load(old_x, old_column + step, stride_v, None, UNIT)
        best = tl.maximum(best, values, propagate_nan=tl.PropagateNan.ALL)
        total += weight(old_values, peak, least, scale, KEEP)
    if full < part_columns:
        present = lane + full < part_columns
        values = load(x, column + full, stride_v, present, UNIT)
        old_values = load(old_x, old_column + full, stride_v, present, UNIT)
        best = tl.maximum(best, values, propagate_nan=tl.PropagateNan.ALL)
        total += weight(old_values, peak, least, scale, KEEP)
    return best, total


@triton.jit
def _row_peak(part_peak_ptr, row, segments, ALL_PARTS: tl.constexpr):
    """A row's largest value, and the first part that has it; -1 if there is no token."""
    part = tl.arange(0, ALL_PARTS)
    at = row.to(tl.int64) * segments * _PARTS + part
    exists = part < segments * _PARTS
    # Past the L1 cache, which does not see what other programs write.
    peaks = tl.load(part_peak_ptr + at, mask=exists, other=-_INF, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    holder = tl.min(tl.where(peaks == peak, part, ALL_PARTS), 0)
    return peak, tl.where(peak > -_INF, holder, -1)


@triton.jit
def _row_nans(part_nans_ptr, row, segments, ALL_PARTS: tl.constexpr):
    """A row's NaN logits."""
    part = tl.arange(0, ALL_PARTS)
    at = row.to(tl.int64) * segments * _PARTS + part
    exists = part < segments * _PARTS
    nans = tl.load(part_nans_ptr + at, mask=exists, other=0, cache_modifier=".cg")
    return tl.sum(nans, 0).to(tl.int64)


@triton.jit
def _lowest(
    x,
    part,
    stride_v,
    width,
    part_columns,
    count,
    peak,
    TOP: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first column of a part that holds the row's largest value."""
    lowest = tl.full([TILE], _NOWHERE, tl.int32)
    for step in range(0, part_columns, TILE):
        column = part * part_columns + step + tl.arange(0, TILE)
        values = load(x, column, stride_v, column < width, UNIT)
        values = clean(values, column < count, TOP)
        lowest = tl.minimum(lowest, tl.where(values == peak, column, _NOWHERE))
    return tl.min(lowest, 0)


@triton.jit
def _arrive(arrived_ptr):
    """Count one item, whose results were stored, as known."""
    tl.debug_barrier()  # of all threads of this program
    tl.atomic_add(arrived_ptr, 1, sem="release")


@triton.jit
def _wait(arrived_ptr, wanted):
    """Wait for other programs' results: items of lower number, so that there is no circle."""
    while tl.atomic_add(arrived_ptr, 0, sem="acquire") < wanted:
        pass


def part_peaks(
    x_NSv: Tensor, first_id_S: Tensor, rows_R: Tensor | None, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """[R, S, PARTS] float32 and int32: the largest value and the number of NaNs of each part."""
    S, R = x_NSv.shape[1], count_rows(x_NSv, rows_R)
    part_peak_RSC = first_id_S.new_empty((R, S, PARTS), dtype=torch.float32)
    part_nans_RSC = first_id_S.new_empty((R, S, PARTS), dtype=torch.int32)
    _launch(
        (x_NSv, first_id_S, rows_R, vocab_size),
        R,
        peaks=True,
        part_peak_ptr=part_peak_RSC,
        part_nans_ptr=part_nans_RSC,
    )
    return part_peak_RSC, part_nans_RSC


def mass(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The kernel of `ops.mass`."""
    R = peak_R.shape[0]
    mass_RSC = first_id_S.new_empty((R, x_NSv.shape[1], PARTS))
    _launch(
        (x_NSv, first_id_S, rows_R, vocab_size),
        R,
        masses=True,
        peak_ptr=peak_R,
        floor_ptr=floor_R,
        scale_ptr=scale_R,
        mass_ptr=mass_RSC,
    )
    return mass_RSC


def weigh(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
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
    logits = (x_NSv, first_id_S, rows_R, vocab_size)
    peak_R, floor_R = torch.empty_like(scale_R), torch.empty_like(scale_R)
    argmax_R, nans_R = first_id_S.new_empty(R), first_id_S.new_empty(R)
    part_peak_RSC = first_id_S.new_empty((R, S, PARTS), dtype=torch.float32)
    part_nans_RSC = first_id_S.new_empty((R, S, PARTS), dtype=torch.int32)
    mass_RSC = first_id_S.new_empty((R, S, PARTS))
    parts = {"part_peak_ptr": part_peak_RSC, "part_nans_ptr": part_nans_RSC}
    found = {
        "scale_ptr": scale_R,
        "peak_ptr": peak_R,
        "floor_ptr": floor_R,
        "mass_ptr": mass_RSC,
        "argmax_ptr": argmax_R,
        "nans_ptr": nans_R,
    }
    if R * S * v >= INTERLEAVE_FROM and weight_bits(vocab_size) <= EXACT_BITS:
        arrived_R = first_id_S.new_zeros(R, dtype=torch.int32)
        _launch(
            logits,
            R,
            peaks=True,
            masses=True,
            arrived_ptr=arrived_R,
            min_p_ptr=min_p_R,
            **parts,
            **found,
        )
    else:
        _launch(logits, R, peaks=True, **parts)
        _launch(logits, R, masses=True, min_p_ptr=min_p_R, **parts, **found)
    return peak_R, floor_R, mass_RSC, argmax_R, nans_R


def _launch(
    logits: tuple[Tensor, Tensor, Tensor | None, int],
    R: int,
    *,
    peaks: bool = False,
    masses: bool = False,
    part_peak_ptr: Tensor | None = None,
    part_nans_ptr: Tensor | None = None,
    arrived_ptr: Tensor | None = None,
    min_p_ptr: Tensor | None = None,
    scale_ptr: Tensor | None = None,
    peak_ptr: Tensor | None = None,
    floor_ptr: Tensor | None = None,
    mass_ptr: Tensor | None = None,
    argmax_ptr: Tensor | None = None,
    nans_ptr: Tensor | None = None,
) -> None:
    x_NSv, first_id_S, rows_R, vocab_size = logits
    S, v = x_NSv.shape[1:]
    step, bits = lanes(v), weight_bits(vocab_size)
    warps = INTERLEAVED_WARPS if peaks and masses else WARPS
    G = min(warps * 256 // step, PARTS)
    items = R * S * (PARTS // G)
    if items == 0:
        return
    programs, row_items = items, S * (PARTS // G)
    if peaks and masses:
        programs = min(_resident_programs(x_NSv.device), items)
        programs -= programs % row_items if programs > row_items else 0
    _weigh_kernel[(programs,)](
        x_NSv,
        *x_NSv.stride(),
        first_id_S,
        rows_R,
        part_peak_ptr,
        part_nans_ptr,
        arrived_ptr,
        min_p_ptr,
        scale_ptr,
        peak_ptr,
        floor_ptr,
        mass_ptr,
        argmax_ptr,
        nans_ptr,
        items,
        triton.cdiv(items, programs),
        triton.cdiv(row_items, programs) if peaks and masses else 0,
        S,
        v,
        part_width(v),
        vocab_size,
        TOP=torch.finfo(x_NSv.dtype).max,
        UNIT=x_NSv.stride(2) == 1,
        HAS_ROWS=rows_R is not None,
        HAS_FLOOR=min_p_ptr is None,
        PEAKS=peaks,
        MASSES=masses,
        WHOLE=argmax_ptr is not None,
        BITS=bits,
        EXACT=bits <= EXACT_BITS,
        ALL_PARTS=triton.next_power_of_2(S * PARTS),
        G=G,
        LANES=step,
        num_warps=warps,
        maxnreg=64,
        enable_fp_fusion=False,
    )


def _resident_programs(device: torch.device) -> int:
    """How many interleaving programs run at once."""
    if device.type != "cuda":
        return 1
    return RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count
