"""What comes back from a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

RESULT_COLUMNS = 3
"""Integers of a drawn row: token id (-1 if none), number of NaN logits, whether it failed."""

VERIFIED_COLUMNS = 4
"""Integers of a verified request after its tokens: sampled, rejected, NaN logits, failed."""


@dataclass(frozen=True, eq=False)
class SamplerOutput:
    """Plain tensors, the same on every rank, in batch order. B requests, K speculative tokens."""

    token_ids: Tensor
    """[B, K + 1] int64: each request's new tokens, then -1."""
    num_sampled: Tensor
    """[B] int64: new tokens; 0 where the row failed."""
    num_rejected: Tensor
    """[B] int64: draft tokens refused, or never judged after one that was."""
    num_nans: Tensor
    """[B] int64: NaN logits in the request's rows."""
    failed: Tensor
    """[B] bool: no token was left to choose (all NaN or -inf): its token id is -1."""

    @staticmethod
    def of_verified(result_BW: Tensor) -> "SamplerOutput":
        """The output of a verified step, from what `verify` yields in batch order."""
        sampled_B, rejected_B, nans_B, failed_B = result_BW[:, -VERIFIED_COLUMNS:].unbind(1)
        token_ids = result_BW[:, :-VERIFIED_COLUMNS]
        return SamplerOutput(token_ids, sampled_B, rejected_B, nans_B, failed_B != 0)

    @staticmethod
    def of_drawn(result_BW: Tensor, num_speculative_tokens: int) -> "SamplerOutput":
        """The output of a step with one row a request, from what `draw` yields in batch order."""
        token_B, nans_B, failed_B = result_BW.unbind(1)
        return SamplerOutput(
            token_ids=torch.nn.functional.pad(
                token_B[:, None], (0, num_speculative_tokens), value=-1
            ),
            num_sampled=1 - failed_B,
            num_rejected=torch.zeros_like(token_B),
            num_nans=nans_B,
            failed=failed_B != 0,
        )
