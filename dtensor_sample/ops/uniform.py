"""Uniform integers of counters, as an op: opaque to tracing, one kernel where there is a GPU."""

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.random import WORD, philox


@define("uniform")
def uniform(seed_R: Tensor, position_R: Tensor, offset_R: Tensor, stream: int) -> Tensor:
    """62-bit uniform integers, a function of their arguments and nothing else.

    Args:
        seed_R: [R] int64, the 64 bits of each row's seed.
        position_R: [R] int64: the emitted token's place in its own sequence; below 0 counts as 0.
        offset_R: [R] int64 in [0, 2**32): place within a block of drafts.
        stream: one of the streams of `dtensor_sample.random`.

    Returns:
        [R] int64 in [0, 2**62): the upper 62 of Philox's first 64 bits.
    """
    position_R = position_R.clamp(min=0)
    low_R, high_R, _, _ = philox(
        (seed_R & WORD, seed_R >> 32 & WORD),
        (position_R & WORD, position_R >> 32 & WORD, offset_R, torch.full_like(seed_R, stream)),
    )
    return low_R >> 2 | high_R << 30


@uniform.register_fake
def _(seed_R: Tensor, position_R: Tensor, offset_R: Tensor, stream: int) -> Tensor:
    return seed_R.new_empty(seed_R.shape)


shard_like(torch.ops.dtensor_sample.uniform.default, "row", "row row row -")
