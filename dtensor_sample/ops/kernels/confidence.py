"""Confidences of draft positions: one program a row."""

import torch
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.confidence import FARTHEST, LOG2_E, MOST, POWER, UNIT_BITS
from dtensor_sample.ops.kernels.launch import kernel

_UNIT = tl.constexpr(float(1 << UNIT_BITS))
_SHARE = tl.constexpr(2.0**-UNIT_BITS)
_MOST = tl.constexpr(float(MOST))
_FARTHEST = tl.constexpr(FARTHEST)
_MINUS_LOG2_E = tl.constexpr(-LOG2_E)
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in POWER)
_NEAREST = tl.constexpr(1.5 * 2**52)
"""A float64 sum with it is rounded to the nearest integer, half to even."""
_COLUMNS = 1024


@kernel
def _confidence_kernel(
    hidden_ptr,  # [R, H]
    row_stride,
    stride_h,
    weight_ptr,  # [H] float32
    offset_ptr,  # [R] int64
    confidence_ptr,  # out: [R] float32
    width,  # H
    COLUMNS: tl.constexpr,
):
    """The logistic function of a row's sum.

    Example: hidden [1, 2], weights [0.5, -0.25] and an offset of 0 give 0.5.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([COLUMNS], tl.int64)
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        here = column < width
        at = hidden_ptr + row * row_stride + column.to(tl.int64) * stride_h
        hidden = tl.load(at, mask=here, other=0.0).to(tl.float64)
        weight = tl.load(weight_ptr + column, mask=here, other=0.0).to(tl.float64)
        product = hidden * weight
        product = tl.where(product == product, product, 0.0) * _UNIT
        product = tl.minimum(tl.maximum(product, -_MOST), _MOST)
        total += ((product + _NEAREST) - _NEAREST).to(tl.int64)
    sums = tl.sum(total, 0) + tl.load(offset_ptr + row)
    exponent = sums.to(tl.float64) * _SHARE * _MINUS_LOG2_E
    exponent = tl.minimum(tl.maximum(exponent, -_FARTHEST), _FARTHEST)
    whole = (exponent + _NEAREST) - _NEAREST
    fraction = exponent - whole
    power = fraction * _C5 + _C4
    power = power * fraction + _C3
    power = power * fraction + _C2
    power = power * fraction + _C1
    power = power * fraction + _C0
    lift = (whole.to(tl.int64) + 1023) << 52
    power = power * lift.to(tl.float64, bitcast=True)
    tl.store(confidence_ptr + row, (1.0 / (1.0 + power)).to(tl.float32))


def confidence(hidden_RH: Tensor, weight_H: Tensor, offset_R: Tensor) -> Tensor:
    """The kernel of `ops.confidence`."""
    R, H = hidden_RH.shape
    confidence_R = hidden_RH.new_empty(R, dtype=torch.float32)
    if R > 0:
        _confidence_kernel[(R,)](
            hidden_RH,
            *hidden_RH.stride(),
            weight_H,
            offset_R.contiguous(),
            confidence_R,
            H,
            COLUMNS=_COLUMNS,
            enable_fp_fusion=False,
        )
    return confidence_R
