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
_PENALIZED = tl.constexpr(17)


@triton.jit
def row_edits(row, edits):
    """The edits of one row, read once for all of its columns: a tuple.

    Of one element if nothing is edited, of `_PENALIZED` if the batch has penalties, else of fewer.

    Args:
        row: which of the R rows.
        edits: of `edit_arguments`.
    """
    if edits[0] is None:
        own = (row,)
    else:
        own = _own(row, edits)
    return own


@triton.jit
def _own(row, edits):
    """What `row_edits` tells where something is edited."""
    (
        first_ptr, row_ptr, table_ptr, biased, bias, counts, W, rates, drafts, K,
        banned, B, masks, mask_row_ptr, words, mask_stride, mask_width, mask_id_ptr,
    ) = edits  # fmt: skip
    of = tl.load(row_ptr + row)
    known = of >= 0
    at = tl.maximum(of, 0)
    first = tl.load(first_ptr)
    table = tl.load(table_ptr + at, mask=known, other=-1)
    masked = tl.load(mask_row_ptr + at, mask=known & (_number(masks) > 0), other=-1)
    wide = tl.maximum(table, 0) * W
    own = (
        known, first, W * (table >= 0).to(tl.int32), _number(biased) > 0, bias + wide,
        banned + at * _number(B), _number(B), masked >= 0,
        words + tl.maximum(masked, 0) * _number(mask_stride), _number(mask_width),
        (first - tl.load(mask_id_ptr)).to(tl.int32),
    )  # fmt: skip
    if counts is not None:
        own += _penalties(
            known, counts + wide, drafts + at * _number(K), _number(K), rates + at * 3
        )
    return own


@triton.jit
def _penalties(known, counts, drafts, K, rates):
    """The last elements of `row_edits`: how often ids occur, drafts before the row, and rates."""
    repetition = tl.load(rates, mask=known, other=1.0)
    frequency = tl.load(rates + 1, mask=known, other=0.0)
    presence = tl.load(rates + 2, mask=known, other=0.0)
    return counts, drafts, K, repetition, frequency, presence


@triton.jit
def fetch(
    pointer, column, stride, present, wanted, base, edits,
    TOP: tl.constexpr, UNIT: tl.constexpr, CHUNKS: tl.constexpr = False,
):  # fmt: skip
    """Values of a block of columns of one segment as they count: edited, -inf where not wanted.

    Args:
        pointer, column, stride, present, UNIT: see `load`.
        wanted: mask of what there is.
        base: columns of the row's segments before this one.
        edits: of `row_edits`.
        TOP: the largest finite value of the logits' dtype.
        CHUNKS: see `edit`.
    """
    x = clean(load(pointer, column, stride, present, UNIT), wanted, TOP)
    if len(edits) > 1:
        x = edit(x, base + column, present, edits, CHUNKS)
    return x


@triton.jit
def edit(x, column, present, edits, CHUNKS: tl.constexpr = False):
    """Clean values, or NaN, after the edits of their row; -inf for NaN.

    Args:
        x: float32 values.
        column: their ids, less the first id of the logits.
        present: mask of what may be read.
        edits: of `row_edits`.
        CHUNKS: every eight columns are neighbours, which a thread has: their bits are read at once.
    """
    known, first, W, biased, bias, banned, B, masked, words, mask_width, shift = edits[:11]
    x = tl.where(x > -_INF, x, float("nan"))  # NaN is what becomes -inf at the end
    column = column.to(tl.int32)
    if known:
        here = present & (column < W)
        if biased:
            added = tl.load(bias + column, mask=here, other=0.0)
            x = tl.where(added > -_INF, x + added, float("nan"))
        if len(edits) == _PENALIZED:
            counts, drafts, K, repetition, frequency, presence = edits[11:]
            packed = tl.load(counts + column, mask=here, other=0)
            count = packed & (_IN_PROMPT - 1)
            for k in range(K):
                count += (column == _column_of(drafts + k, first)).to(tl.int32)
            divided = tl.div_rn(x, tl.zeros_like(x) + repetition)
            repeated = tl.where(x > 0, divided, x * repetition)
            x = tl.where((packed >= _IN_PROMPT) | (count > 0), repeated, x)
            x = x - count.to(tl.float32) * frequency
            x = tl.where(count > 0, x - presence, x)
        for b in range(B):
            x = tl.where(column == _column_of(banned + b, first), float("nan"), x)
        if masked:
            allowed = _allowed(words, column + shift, mask_width, CHUNKS)
            x = tl.where(allowed & 1 == 0, float("nan"), x)
    edited = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST) + 0.0
    return tl.where(x == x, edited, -_INF)


@triton.jit
def _allowed(word, bit, words, CHUNKS: tl.constexpr):
    """Numbers whose lowest bit is that of a packed mask; 0 beyond its words."""
    if CHUNKS:  # eight bits lie in one word or two
        bits = tl.reshape(bit, [bit.numel // 8, 8])
        begin = tl.min(bits, 1)
        at, after = begin >> 5, (begin + 7) >> 5
        low = tl.load(word + at, mask=(at >= 0) & (at < words), other=0).to(tl.uint32, bitcast=True)
        high = tl.load(word + after, mask=(after >= 0) & (after < words), other=0)
        both = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
        eight = (both >> (begin & 31).to(tl.uint64)).to(tl.int32)
        allowed = tl.reshape(eight[:, None] >> tl.arange(0, 8)[None, :], bit.shape)
    else:
        inside = (bit >= 0) & (bit < words * 32)
        allowed = tl.load(word + (bit >> 5), mask=inside, other=0) >> (bit & 31)
    return allowed


@triton.jit
def _column_of(pointer, first):
    """The column of an id; -1, or less, for none."""
    token = tl.minimum(tl.maximum(tl.load(pointer), -1), 0x7FFFFFFF)
    return (token - first).to(tl.int32)


@triton.jit
def _number(hidden):
    """See `_hidden`."""
    return (hidden - 3) >> 1


def _hidden(number: int) -> int:
    """A number as kernels get it, odd and above 1: Triton compiles anew for 1 and multiples of 16.

    Which edits a batch has, and how many, changes from step to step, and to compile takes seconds.
    """
    return 2 * number + 3


NO_EDITS = (None,)
"""What kernels are told where nothing is edited: the first of a tuple is None."""


def edit_arguments(edits: Sequence[Tensor], first_id_S: Tensor) -> tuple[Any, ...]:
    """What kernels are told about edits: one tuple."""
    if not edits:
        return NO_EDITS
    of = Edits(*edits)

    mask_GX = of.mask_GX if of.mask_GX.stride(-1) == 1 else of.mask_GX.contiguous()
    return (
        first_id_S,
        of.row_R.contiguous(),
        of.table_E.contiguous(),
        _hidden(of.bias_MW.numel() > 0),
        of.bias_MW.contiguous(),
        of.counts_MW.contiguous() if of.counts_MW.numel() > 0 else None,
        max(of.bias_MW.shape[1], of.counts_MW.shape[1]),
        of.rates_E3.contiguous(),
        of.drafts_EK.contiguous(),
        _hidden(of.drafts_EK.shape[1]),
        of.banned_EB.contiguous(),
        _hidden(of.banned_EB.shape[1]),
        _hidden(mask_GX.numel() > 0),
        of.mask_E.contiguous(),
        mask_GX,
        _hidden(mask_GX.stride(0)),
        _hidden(mask_GX.shape[1]),
        of.mask_id_1,
    )


def value_dtype(edits: Sequence[Tensor], dtype: torch.dtype) -> torch.dtype:
    """What holds every value of logits of a dtype."""
    return torch.float32 if edits else dtype
