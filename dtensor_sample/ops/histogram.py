"""Counts or masses of tokens by eight bits of their value: one round of a radix selection."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, ordered_keys, values, weights

DIGIT_BITS = 8
BINS = 1 << DIGIT_BITS
KEY_BITS = 32


@define("histogram")
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
    """Histogram of kept tokens whose ordered key begins with `prefix`, by their next digit.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        prefix_R: [R] int64, the leading `8 * level` bits selected so far.
        level: 0 to 3, which digit of the 32-bit key, the highest first.
        weighted: sum integer weights; otherwise count tokens.

    Returns:
        [R, 256] int64.
    """
    value_RSv = values(x_NSv, first_id_S, rows_R, edits, vocab_size)
    key_RSv = ordered_keys(value_RSv) >> KEY_BITS - DIGIT_BITS * (level + 1)
    inside_RSv = key_RSv >> DIGIT_BITS == prefix_R[:, None, None]
    if weighted:
        amount_RSv = weights(value_RSv, peak_R, floor_R, scale_R, vocab_size)
        amount_RSv = amount_RSv * inside_RSv
    else:
        above_RSv = (value_RSv >= floor_R[:, None, None]) & (value_RSv > -torch.inf)
        amount_RSv = (inside_RSv & above_RSv).to(torch.int64)
    digit_RSv = key_RSv & BINS - 1
    bins_RB = torch.zeros(len(value_RSv), BINS, dtype=torch.int64, device=x_NSv.device)
    return bins_RB.scatter_add_(1, digit_RSv.flatten(1), amount_RSv.flatten(1))


@histogram.register_fake
def _(
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
    return x_NSv.new_empty((count_rows(x_NSv, rows_R), BINS), dtype=torch.int64)


shard_like(
    torch.ops.dtensor_sample.histogram.default,
    "row_sum",
    "logits segment - - row row row row - - -",
)
