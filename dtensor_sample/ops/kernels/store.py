"""Writing logits into a cache."""

import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.values import load

_TILE = 4096


@kernel
def _store_kernel(
    cache_ptr,  # out: [M, W]
    cache_stride_m,
    cache_stride_w,
    first_ptr,  # [R] int64
    skipped_ptr,  # [R] bool
    step,
    x_ptr,  # [R, S, v]
    stride_n,
    stride_s,
    stride_v,
    cache_width,  # W
    width,  # v
    blocks,  # tiles of a segment
    segments,  # S
    UNIT: tl.constexpr,  # stride_v is 1
    TILE: tl.constexpr,
):
    """A tile of a segment of a row, unless the row is -1 or skipped.

    Example: W = 3 and segments [a, b], [c, d] are stored as [a, b, c].
    """
    row = (tl.program_id(0) // blocks // segments).to(tl.int64)
    segment = tl.program_id(0) // blocks % segments
    target = tl.load(first_ptr + row)
    target = tl.where(tl.load(skipped_ptr + row) != 0, -1, target)
    column = tl.program_id(0) % blocks * TILE + tl.arange(0, TILE)
    first = segment.to(tl.int64) * width
    wanted = tl.where(target >= 0, cache_width - first, 0)
    present = (column < width) & (column < wanted)
    x = load(x_ptr + row * stride_n + segment * stride_s, column, stride_v, present, UNIT)
    to = cache_ptr + (target + step) * cache_stride_m + (first + column) * cache_stride_w
    tl.store(to, x.to(cache_ptr.dtype.element_ty), mask=present)


def store(cache_MW: Tensor, first_R: Tensor, step: int, skipped_R: Tensor, x_RSv: Tensor) -> None:
    """The kernel of `ops.store`."""
    R, S, v = x_RSv.shape
    if x_RSv.numel() > 0:
        blocks = triton.cdiv(v, _TILE)
        _store_kernel[(R * S * blocks,)](
            cache_MW,
            *cache_MW.stride(),
            first_R.contiguous(),
            skipped_R.contiguous(),
            step,
            x_RSv,
            *x_RSv.stride(),
            cache_MW.shape[1],
            v,
            blocks,
            S,
            UNIT=x_RSv.stride(2) == 1,
            TILE=_TILE,
        )
