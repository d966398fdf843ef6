"""What a drawn row reports: the columns of a request's result, see `SamplerOutput`."""

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like


@define("outcome")
def outcome(picked_R: Tensor, argmax_R: Tensor, nans_R: Tensor, greedy_R: Tensor) -> Tensor:
    """Put together what each row's draw found.

    Args:
        picked_R: [R] int64, the token that a uniform number pointed at; -1 if it is not here.
        argmax_R: [R] int64, the lowest id of the largest value; -1 where a row has no token.
        nans_R: [R] int64, NaN logits.
        greedy_R: [R] bool, rows that take the largest value.

    Returns:
        [R, 5] int64: the token, how many were sampled (0 where none was left, else 1) and rejected
        (0), the NaN logits, and 1 where no token was left.
    """
    token_R = torch.where(greedy_R, argmax_R, picked_R)
    failed_R = (argmax_R < 0).to(torch.int64)
    return torch.stack([token_R, 1 - failed_R, torch.zeros_like(nans_R), nans_R, failed_R], 1)


@outcome.register_fake
def _(picked_R: Tensor, argmax_R: Tensor, nans_R: Tensor, greedy_R: Tensor) -> Tensor:
    return picked_R.new_empty((picked_R.shape[0], 5))


shard_like(torch.ops.dtensor_sample.outcome.default, "row", "row row row row")
