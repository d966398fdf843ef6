"""One round of a radix selection, by atomic additions."""

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

_BINS = tl.constexpr(256)
_INF = tl.constexpr(float("inf"))
_TILE = 2048
_COLUMNS = 16384
"""Columns of a program."""


@kernel
def _histogram_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    prefix_ptr,  # [R] int64
    bins_ptr,  # zeros, out: [R, 256] int64
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    vocab_size,
    level,  # which digit of 8 bits, the highest first
    WEIGHTED: tl.constexpr,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    unit_bits,  # S of `weight_bits`
    EXACT: tl.constexpr,  # whether that allows exact float64 sums
    COLUMNS: tl.constexpr,  # of a program
    TILE: tl.constexpr,  # columns read at once
):
    """Count or weigh the tokens of some columns whose key begins with the prefix, by their digit.

    Example: keys 0x80.. and 0x81.. at level 0 count 1 each in bins 128 and 129.
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
    prefix = tl.load(prefix_ptr + row)
    if WEIGHTED:
        peak = tl.load(peak_ptr + row)
        scale = tl.load(scale_ptr + row)
        least, _ = row_limits(peak, floor, scale)
    for start in range(piece * COLUMNS, tl.minimum(piece * COLUMNS + COLUMNS, count), TILE):
        column = start + tl.arange(0, TILE)
        values = 0.0 + fetch(
            x, column, stride_v, column < width, column < count, segment * width, own,
            TOP, UNIT,
        )  # fmt: skip
        bits = values.to(tl.int32, bitcast=True).to(tl.int64)
        key = tl.where(bits >= 0, bits + (1 << 31), -1 - bits) >> (24 - 8 * level)
        if WEIGHTED:
            amount = integer_weight(values, peak, least, scale, unit_bits, EXACT)
        else:
            amount = ((values >= floor) & (values > -_INF)).to(tl.int64)
        inside = (key >> 8 == prefix) & (amount > 0)
        bin_ptr = bins_ptr + row.to(tl.int64) * _BINS + (key & (_BINS - 1))
        tl.atomic_add(bin_ptr, amount, mask=inside, sem="relaxed")


def histogram(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    prefix_R: Tensor,
    vocab_size: int,
    level: int,
    weighted: bool,
) -> Tensor:
    """The kernel of `ops.histogram`."""
    (_, S, v), R = x_NSv.shape, count_rows(x_NSv, rows_R)
    bins_RB = first_id_S.new_zeros((R, 256))
    bits = weight_bits(vocab_size)
    if R > 0:
        _histogram_kernel[(R * S * triton.cdiv(v, _COLUMNS),)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            prefix_R.contiguous(),
            bins_RB,
            edit_arguments(edits, first_id_S),
            S,
            v,
            vocab_size,
            level,
            WEIGHTED=weighted,
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
    return bins_RB
