"""The sum of the integer weights of each row and segment's kept tokens."""

import torch
from torch import Tensor

from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import values, weights


@torch.library.custom_op("dtensor_sample::mass", mutates_args=())
def mass(
    x_RSv: Tensor,
    first_id_S: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """Total integer weight of each row and segment.

    Args:
        x_RSv: [R, S, v] logits, any strides.
        first_id_S: [S] int64.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        vocab_size: ids from here on do not exist.

    Returns:
        [R, S] int64; a row's segments sum to at most 2**62.
    """
    value_RSv = values(x_RSv, first_id_S, vocab_size)
    return weights(value_RSv, peak_R, floor_R, scale_R, vocab_size).sum(2)


@mass.register_fake
def _(
    x_RSv: Tensor,
    first_id_S: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return x_RSv.new_empty(x_RSv.shape[:2], dtype=torch.int64)


shard_like(
    torch.ops.dtensor_sample.mass.default,
    "per row and segment",
    *("logits", "per segment", "per row", "per row", "per row", "host"),
)
