"""What a step returns of the results of its requests, see `SamplerOutput`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.ops.define import define

OUTCOME_COLUMNS = 4
"""Integers of a request's result after its tokens: sampled, rejected, NaN logits, failed."""


@define("deliver", mutates=["positions_M"])
def deliver(
    result_TW: Tensor,
    src_B: Tensor,
    tokens: int,
    slots_B: Tensor,
    positions_M: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of an output, from the results of all requests in the order of their owners.

    Positions advance by what was sampled.

    Args:
        result_TW: [T, W] int64, the tokens of each, at most `tokens`, then OUTCOME_COLUMNS.
        src_B: [B] int64, the row of each request of the batch.
        tokens: how many a request of the output has, -1 where the results have none.
        slots_B: [B] int64, the entry of `positions_M` of each; those of padding may be equal.
        positions_M: [M] int64, changed in place; None: they stay.

    Returns:
        [B, tokens] int64; [B] int64 num_sampled, num_rejected and num_nans; [B] bool failed.
    """
    result_BW = result_TW[src_B]
    token_BJ = result_BW[:, :-OUTCOME_COLUMNS]
    token_BJ = pad(token_BJ, (0, tokens - token_BJ.shape[1]), value=-1).contiguous()
    sampled_B, rejected_B, nans_B, failed_B = result_BW[:, -OUTCOME_COLUMNS:].T.contiguous()
    if positions_M is not None:
        positions_M.index_add_(0, slots_B, sampled_B)
    return token_BJ, sampled_B.clone(), rejected_B.clone(), nans_B.clone(), failed_B != 0


@deliver.register_fake
def _(
    result_TW: Tensor,
    src_B: Tensor,
    tokens: int,
    slots_B: Tensor,
    positions_M: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    B = src_B.shape[0]
    sampled_B, rejected_B, nans_B = (src_B.new_empty(B) for _ in range(3))
    failed_B = src_B.new_empty(B, dtype=torch.bool)
    return src_B.new_empty((B, tokens)), sampled_B, rejected_B, nans_B, failed_B
