"""The logarithm of a row's sum of exponentials, from its integer mass."""

import math

import torch
from torch import Tensor

from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import weight_bits


@torch.library.custom_op("dtensor_sample::log_sum", mutates_args=())
def log_sum(total_R: Tensor, peak_R: Tensor, vocab_size: int) -> Tensor:
    """Ln of the sum of e**x over a row, weighed at temperature 1.

    Args:
        total_R: [R] int64, the row's mass, see `weights`.
        peak_R: [R] float32, its largest value.
        vocab_size: V.

    Returns:
        [R] float64; -inf where a row has no token.

    Example: two equal logits of 3 weigh 2 * 2**S and give 3 + ln 2.
    """
    return peak_R.double() + (total_R.double().log() - weight_bits(vocab_size) * math.log(2))


@log_sum.register_fake
def _(total_R: Tensor, peak_R: Tensor, vocab_size: int) -> Tensor:
    return total_R.new_empty(total_R.shape, dtype=torch.float64)


shard_like(torch.ops.dtensor_sample.log_sum.default, "row", "row row -")
