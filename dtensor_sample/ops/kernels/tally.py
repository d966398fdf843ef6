"""Counts and sums of rows in one pass over the logits, by atomic additions."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.edits import edit_arguments, fetch, row_edits
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.values import (
    EXACT_BITS,
    integer_weight,
    row_limits,
    segment_count,
    source_row,
)
from dtensor_sample.ops.values import count_rows, weight_bits

_INF = tl.constexpr(float("inf"))
_LARGEST_FLOAT32 = tl.constexpr(3.4028234663852886e38)
_TILE = 2048
_COLUMNS = 16384
"""Columns of a program."""


@kernel
def _tally_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    value_ptr,  # [R] float32
    tally_ptr,  # zeros, out: [R, 3] int64
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    vocab_size,
    SPREAD: tl.constexpr,  # whether that is asked for
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    COLUMNS: tl.constexpr,  # of a program
    TILE: tl.constexpr,  # columns read at once
):
    """Tally some columns of a row.

    Example: the columns [1, nan, 7] add 1 token larger than 2 and, with floor 0, 2 that are kept.
    """
    pieces = tl.cdiv(width, COLUMNS)
    piece = tl.program_id(0) % pieces
    segment = tl.program_id(0) // pieces % segments
    row = tl.program_id(0) // pieces // segments
    source = source_row(rows_ptr, row, HAS_ROWS)
    own = row_edits(row, edits)
    count = segment_count(first_ptr, segment, source, width, vocab_size)
    x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
    floor = tl.load(floor_ptr + row)
    value = tl.load(value_ptr + row)
    peak = tl.load(peak_ptr + row)
    scale = tl.load(scale_ptr + row)
    least, _ = row_limits(peak, floor, scale)
    larger = tl.zeros([TILE], tl.int32)
    kept = tl.zeros([TILE], tl.int32)
    spread = tl.zeros([TILE], tl.int64)
    for start in range(piece * COLUMNS, tl.minimum(piece * COLUMNS + COLUMNS, count), TILE):
        column = start + tl.arange(0, TILE)
        values = fetch(
            x, column, stride_v, column < width, column < count, segment * width, own,
            TOP, UNIT,
        )  # fmt: skip
        larger += (values > value).to(tl.int32)
        kept += ((values >= floor) & (values > -_INF)).to(tl.int32)
        if SPREAD:
            amount = integer_weight(values, peak, least, scale, unit_bits, EXACT)
            below = tl.maximum(values - peak, -_LARGEST_FLOAT32)
            exponent = below.to(tl.float64) * scale.to(tl.float64)
            product = -exponent * amount.to(tl.float64)
            spread += tl.where(amount > 0, product, 0.0).to(tl.int64)
    out = tally_ptr + row.to(tl.int64) * 3
    tl.atomic_add(out, tl.sum(larger, 0).to(tl.int64), sem="relaxed")
    tl.atomic_add(out + 1, tl.sum(kept, 0).to(tl.int64), sem="relaxed")
    if SPREAD:
        tl.atomic_add(out + 2, tl.sum(spread, 0), sem="relaxed")


def tally(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    value_R: Tensor,
    vocab_size: int,
    spread: bool,
) -> Tensor:
    """The kernel of `ops.tally`."""
    (_, S, v), R = x_NSv.shape, count_rows(x_NSv, rows_R)
    tally_R3 = first_id_S.new_zeros((R, 3))
    bits = weight_bits(vocab_size)
    if R > 0:
        _tally_kernel[(R * S * triton.cdiv(v, _COLUMNS),)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            value_R.contiguous(),
            tally_R3,
            edit_arguments(edits, first_id_S),
            S,
            v,
            vocab_size,
            SPREAD=spread,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            HAS_ROWS=rows_R is not None,
            unit_bits=bits,
            EXACT=bits <= EXACT_BITS,
            COLUMNS=_COLUMNS,
            TILE=_TILE,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return tally_R3
