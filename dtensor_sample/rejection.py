"""Verification of draft tokens by rejection sampling: the whole flow on one screen.

What is emitted is distributed exactly as the target's processed distribution p, whatever the
drafts' q. "standard" is speculative sampling (Leviathan et al., 2023; Chen et al., 2023): draft i
is accepted with probability min(1, p/q), and the first refused one is replaced by a draw from max(p
- q, 0). "block" is block verification (Sun et al., arXiv 2403.10444): the joint ratio of a prefix
decides, and the longest prefix that passes is accepted; in expectation at least as many drafts.

Decisions are integers: probabilities in units of 2**-60 against coins of 62 bits, so that every
layout accepts the same drafts. Requests lie in a grid [Q, K] of draft tokens: draft j of a request
is judged by its row j of target logits and by row j of its drafts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample import ops
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.ops import ONE
from dtensor_sample.output import SamplerOutput
from dtensor_sample.params import Filters, RowParams
from dtensor_sample.plan import ShardPlan
from dtensor_sample.random import COIN, RECOVERY, TARGET, scaled
from dtensor_sample.state import SamplingState
from dtensor_sample.weigh import Weighed, weigh

METHODS = ("standard", "block")


class Drafts(NamedTuple):
    """Draft tokens of the Q requests here, as a grid [Q, K], and where their rows lie."""

    row_QJ: Tensor
    """[Q, K + 1] int64: the local row of target logits of each place in a request."""
    count_Q: Tensor
    """[Q] int64: rows of each request; 0 for padding."""
    token_QK: Tensor
    """[Q, K] int64: draft tokens; one that is no id of the vocabulary ends the block."""
    drawn_QK: Tensor
    """[Q, K] bool: drawn from draft logits; otherwise one-hot."""
    lost_QK: Tensor
    """[Q, K] bool: said to be drawn, but from logits that were never kept: ends the block."""
    logits: Logits | None
    """Draft logits of the Q * K places, where drawn. None: all are one-hot."""


def verify(
    target: Logits,
    drafts: Drafts,
    params: RowParams,
    position_R: Tensor,
    filters: Filters,
    where: Exchange,
    V: int,
    method: str,
) -> Tensor:
    """[Q, K + 5] int64: K + 1 tokens or -1, then num_sampled, num_rejected, NaN logits, failed."""
    row_QJ, count_Q, token_QK, drawn_QK, lost_QK, draft_logits = drafts
    (Q, J), K, device = row_QJ.shape, row_QJ.shape[1] - 1, row_QJ.device
    step_J = torch.arange(J, device=device)
    usable_QK = (step_J[:-1] < count_Q[:, None] - 1) & (token_QK >= 0) & (token_QK < V) & ~lost_QK

    # The distributions of target and drafts, and the drafted tokens' probabilities under both.
    p = weigh(target, params, filters, where, V)
    row_G, token_G = row_QJ[:, :-1].flatten(), token_QK.flatten()
    params_G = params.at(row_G)
    p_G = p.at(row_G, usable_QK.flatten())
    if draft_logits is None:
        q_G = p_G.at(torch.arange(Q * K, device=device), torch.zeros_like(row_G, dtype=torch.bool))
    else:
        q_G = weigh(draft_logits, params_G, filters, where, V)
    one_hot_G = torch.where(drawn_QK.flatten(), -1, token_G)
    usable_QK &= ((one_hot_G >= 0) | (q_G.total_R > 0)).view(Q, K)
    limit_Q = _leading(usable_QK)
    weight_G, draft_weight_G = (where.total(ops.lookup(*d.args, token_G, V)) for d in (p_G, q_G))
    p_QK = ops.probability(weight_G, p_G.total_R).view(Q, K)
    q_QK = ops.probability(draft_weight_G, q_G.total_R)
    q_QK = torch.where(one_hot_G >= 0, ONE, q_QK).view(Q, K)

    # How many drafts pass.
    start_Q, seed_Q = position_R[row_QJ[:, 0]], params.seed[row_QJ[:, 0]]
    start_G, step_G = start_Q.repeat_interleave(K), step_J[:-1].repeat(Q)
    coin_QK = ops.uniform(params_G.seed, start_G, step_G, COIN).view(Q, K)
    ratio_QK = torch.full_like(p_QK, ONE)  # what multiplies p before each draft
    if method == "block":
        joint_QK = ops.chain(p_QK, q_QK)
        ratio_QK = pad(joint_QK[:, :-1], (1, 0), value=ONE)
        spare_QK = (
            _residual(p_G, q_G, ratio_QK.flatten(), one_hot_G, where, V).sum((1, 2)).view(Q, K)
        )
        spare_QK = pad(spare_QK[:, 1:], (0, 1))  # of the row after each draft
        whole_QK = spare_QK + (ONE - joint_QK)
        within_QK = (scaled(coin_QK, whole_QK) < spare_QK) | (whole_QK == 0)
        at_end_QK = scaled(coin_QK, torch.full_like(joint_QK, ONE)) < joint_QK
        passed_QK = torch.where(step_J[1:] == limit_Q[:, None], at_end_QK, within_QK)
        passed_QK &= step_J[1:] <= limit_Q[:, None]
        accepted_Q = (passed_QK * step_J[1:]).amax(1)
    else:
        accepted_Q = _leading(usable_QK & (scaled(coin_QK, q_QK) < p_QK))
    greedy_Q = params.greedy[row_QJ[:, 0]]
    agreeing_QK = usable_QK & (token_QK == p.argmax_R[row_QJ[:, :-1]])
    accepted_Q = torch.where(greedy_Q, _leading(agreeing_QK), accepted_Q)

    # The token after them: from what the refused draft leaves of p, or else from p.
    end_Q = row_QJ.gather(1, accepted_Q[:, None])[:, 0]
    place_Q = torch.arange(Q, device=device) * K + accepted_Q.clamp(max=K - 1)
    refused_Q = accepted_Q < limit_Q
    recover_Q = refused_Q & ~greedy_Q
    p_Q, q_Q = p.at(end_Q, recover_Q), q_G.at(place_Q, recover_Q)
    ends = (p_Q, q_Q, ratio_QK.flatten()[place_Q], one_hot_G[place_Q])
    spare_QPC = _residual(*ends, where, V)
    recover_Q &= spare_QPC.sum((1, 2)) > 0
    position_Q, zero_Q = start_Q + accepted_Q, torch.zeros_like(start_Q)
    uniform_Q = torch.where(
        refused_Q,
        ops.uniform(seed_Q, position_Q, zero_Q, RECOVERY),
        ops.uniform(seed_Q, position_Q, zero_Q, TARGET),
    )
    whole_Q = p.at(end_Q, ~recover_Q & ~greedy_Q)
    drawn_Q = ops.pick(*whole_Q.args, *whole_Q.aim(uniform_Q, where), V)
    start_QPC, point_Q = ops.aim(spare_QPC, uniform_Q)
    recovered_Q = ops.residual_pick(
        *_residual_args(*ends), where.own_segments(start_QPC), point_Q, V
    )
    token_Q = torch.where(recover_Q, recovered_Q, drawn_Q)
    token_Q = torch.where(greedy_Q, p.argmax_R[end_Q], token_Q)

    tokens_QJ = torch.where(step_J < accepted_Q[:, None], pad(token_QK, (0, 1), value=-1), -1)
    tokens_QJ = torch.where(step_J == accepted_Q[:, None], token_Q[:, None], tokens_QJ)
    nans_Q = (p.nans_R[row_QJ] * (step_J < count_Q[:, None])).sum(1)
    failed_Q = (p.argmax_R[end_Q] < 0).to(torch.int64)
    counts = (accepted_Q + 1 - failed_Q, count_Q - 1 - accepted_Q, nans_Q, failed_Q)
    return torch.cat([tokens_QJ, torch.stack(counts, 1)], 1)


def _leading(passed_QK: Tensor) -> Tensor:
    """[Q] int64: how many entries pass before the first that does not."""
    return passed_QK.to(torch.int64).cumprod(1).sum(1)


def _residual_args(p: Weighed, q: Weighed, ratio_R: Tensor, one_hot_R: Tensor) -> tuple[Any, ...]:
    draft = (q.logits.x_NSv, q.logits.rows_R, q.peak_R, q.floor_R, q.scale_R, q.total_R)
    return (*p.args, p.total_R, ratio_R, *draft, one_hot_R)


def _residual(
    p: Weighed, q: Weighed, ratio_R: Tensor, one_hot_R: Tensor, where: Exchange, V: int
) -> Tensor:
    """[R, P, PARTS] int64: the mass of max(ratio * p - q, 0) in each part of the vocabulary."""
    return where.segments(ops.residual_mass(*_residual_args(p, q, ratio_R, one_hot_R), V))


class RejectionSampler:
    """Verifies the draft tokens of each request of a plan and draws the token after them.

    Args:
        state: built with num_speculative_tokens >= 1.
        method: "standard" or "block"; block verification accepts at least as many in expectation.
    """

    def __init__(self, state: SamplingState, *, method: str = "block") -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {method!r}")
        if state.num_speculative_tokens == 0:
            raise ValueError("state must have num_speculative_tokens >= 1 to verify drafts, got 0")
        self.state, self.method = state, method

    def __call__(
        self,
        logits: Tensor,
        plan: ShardPlan,
        draft_token_ids: Tensor | Sequence[Sequence[int]],
        *,
        one_hot: Sequence[bool] | None = None,
    ) -> SamplerOutput:
        """Tokens of `plan.select`ed rows' logits; every rank of the axis must call this.

        Args:
            logits: DTensor [num_rows, V]: row j of a request is p of the token after its draft j.
            plan: a request with k drafts has k + 1 rows; made after its drafts were drawn.
            draft_token_ids: [B, K] int64, the same on every rank. The first id outside the
                vocabulary (-1) ends a request's block as if it had no more drafts.
            one_hot: [B], whether each request's drafts were chosen rather than drawn. By default
                those are drawn that `DraftSampler` drew since the last verification.

        Returns:
            In batch order, with num_rejected = rows - 1 - accepted. The drafts that the state kept
            are used up, and its positions advance by num_sampled.

        Raises:
            ValueError: names the argument; on every rank alike, before any collective.
        """
        state, K = self.state, self.state.num_speculative_tokens
        drafts_BK = draft_ids(draft_token_ids, len(plan.slots), K, state.device)
        state.drafts.check(plan)
        first_rows = state.drafts.first_rows(plan.slots)
        if one_hot is not None:
            if len(one_hot) != len(plan.slots):
                raise ValueError(f"one_hot must have {len(plan.slots)} entries, got {len(one_hot)}")
            first_rows = [-1 if hot else row for row, hot in zip(first_rows, one_hot, strict=True)]
        steps = [state.drafts.steps(slot) for slot in plan.slots]
        target = plan.place(logits, state, most_rows=K + 1)
        result_QW = verify(
            target,
            self._grid(target, plan, drafts_BK, first_rows, steps),
            plan.row_params(),
            plan.row_positions(),
            plan.filters,
            plan.exchange,
            state.vocab_size,
            self.method,
        )
        state.drafts.forget(plan.slots)
        output = SamplerOutput.of_verified(plan.settle(result_QW))
        plan.advance(output.num_sampled)
        return output

    def _grid(
        self,
        target: Logits,
        plan: ShardPlan,
        drafts_BK: Tensor,
        first_rows: list[int],
        steps: list[int],
    ) -> Drafts:
        """The drafts of the requests here, and where the rows they belong to lie."""
        device, last_row = drafts_BK.device, plan.row_slots.shape[0] - 1
        begin_Q, count_Q = plan.local_cu_num_logits[:-1], plan.local_cu_num_logits.diff()
        step_J = torch.arange(drafts_BK.shape[1] + 1, device=device)
        row_QJ = (begin_Q[:, None] + step_J).clamp(max=last_row)
        request_Q = plan.row_requests[row_QJ[:, 0]]
        kept_B2 = torch.tensor([first_rows, steps]).T.to(device, non_blocking=True)
        first_Q, steps_Q = kept_B2[request_Q].unbind(1)
        drawn_QK = (first_Q >= 0)[:, None].expand(-1, drafts_BK.shape[1])
        lost_QK = drawn_QK & (step_J[:-1] >= steps_Q[:, None])
        logits = None
        if self.state.drafts.logits_MSw is not None and max(first_rows, default=-1) >= 0:
            rows_QK = torch.where(drawn_QK & ~lost_QK, first_Q[:, None] + step_J[:-1], -1)
            logits = Logits(self.state.drafts.logits_MSw, target.first_id_S[:1], rows_QK.flatten())
        return Drafts(row_QJ, count_Q, drafts_BK[request_Q], drawn_QK, lost_QK, logits)


def draft_ids(
    draft_token_ids: Tensor | Sequence[Sequence[int]], B: int, K: int, device: torch.device
) -> Tensor:
    """[B, K] int64 draft tokens on the device; ValueError for another shape or dtype."""
    try:
        drafts = torch.as_tensor(draft_token_ids)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"draft_token_ids must be integers, got {draft_token_ids!r}") from None
    if drafts.dtype not in (torch.int64, torch.int32) and drafts.numel():
        raise ValueError(f"draft_token_ids must be int64, got {drafts.dtype}")
    if drafts.shape != (B, K):
        raise ValueError(f"draft_token_ids must have shape [{B}, {K}], got {list(drafts.shape)}")
    return drafts.to(device, torch.int64, non_blocking=True)
