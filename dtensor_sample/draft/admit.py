"""Adaptive verification: a budget of drafts over the batch goes to those likeliest to be accepted.

Verifying a draft costs the target a row, and a draft is of use only if those before it are
accepted. So of all drafts of a batch the few are verified whose survival, the product of
confidences up to and with their own, is largest. Which rows a step has is then known on the device
alone: `locate` finds them from replicated counts, in shapes that follow from host data, so that
nobody waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BITS = 31
"""Survival is counted in units of 2**-BITS: products fit into 64 bits."""


def best_first(
    confidence_BK: Tensor, draft_BK: Tensor, limit_B: Tensor, budget_1: Tensor, vocab_size: int
) -> Tensor:
    """How many drafts of each request to verify, so that no more than the budget are in all.

    Admitted are the drafts with the largest survival, the product of c up to and with their own;
    ties go to the earlier place in a block, then to the earlier request. What is emitted is still
    distributed as the target's p, jointly over requests: as survival never grows along a block,
    revealing drafts in this order, always the best one whose predecessors are revealed, reveals the
    admitted ones first, and whether a draft is revealed depends on nothing but the drafts revealed
    before it. Admission thus is a stopping rule, and a block that is cut by one emits what p does,
    since drawing one draft more and verifying it leaves the law of what is emitted as it was.

    Survival is an integer, in units of 2**-31 and rounded down, so ranks and devices agree on it.

    Args:
        confidence_BK: [B, K] float32 or float64, the predicted probability c that a draft is
            accepted if those before it are; it must be known before that draft is drawn. Clamped to
            [0, 1]; NaN counts as 0.
        draft_BK: [B, K] int64 draft tokens; the first that is no id ends a block, which must be
            known by then as well.
        limit_B: [B] int64, at most so many of each request.
        budget_1: [1] int64, at most so many of all.
        vocab_size: V.

    Returns:
        [B] int64.
    """
    (B, K), device = draft_BK.shape, draft_BK.device
    part_BK = confidence_BK.double().nan_to_num(0.0).clamp(0.0, 1.0)
    survivals = list((part_BK * (1 << BITS)).to(torch.int64).unbind(1))
    for i in range(1, K):
        survivals[i] = survivals[i - 1] * survivals[i] >> BITS
    there_BK = (draft_BK >= 0) & (draft_BK < vocab_size)
    there_BK &= torch.arange(K, device=device) < limit_B[:, None]
    # In the order of ties: place by place, and request by request within each.
    there_KB = there_BK.t().cumprod(0) > 0
    survival_N = torch.where(there_KB, torch.stack(survivals), -1).flatten()
    order_N = survival_N.neg().sort(stable=True).indices
    rank_N = torch.empty_like(order_N).scatter(0, order_N, torch.arange(K * B, device=device))
    return ((rank_N < budget_1) & (survival_N >= 0)).view(K, B).sum(0)


class Lanes(NamedTuple):
    """What a plan with a budget knows on the device about its L requests, padding included."""

    limit_L: Tensor
    """int64, at most so many drafts of each; -1 for padding."""
    hidden_L: Tensor
    """int64, where its hidden rows begin; -1: right after those of the request before."""
    draft_row_L: Tensor
    """int64, the row of the draft cache for draft 0 of each; -1: none."""
    draft_steps_L: Tensor
    """int64, how many of its draft tokens have their logits kept."""
    owned_HQ: Tensor
    """[holders * Q] int64, each holder's requests in batch order, then -1."""
    budget_1: Tensor
    """[1] int64."""

    @staticmethod
    def unpacked(packed: Tensor, lanes: int) -> "Lanes":
        """Of one tensor that has one after another."""
        return Lanes(*packed.split([lanes] * 4 + [len(packed) - 4 * lanes - 1, 1]))

    def clamped(self, counts_L: Tensor) -> Tensor:
        """Counts within limits and, from the first request on, within the budget."""
        counts_L = counts_L.clamp(min=0).minimum(self.limit_L.clamp(min=0))
        within_L = counts_L.cumsum(0).minimum(self.budget_1)
        return within_L.diff(prepend=torch.zeros_like(self.budget_1))

    def rows(self, counts_L: Tensor) -> Tensor:
        """[L] int64 rows of each request; none of padding."""
        return counts_L + (self.limit_L >= 0)


class Located(NamedTuple):
    """Where the rows of requests lie, C of each holder."""

    cu_HQ: Tensor
    """[holders, Q + 1] int64: where rows of each of a holder's requests begin; the end repeats."""
    request_HC: Tensor
    """[holders, C] int64: whose row it is; of padding, the first request."""
    offset_HC: Tensor
    """[holders, C] int64: its place in the request; of padding, 0."""
    real_HC: Tensor
    """[holders, C] bool: whether it is no padding."""


def locate(rows_L: Tensor, owned_HQ: Tensor, capacity: int) -> Located:
    """List the rows of requests holder after holder, padded to a capacity that holds them.

    As `BatchSharder` does on the host, which knows how many there are.

    Args:
        rows_L: [L] int64 rows of each request.
        owned_HQ: [holders, Q] int64 the requests of each holder, in order, then -1.
        capacity: C.
    """
    own_HQ = torch.where(owned_HQ >= 0, rows_L[owned_HQ.clamp(min=0)], 0)
    cu_HQ = pad(own_HQ.cumsum(1), (1, 0))
    place_C = torch.arange(capacity, device=rows_L.device)
    place_HC = place_C.expand(len(owned_HQ), -1).contiguous()
    at_HC = torch.searchsorted(cu_HQ[:, 1:].contiguous(), place_HC, right=True)
    real_HC = place_HC < cu_HQ[:, -1:]
    at_HC = torch.where(real_HC, at_HC, 0)
    request_HC = torch.where(real_HC, owned_HQ.gather(1, at_HC), 0)
    return Located(
        cu_HQ, request_HC, torch.where(real_HC, place_HC - cu_HQ.gather(1, at_HC), 0), real_HC
    )


def packed_lanes(
    lanes: int,
    budget: int,
    owned: Sequence[Sequence[int]],
    width: int,
    columns: Sequence[tuple[np.ndarray, int]],
) -> np.ndarray:
    """[4 * L + holders * Q + 1] int64: `Lanes`, one after another.

    Args:
        lanes: L.
        budget: of the batch.
        owned: the requests of each holder.
        width: Q.
        columns: [B] what `Lanes` has of each request, and what it has of padding.
    """
    filled = [np.pad(own_B, (0, lanes - len(own_B)), constant_values=n) for own_B, n in columns]
    rows = [[*own, *[-1] * (width - len(own))] for own in owned]
    grid = np.array(rows, dtype=np.int64).flatten()
    return np.concatenate([*filled, grid, [budget]]).astype(np.int64)
