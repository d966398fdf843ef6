"""What rows take from their requests, their uniform integers, and what they report."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.kernels.values import SIZES
from dtensor_sample.ops.largest import TOP_P_ONE

_ROWS = 128


@triton.jit(do_not_specialize=SIZES)
def _row_params_kernel(
    table_ptr,  # [M, 6] int64
    row_ptr,  # [R] int64, or unused
    position_ptr,  # [X] int64
    place_ptr,  # [R] int64, or unused
    offset_ptr,  # [R] int64, or unused
    scale_ptr,  # out: [R] float32
    min_p_ptr,  # out: [R] float32
    top_k_ptr,  # out: [R] int64
    top_p_ptr,  # out: [R] int64
    seed_ptr,  # out: [R] int64
    greedy_ptr,  # out: [R] bool
    emitted_ptr,  # out: [R] int64
    rows,  # R
    TOP_P_ONE: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program
):
    """Rows of a table, see `ops.row_params`.

    Example: a table with top-k 0 and top-p 2**40 gives top-k 1 and top-p 2**31.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    source, place = row, row
    if row_ptr is not None:
        source = tl.load(row_ptr + row, mask=exists, other=0)
    if place_ptr is not None:
        place = tl.load(place_ptr + row, mask=exists, other=0)
    position = tl.load(position_ptr + place, mask=exists, other=0)
    if offset_ptr is not None:
        position += tl.load(offset_ptr + row, mask=exists, other=0)
    entry = table_ptr + source * 6
    scale = tl.load(entry, mask=exists, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    min_p = tl.load(entry + 1, mask=exists, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    top_k = tl.maximum(tl.load(entry + 2, mask=exists, other=0), 1)
    top_p = tl.minimum(tl.maximum(tl.load(entry + 3, mask=exists, other=0), 0), TOP_P_ONE)
    tl.store(scale_ptr + row, scale, mask=exists)
    tl.store(min_p_ptr + row, min_p, mask=exists)
    tl.store(top_k_ptr + row, top_k, mask=exists)
    tl.store(top_p_ptr + row, top_p, mask=exists)
    tl.store(seed_ptr + row, tl.load(entry + 4, mask=exists, other=0), mask=exists)
    greedy = tl.load(entry + 5, mask=exists, other=0) != 0
    tl.store(greedy_ptr + row, greedy, mask=exists)
    tl.store(emitted_ptr + row, position, mask=exists)


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
    answer_ptr,  # out: [R, 5] int64
    rows,  # R
    ROWS: tl.constexpr,  # rows of a program
):
    """Token, tokens sampled and rejected, NaN count, and whether the row failed.

    Example: picked 5, argmax 7, 2 NaNs: [5, 1, 0, 2, 0], or [7, 1, 0, 2, 0] if greedy; argmax -1
    has failed.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    argmax = tl.load(argmax_ptr + row, mask=exists, other=0)
    greedy = tl.load(greedy_ptr + row, mask=exists, other=0)
    picked = tl.load(picked_ptr + row, mask=exists, other=0)
    failed = (argmax < 0).to(tl.int64)
    answer = answer_ptr + row * 5
    tl.store(answer, tl.where(greedy != 0, argmax, picked), mask=exists)
    tl.store(answer + 1, 1 - failed, mask=exists)
    tl.store(answer + 2, tl.zeros_like(failed), mask=exists)
    tl.store(answer + 3, tl.load(nans_ptr + row, mask=exists, other=0), mask=exists)
    tl.store(answer + 4, failed, mask=exists)


def row_params(
    table_M6: Tensor,
    row_R: Tensor | None,
    position_X: Tensor,
    place_R: Tensor | None,
    offset_R: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `ops.row_params`."""
    rows = table_M6.shape[0] if row_R is None else row_R.shape[0]
    scale_R, min_p_R = (table_M6.new_empty(rows, dtype=torch.float32) for _ in range(2))
    top_k_R, top_p_R, seed_R, emitted_R = (table_M6.new_empty(rows) for _ in range(4))
    greedy_R = table_M6.new_empty(rows, dtype=torch.bool)
    found = (scale_R, min_p_R, top_k_R, top_p_R, seed_R, greedy_R, emitted_R)
    if rows > 0:
        _row_params_kernel[(triton.cdiv(rows, _ROWS),)](
            table_M6.contiguous(),
            None if row_R is None else row_R.contiguous(),
            position_X.contiguous(),
            None if place_R is None else place_R.contiguous(),
            None if offset_R is None else offset_R.contiguous(),
            *found,
            rows,
            TOP_P_ONE=TOP_P_ONE,
            ROWS=_ROWS,
        )
    return found


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
    answer_R5 = picked_R.new_empty((rows, 5))
    if rows > 0:
        _answer_kernel[(triton.cdiv(rows, _ROWS),)](
            picked_R.contiguous(),
            argmax_R.contiguous(),
            nans_R.contiguous(),
            greedy_R.contiguous(),
            answer_R5,
            rows,
            ROWS=_ROWS,
        )
    return answer_R5
