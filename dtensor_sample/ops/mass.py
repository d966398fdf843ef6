"""The sum of the integer weights of each row and segment's kept tokens."""

import torch
from torch import Tensor

from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, values, weights


@torch.library.custom_op("dtensor_sample::mass", mutates_args=())
def mass(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """Total integer weight of each row and segment.

    Args:
        x_NSv, first_id_S, rows_R, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.

    Returns:
        [R, S] int64; a row's segments sum to at most 2**62.
    """
    value_RSv = values(x_NSv, first_id_S, rows_R, vocab_size)
    return weights(value_RSv, peak_R, floor_R, scale_R, vocab_size).sum(2)


@mass.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return x_NSv.new_empty((count_rows(x_NSv, rows_R), x_NSv.shape[1]), dtype=torch.int64)


shard_like(torch.ops.dtensor_sample.mass.default, "row_segment", "logits segment - row row row -")
