"""Counter-based uniform integers."""

import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.values import SIZES

_ROWS = 128


@triton.jit(do_not_specialize=SIZES)
def _uniform_kernel(
    seed_ptr,  # [R] int64
    position_ptr,  # [R] int64
    offset_ptr,  # [R] int64
    uniform_ptr,  # out: [R] int64
    rows,  # R
    STREAM: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    """The upper 62 of the first 64 bits of Philox4x32-10, see `dtensor_sample.random`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seed = tl.load(seed_ptr + row, mask=row < rows, other=0)
    position = tl.maximum(tl.load(position_ptr + row, mask=row < rows, other=0), 0)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = position.to(tl.uint32)
    c1 = (position >> 32).to(tl.uint32)
    c2 = tl.load(offset_ptr + row, mask=row < rows, other=0).to(tl.uint32)
    c3 = tl.zeros_like(c2) + STREAM
    for _ in tl.static_range(10):
        m0 = tl.zeros_like(c0) + 0xD2511F53
        m1 = tl.zeros_like(c0) + 0xCD9E8D57
        high0, low0 = tl.umulhi(c0, m0), c0 * m0
        high1, low1 = tl.umulhi(c2, m1), c2 * m1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    uniform = (c0.to(tl.uint64) | c1.to(tl.uint64) << 32) >> 2
    tl.store(uniform_ptr + row, uniform.to(tl.int64), mask=row < rows)


@triton.jit(do_not_specialize=SIZES)
def _answer_kernel(
    picked_ptr,  # [R] int64
    argmax_ptr,  # [R] int64
    nans_ptr,  # [R] int64
    greedy_ptr,  # [R] bool
    answer_ptr,  # out: [R, 3] int64
    rows,  # R
    ROWS: tl.constexpr,  # rows of a program
):
    """Token, NaN count and whether the row failed.

    Example: picked 5, argmax 7, 2 NaNs: [5, 2, 0], or [7, 2, 0] if greedy; argmax -1 has failed.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    argmax = tl.load(argmax_ptr + row, mask=exists, other=0)
    greedy = tl.load(greedy_ptr + row, mask=exists, other=0)
    picked = tl.load(picked_ptr + row, mask=exists, other=0)
    tl.store(answer_ptr + row * 3, tl.where(greedy != 0, argmax, picked), mask=exists)
    tl.store(answer_ptr + row * 3 + 1, tl.load(nans_ptr + row, mask=exists, other=0), mask=exists)
    tl.store(answer_ptr + row * 3 + 2, (argmax < 0).to(tl.int64), mask=exists)


def uniform(seed_R: Tensor, position_R: Tensor, offset_R: Tensor, stream: int) -> Tensor:
    """The kernel of `ops.uniform`."""
    uniform_R = seed_R.new_empty(seed_R.shape)
    rows = seed_R.shape[0]
    if rows > 0:
        _uniform_kernel[(triton.cdiv(rows, _ROWS),)](
            seed_R.contiguous(),
            position_R.contiguous(),
            offset_R.contiguous(),
            uniform_R,
            rows,
            STREAM=stream,
            ROWS=_ROWS,
        )
    return uniform_R


def answer(picked_R: Tensor, argmax_R: Tensor, nans_R: Tensor, greedy_R: Tensor) -> Tensor:
    """The kernel of `ops.answer`."""
    rows = picked_R.shape[0]
    answer_R3 = picked_R.new_empty((rows, 3))
    if rows > 0:
        _answer_kernel[(triton.cdiv(rows, _ROWS),)](
            picked_R.contiguous(),
            argmax_R.contiguous(),
            nans_R.contiguous(),
            greedy_R.contiguous(),
            answer_R3,
            rows,
            ROWS=_ROWS,
        )
    return answer_R3
