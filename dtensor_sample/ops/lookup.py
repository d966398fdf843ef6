"""The weight of one given token in each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, values_at, weights


@define("lookup")
def lookup(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    token_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The integer weight of a token of each row.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        token_R: [R] int64; any value that is no id of the vocabulary weighs 0.

    Returns:
        [R] int64: its weight, 0 where the token is not kept or lies in no segment here.
    """
    column_RS = token_R[:, None] - first_id_S
    segment_RS = torch.arange(x_NSv.shape[1], device=x_NSv.device).expand_as(column_RS)
    logits = (x_NSv, first_id_S, rows_R, edits)
    value_R1S, _ = values_at(*logits, segment_RS, column_RS, vocab_size)
    return weights(value_R1S, peak_R, floor_R, scale_R, vocab_size).sum((1, 2))


@lookup.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    token_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return x_NSv.new_empty(count_rows(x_NSv, rows_R), dtype=torch.int64)


shard_like(
    torch.ops.dtensor_sample.lookup.default, "row_sum", "logits segment - - row row row row -"
)
