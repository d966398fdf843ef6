"""The largest values of rows: a pass that finds the largest of each block, then a few blocks again.

The n largest tokens lie in at most n blocks, those with the n largest tokens of their own: packed
with their ids, all tokens differ. So the second step reads n blocks a row, whatever is tied.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.edits import Edits
from dtensor_sample.ops.kernels.edits import edit_arguments, fetch, row_edits
from dtensor_sample.ops.kernels.launch import kernel
from dtensor_sample.ops.kernels.values import segment_count, source_row
from dtensor_sample.ops.peak import LAST_ID, pack_value
from dtensor_sample.ops.top import top_by_rows
from dtensor_sample.ops.values import count_rows, values_at

_INF = tl.constexpr(float("inf"))
_LAST_ID = tl.constexpr(LAST_ID)
_BLOCK = 128
"""Columns of a block."""
_BLOCKS = 16
"""Blocks of a program."""
_CANDIDATES = 1 << 17
"""Tokens of chosen blocks that are looked at at once."""


@kernel
def _block_tops_kernel(
    x_ptr,  # [N, S, v] logits
    stride_n,
    stride_s,
    stride_v,
    first_ptr,  # [S] int64
    rows_ptr,  # [R] int64, or unused
    top_ptr,  # out: [R, S, blocks] int64
    edits,  # of `edit_arguments`
    segments,  # S
    width,  # v
    blocks,  # of a segment
    vocab_size,
    TOP: tl.constexpr,  # largest finite value of the logits' dtype
    UNIT: tl.constexpr,  # stride_v is 1
    HAS_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a program
    BLOCK: tl.constexpr,  # columns of a block
):
    """The largest token of each block, packed as by `pack_value`; -1 where it has none.

    Example: of a block [1, nan, 7, 7] from id 4 on, 7 at id 6.
    """
    pieces = tl.cdiv(blocks, BLOCKS)
    piece = tl.program_id(0) % pieces
    segment = tl.program_id(0) // pieces % segments
    row = tl.program_id(0) // pieces // segments
    source = source_row(rows_ptr, row, HAS_ROWS)
    own = row_edits(row, edits)
    count = segment_count(first_ptr, segment, source, width, vocab_size)
    x = x_ptr + tl.maximum(source, 0) * stride_n + segment.to(tl.int64) * stride_s
    column = piece * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK)
    values = 0.0 + fetch(
        x, column, stride_v, column < width, column < count, segment * width, own, TOP, UNIT
    )
    bits = values.to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(bits >= 0, bits + (1 << 31), -1 - bits)
    packed = (key << 31) | (_LAST_ID - tl.load(first_ptr + segment) - column)
    packed = tl.where(values > -_INF, packed, -1)
    best = tl.max(tl.reshape(packed, [BLOCKS, BLOCK]), 1)
    block = piece * BLOCKS + tl.arange(0, BLOCKS)
    out = top_ptr + (row.to(tl.int64) * segments + segment) * blocks
    tl.store(out + block, best, mask=block < blocks)


def top(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    count: int,
) -> Tensor:
    """The kernel of `ops.top`."""
    (N, S, v), R = x_NSv.shape, count_rows(x_NSv, rows_R)
    blocks = triton.cdiv(v, _BLOCK)
    if 2 * count >= S * blocks:  # most blocks: no better than all
        return top_by_rows(x_NSv, first_id_S, rows_R, edits, vocab_size, count)
    top_RSb = first_id_S.new_empty((R, S, blocks))
    if R > 0:
        _block_tops_kernel[(R * S * triton.cdiv(blocks, _BLOCKS),)](
            x_NSv,
            *x_NSv.stride(),
            first_id_S,
            rows_R,
            top_RSb,
            edit_arguments(edits, first_id_S),
            S,
            v,
            blocks,
            vocab_size,
            TOP=torch.finfo(x_NSv.dtype).max,
            UNIT=x_NSv.stride(2) == 1,
            HAS_ROWS=rows_R is not None,
            BLOCKS=_BLOCKS,
            BLOCK=_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    block_RC = top_RSb.flatten(1).topk(count, sorted=False).indices
    row_R = torch.arange(N, device=x_NSv.device) if rows_R is None else rows_R
    place_b = torch.arange(_BLOCK, device=x_NSv.device)
    found_RC = first_id_S.new_empty((R, count))
    step = max(1, _CANDIDATES // (count * _BLOCK))
    for begin in range(0, R, step):
        part = slice(begin, begin + step)
        segment_rC = block_RC[part] // blocks
        column_rCb = (block_RC[part] % blocks * _BLOCK)[..., None] + place_b
        segment_rCb = segment_rC[..., None].expand_as(column_rCb)
        at = (segment_rCb.flatten(1), column_rCb.flatten(1), vocab_size)
        own = Edits(*edits).at(part) if edits else ()
        value_r1W, id_r1W = values_at(x_NSv, first_id_S, row_R[part], own, *at)
        packed_r1W = torch.where(value_r1W > -torch.inf, pack_value(value_r1W, id_r1W), -1)
        found_RC[part] = packed_r1W[:, 0].topk(count).values
    return found_RC[:, None]
