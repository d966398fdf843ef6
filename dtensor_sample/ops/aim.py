"""From a uniform number to a point in a row's running sum, and where each part begins in it."""

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.random import scaled


@define("aim")
def aim(sum_RPC: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Scale a uniform number of 62 bits to the sum of each row.

    Args:
        sum_RPC: [R, P, PARTS] int64, sums of all parts in vocabulary order; a row's total is at
            most 2**62.
        uniform_R: [R] int64 in [0, 2**62).

    Returns:
        [R, P, PARTS] int64, the sum of everything before each part; and [R] int64, the point:
        floor(uniform * total / 2**62), below the total unless that is 0.

    Example: parts that sum to [4, 0, 2] start at [0, 4, 4], and a uniform of 2**61 points at 3.
    """
    flat_RG = sum_RPC.contiguous().flatten(1)
    start_RPC = (flat_RG.cumsum(1) - flat_RG).view(sum_RPC.shape)
    return start_RPC, scaled(uniform_R, flat_RG.sum(1))


@aim.register_fake
def _(sum_RPC: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    return sum_RPC.new_empty(sum_RPC.shape), uniform_R.new_empty(uniform_R.shape)


shard_like(torch.ops.dtensor_sample.aim.default, "row row", "row row")
