"""Writing rows into a cache."""

from collections.abc import Sequence

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
    kept,  # out: pointers to [M] float32, float32, float32, int64, int64, int64
    first_ptr,  # [R] int64
    skipped_ptr,  # [R] bool
    step,
    x_ptr,  # [R, S, v]
    stride_n,
    stride_s,
    stride_v,
    peak_ptr,  # [R] float32
    floor_ptr,  # [R] float32
    scale_ptr,  # [R] float32
    mass_ptr,  # [R, P, C] int64
    argmax_ptr,  # [R] int64
    nans_ptr,  # [R] int64
    parts,  # P * C
    cache_width,  # W
    width,  # v
    blocks,  # tiles of a segment
    segments,  # S
    UNIT: tl.constexpr,  # stride_v is 1
    ALL_PARTS: tl.constexpr,  # P * C, rounded up to a power of two
    TILE: tl.constexpr,
):
    """A tile of a segment of a row, unless the row is -1 or skipped; with the first, the fields.

    Example: W = 3 and segments [a, b], [c, d] are stored as [a, b, c], masses [2, 3] as 5.
    """
    row = (tl.program_id(0) // blocks // segments).to(tl.int64)
    segment = tl.program_id(0) // blocks % segments
    tile = tl.program_id(0) % blocks
    target = tl.load(first_ptr + row)
    target = tl.where(tl.load(skipped_ptr + row) != 0, -1, target)
    column = tile * TILE + tl.arange(0, TILE)
    first = segment.to(tl.int64) * width
    wanted = tl.where(target >= 0, cache_width - first, 0)
    present = (column < width) & (column < wanted)
    x = load(x_ptr + row * stride_n + segment * stride_s, column, stride_v, present, UNIT)
    to = cache_ptr + (target + step) * cache_stride_m + (first + column) * cache_stride_w
    tl.store(to, x.to(cache_ptr.dtype.element_ty), mask=present)
    if (target >= 0) & (segment == 0) & (tile == 0):
        to_peak, to_floor, to_scale, to_mass, to_argmax, to_nans = kept
        part = tl.arange(0, ALL_PARTS)
        mass = tl.load(mass_ptr + row * parts + part, mask=part < parts, other=0)
        tl.store(to_peak + target + step, tl.load(peak_ptr + row))
        tl.store(to_floor + target + step, tl.load(floor_ptr + row))
        tl.store(to_scale + target + step, tl.load(scale_ptr + row))
        tl.store(to_mass + target + step, tl.sum(mass, 0))
        tl.store(to_argmax + target + step, tl.load(argmax_ptr + row))
        tl.store(to_nans + target + step, tl.load(nans_ptr + row))


def store(
    cache_MW: Tensor,
    kept: Sequence[Tensor],
    first_R: Tensor,
    step: int,
    skipped_R: Tensor,
    x_RSv: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
) -> None:
    """The kernel of `ops.store`."""
    (R, S, v), parts = x_RSv.shape, mass_RPC.shape[1] * mass_RPC.shape[2]
    if x_RSv.numel() > 0:
        blocks = triton.cdiv(v, _TILE)
        _store_kernel[(R * S * blocks,)](
            cache_MW,
            *cache_MW.stride(),
            tuple(kept),
            first_R.contiguous(),
            skipped_R.contiguous(),
            step,
            x_RSv,
            *x_RSv.stride(),
            peak_R.contiguous(),
            floor_R.contiguous(),
            scale_R.contiguous(),
            mass_RPC.contiguous(),
            argmax_R.contiguous(),
            nans_R.contiguous(),
            parts,
            cache_MW.shape[1],
            v,
            blocks,
            S,
            UNIT=x_RSv.stride(2) == 1,
            ALL_PARTS=triton.next_power_of_2(max(parts, 1)),
            TILE=_TILE,
        )
