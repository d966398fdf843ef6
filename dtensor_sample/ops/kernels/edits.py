"""What `ops/edits.py` computes, as a device function: the same operations, hence the same bits."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_sample.ops.edits import IN_PROMPT, Edits
from dtensor_sample.ops.kernels.values import clean, load

_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_IN_PROMPT = tl.constexpr(IN_PROMPT)


@triton.jit
def fetch(
    pointer, column, stride, present, wanted, base, row, edits,
    TOP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Values of a block of columns of one segment as they count: edited, -inf where not wanted.

    Args:
        pointer, column, stride, present, UNIT: see `load`.
        wanted: mask of what there is.
        base: columns of the row's segments before this one.
        row: which of the R rows.
        edits: of `edit_arguments`.
        TOP: the largest finite value of the logits' dtype.
    """
    x = clean(load(pointer, column, stride, present, UNIT), wanted, TOP)
    if edits[0] is not None:
        x = edit(x, base + column, wanted, row, edits)
    return x


@triton.jit
def edit(x, column, present, row, edits):
    """Clean values, or NaN, after the edits of their row; -inf for NaN.

    Args:
        x: float32 values.
        column: their ids, less the first id of the logits.
        present: mask of what there is.
        row: which of the R rows.
        edits: of `edit_arguments`.
    """
    (
        first_ptr, row_ptr, table_ptr, rates_ptr, drafts_ptr, K, banned_ptr, B, mask_row_ptr,
        bias_ptr, counts_ptr, W, mask_ptr, mask_stride, words, mask_id_ptr,
    ) = edits  # fmt: skip
    x = tl.where(x == x, x, -_INF)
    never = x == -_INF
    column = column.to(tl.int64)
    of = tl.load(row_ptr + row)
    if of >= 0:
        table = tl.load(table_ptr + of)
        here = present & (column < tl.where(table >= 0, W, 0))
        at = tl.maximum(table, 0) * W + column
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + at, mask=here, other=0.0)
            never = never | (bias == -_INF)
            x = x + bias
        token = tl.load(first_ptr) + column
        if counts_ptr is not None:
            packed = tl.load(counts_ptr + at, mask=here, other=0)
            count = packed & (_IN_PROMPT - 1)
            for k in range(K):
                count += (token == tl.load(drafts_ptr + of * K + k)).to(tl.int32)
            repetition = tl.load(rates_ptr + of * 3)
            seen = (packed >= _IN_PROMPT) | (count > 0)
            divided = tl.div_rn(x, tl.zeros_like(x) + repetition)
            x = tl.where(seen, tl.where(x > 0, divided, x * repetition), x)
            x = x - count.to(tl.float32) * tl.load(rates_ptr + of * 3 + 1)
            x = tl.where(count > 0, x - tl.load(rates_ptr + of * 3 + 2), x)
        for b in range(B):
            banned = tl.load(banned_ptr + of * B + b)
            if banned >= 0:
                never = never | (token == banned)
        if mask_ptr is not None:
            masked = tl.load(mask_row_ptr + of)
            if masked >= 0:
                bit = token - tl.load(mask_id_ptr)
                inside = present & (bit >= 0) & (bit < words * 32)
                word = tl.load(mask_ptr + masked * mask_stride + (bit >> 5), mask=inside, other=0)
                never = never | (((word >> (bit & 31).to(tl.int32)) & 1) == 0)
        x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
    return tl.where(never, -_INF, x + 0.0)


NO_EDITS = (None,)
"""What kernels are told where nothing is edited: the first of a tuple is None."""


def edit_arguments(edits: Sequence[Tensor], first_id_S: Tensor) -> tuple[Any, ...]:
    """What kernels are told about edits: one tuple."""
    if not edits:
        return NO_EDITS
    of = Edits(*edits)

    def wide(x: Tensor) -> Tensor | None:
        return x.contiguous() if x.numel() else None

    mask_GX = of.mask_GX if of.mask_GX.stride(-1) == 1 else of.mask_GX.contiguous()
    return (
        first_id_S,
        of.row_R.contiguous(),
        of.table_E.contiguous(),
        of.rates_E3.contiguous(),
        of.drafts_EK.contiguous(),
        of.drafts_EK.shape[1],
        of.banned_EB.contiguous(),
        of.banned_EB.shape[1],
        of.mask_E.contiguous(),
        wide(of.bias_MW),
        wide(of.counts_MW),
        max(of.bias_MW.shape[1], of.counts_MW.shape[1]),
        mask_GX if mask_GX.numel() else None,
        mask_GX.stride(0),
        mask_GX.shape[1],
        of.mask_id_1,
    )


def value_dtype(edits: Sequence[Tensor], dtype: torch.dtype) -> torch.dtype:
    """What holds every value of logits of a dtype."""
    return torch.float32 if edits else dtype
