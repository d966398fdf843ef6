"""The weight of one given token in each row."""

import torch
from torch import Tensor

from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, token_ids, values, weights


@torch.library.custom_op("dtensor_sample::lookup", mutates_args=())
def lookup(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    token_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The integer weight of a token of each row.

    Args:
        x_NSv, first_id_S, rows_R, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        token_R: [R] int64; any value that is no id of the vocabulary weighs 0.

    Returns:
        [R] int64: its weight, 0 where the token is not kept or lies in no segment here.
    """
    value_RSv = values(x_NSv, first_id_S, rows_R, vocab_size)
    weight_RSv = weights(value_RSv, peak_R, floor_R, scale_R, vocab_size)
    here_RSv = token_ids(x_NSv, first_id_S) == token_R[:, None, None]
    return (weight_RSv * here_RSv).sum((1, 2))


@lookup.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    token_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return x_NSv.new_empty(count_rows(x_NSv, rows_R), dtype=torch.int64)


shard_like(torch.ops.dtensor_sample.lookup.default, "row_sum", "logits segment - row row row row -")
