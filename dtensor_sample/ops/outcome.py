"""What a drawn row reports, and what of all reports a step returns, see `SamplerOutput`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like

OUTCOME_COLUMNS = 4
"""Integers of a request's result after its tokens: sampled, rejected, NaN logits, failed."""


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


@define("deliver")
def deliver(
    result_TW: Tensor, src_B: Tensor, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of an output, from the results of all requests in the order of their owners.

    Args:
        result_TW: [T, W] int64, the tokens of each, at most `tokens`, then OUTCOME_COLUMNS.
        src_B: [B] int64, the row of each request of the batch.
        tokens: how many a request of the output has, -1 where the results have none.

    Returns:
        [B, tokens] int64; [B] int64 num_sampled, num_rejected and num_nans; [B] bool failed.
    """
    result_BW = result_TW[src_B]
    token_BJ = result_BW[:, :-OUTCOME_COLUMNS]
    token_BJ = pad(token_BJ, (0, tokens - token_BJ.shape[1]), value=-1).contiguous()
    sampled_B, rejected_B, nans_B, failed_B = result_BW[:, -OUTCOME_COLUMNS:].T.contiguous()
    return token_BJ, sampled_B.clone(), rejected_B.clone(), nans_B.clone(), failed_B != 0


@deliver.register_fake
def _(
    result_TW: Tensor, src_B: Tensor, tokens: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B = src_B.shape[0]
    sampled_B, rejected_B, nans_B = (src_B.new_empty(B) for _ in range(3))
    failed_B = src_B.new_empty(B, dtype=torch.bool)
    return src_B.new_empty((B, tokens)), sampled_B, rejected_B, nans_B, failed_B
