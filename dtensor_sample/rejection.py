"""Verification of draft tokens by rejection sampling.

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
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from dtensor_sample import check, ops
from dtensor_sample.compiled import compiled
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.ops import ONE
from dtensor_sample.output import SamplerOutput
from dtensor_sample.params import Filters, RowParams
from dtensor_sample.plan import ShardPlan, check_plan
from dtensor_sample.process import TokenBitmask, process
from dtensor_sample.profile import profiled
from dtensor_sample.random import COIN, RECOVERY, TARGET, scaled
from dtensor_sample.report import report
from dtensor_sample.state import SamplingState
from dtensor_sample.weigh import Weighed, weigh

METHODS = ("standard", "block")


class Drafts(NamedTuple):
    """Draft tokens of the Q requests here, up to K each: as a grid [Q, K], and the G that exist.

    Scalars of drafts lie in the grid. What is read or written by vocabulary is not: it is listed
    without the places of the grid that no draft takes.
    """

    row_QJ: Tensor
    """[Q, K + 1] int64: the local row of target logits of each place in a request."""
    count_Q: Tensor
    """[Q] int64: rows of each request; 0 for padding."""
    token_QK: Tensor
    """[Q, K] int64: draft tokens; one that is no id of the vocabulary ends the block."""
    place_QK: Tensor
    """[Q, K] int64 in [0, G]: where each draft is listed; G: there is no such draft."""
    row_G: Tensor
    """[G] int64: the local row of target logits that judges a draft; -1 for padding."""
    drawn_QK: Tensor
    """[Q, K] bool: drawn from draft logits; otherwise one-hot."""
    logits: Logits | None
    """Draft logits of the G drafts; row -1 where none were kept. None: all are one-hot."""

    def listed(self, x_QK: Tensor) -> Tensor:
        """Entries of a grid -> [G] those of the drafts; -1 for padding."""
        listed_G = x_QK.new_full((self.row_G.shape[0] + 1,), -1)
        return listed_G.scatter(0, self.place_QK.flatten(), x_QK.flatten())[:-1]

    def grid(self, x_G: Tensor) -> Tensor:
        """The inverse of `listed`: [Q, K], 0 where there is no draft."""
        return pad(x_G, (0, 1))[self.place_QK]


class Places(NamedTuple):
    """Target and draft side by side at G places, of which max(ratio * p - q, 0) is wanted."""

    p: Weighed
    """The target's distributions."""
    q: Weighed
    """The drafts', without tokens where they are one-hot."""
    one_hot_G: Tensor
    """int64, the id of which q is 1; -1 where it was drawn."""
    ratio_G: Tensor
    """int64 in units of 2**-60: what multiplies p."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The leading arguments of the residual ops."""
        p, q = self.p, self.q
        x_MSw, _, rows_G, edits = q.logits
        draft = (x_MSw, rows_G, edits, q.peak_R, q.floor_R, q.scale_R, q.total_R)
        return (*p.args, p.total_R, self.ratio_G, *draft, self.one_hot_G)

    def spare(self, where: Exchange, V: int) -> Tensor:
        """[G, P, PARTS] int64: the residual mass of each part of the vocabulary."""
        return where.segments(ops.residual_mass(*self.args, V))

    def at(self, index_Q: Tensor, wanted_Q: Tensor) -> "Places":
        """Place `index` for each of Q where it is wanted, one without tokens elsewhere."""
        p, q = (row.at(index_Q, wanted_Q) for row in (self.p, self.q))
        return Places(p, q, self.one_hot_G[index_Q], self.ratio_G[index_Q])


@profiled("verify")
def verify(
    target: Logits,
    drafts: Drafts,
    params: RowParams,
    position_R: Tensor,
    filters: Filters,
    where: Exchange,
    V: int,
    method: str,
) -> tuple[Tensor, Weighed]:
    """Verify the drafts of Q requests, and draw the token after them.

    Returns:
        [Q, K + 5] int64: K + 1 tokens or -1, then num_sampled, num_rejected, NaN logits, failed;
        and the target's distributions.
    """
    row_QJ, count_Q, token_QK = drafts[:3]
    step_J = torch.arange(row_QJ.shape[1], device=row_QJ.device)
    p = weigh(target, params, filters, where, V)
    argmax_QJ = p.argmax_R[row_QJ]

    # A block ends at the first draft that is no token, or whose p has none. Greedy requests accept
    # what they would have taken themselves.
    usable_QK = (token_QK >= 0) & (token_QK < V) & (step_J[1:] < count_Q[:, None])
    usable_QK &= argmax_QJ[:, :-1] >= 0
    accepted_Q = _leading(usable_QK & (token_QK == argmax_QJ[:, :-1]))
    token_Q = argmax_QJ.gather(1, accepted_Q[:, None])[:, 0]
    if filters.drawn:
        shape = (params, position_R, filters, where, V)
        drawn_Q2 = _judge(p, drafts, usable_QK, *shape, method)
        greedy_Q = params.greedy[row_QJ[:, 0]]
        accepted_Q = torch.where(greedy_Q, accepted_Q, drawn_Q2[:, 0])
        token_Q = torch.where(greedy_Q, token_Q, drawn_Q2[:, 1])

    tokens_QJ = torch.where(step_J < accepted_Q[:, None], pad(token_QK, (0, 1), value=-1), -1)
    tokens_QJ = torch.where(step_J == accepted_Q[:, None], token_Q[:, None], tokens_QJ)
    nans_Q = (p.nans_R[row_QJ] * (step_J < count_Q[:, None])).sum(1)
    failed_Q = (argmax_QJ.gather(1, accepted_Q[:, None])[:, 0] < 0).to(torch.int64)
    counts = (accepted_Q + 1 - failed_Q, count_Q - 1 - accepted_Q, nans_Q, failed_Q)
    return torch.cat([tokens_QJ, torch.stack(counts, 1)], 1), p


def _judge(
    p: Weighed,
    drafts: Drafts,
    usable_QK: Tensor,
    params: RowParams,
    position_R: Tensor,
    filters: Filters,
    where: Exchange,
    V: int,
    method: str,
) -> Tensor:
    """Judge the drafts of requests that are not greedy by coins, and draw what follows them.

    Returns:
        [Q, 2] int64: how many drafts are accepted, and the token after them (-1 if it is not here).
    """
    row_QJ = drafts.row_QJ
    Q, K = drafts.token_QK.shape
    start_Q, seed_Q, greedy_Q = (x[row_QJ[:, 0]] for x in (position_R, params.seed, params.greedy))
    first_Q = torch.zeros_like(start_Q)
    if drafts.row_G.shape[0] == 0:
        whole = p.at(row_QJ[:, 0], ~greedy_Q)
        uniform_Q = ops.uniform(seed_Q, start_Q, first_Q, TARGET)
        return torch.stack([first_Q, whole.pick(uniform_Q, where, V)], 1)

    # How many drafts can be accepted at all, and how many are.
    usable_QK = usable_QK & ~greedy_Q[:, None]
    places, p_QK, q_QK, usable_QK = _compare(p, drafts, usable_QK, params, filters, where, V)
    limit_Q = _leading(usable_QK)
    step_QK = torch.arange(K, device=row_QJ.device).expand(Q, K)
    counter_3QK = (x.expand(Q, K).flatten() for x in (seed_Q[:, None], start_Q[:, None], step_QK))
    coin_QK = ops.uniform(*counter_3QK, COIN).view(Q, K)
    if method == "block":
        joint_QK = ops.chain(p_QK, q_QK)
        ratio_QK = pad(joint_QK[:, :-1], (1, 0), value=ONE)
        places = places._replace(ratio_G=drafts.listed(ratio_QK))
        spare_GPC = places.spare(where, V)
        spare_QK = drafts.grid(spare_GPC.sum((1, 2)))
        accepted_Q = _longest_prefix(joint_QK, spare_QK, coin_QK, limit_Q)
    else:
        accepted_Q = torch.minimum(_leading(scaled(coin_QK, q_QK) < p_QK), limit_Q)

    # The token after them: from what the refused draft leaves of p, or else from p.
    end_Q = row_QJ.gather(1, accepted_Q[:, None])[:, 0]
    refused_Q = accepted_Q < limit_Q
    place_Q = drafts.place_QK.gather(1, accepted_Q[:, None].clamp(max=K - 1))[:, 0]
    place_Q = place_Q.clamp(max=drafts.row_G.shape[0] - 1)
    refused = places.at(place_Q, refused_Q)
    spare_QPC = spare_GPC[place_Q] if method == "block" else refused.spare(where, V)
    recover_Q = refused_Q & (spare_QPC.sum((1, 2)) > 0)
    counter = (seed_Q, start_Q + accepted_Q, first_Q)
    uniform_Q = torch.where(
        refused_Q, ops.uniform(*counter, RECOVERY), ops.uniform(*counter, TARGET)
    )
    drawn_Q = p.at(end_Q, ~recover_Q & ~greedy_Q).pick(uniform_Q, where, V)
    start_QPC, point_Q = ops.aim(spare_QPC, uniform_Q)
    recovered_Q = ops.residual_pick(*refused.args, where.own_segments(start_QPC), point_Q, V)
    return torch.stack([accepted_Q, torch.where(recover_Q, recovered_Q, drawn_Q)], 1)


def _compare(
    p: Weighed,
    drafts: Drafts,
    usable_QK: Tensor,
    params: RowParams,
    filters: Filters,
    where: Exchange,
    V: int,
) -> tuple[Places, Tensor, Tensor, Tensor]:
    """What decides about drafts, apart from coins.

    Returns:
        The G places, with ratios of 1; [Q, K] the probabilities of the drafted tokens under p and
        under q, in units of 2**-60; and [Q, K] which drafts are usable, now that q is known.
    """
    row_G, token_G = drafts.row_G.clamp(min=0), drafts.listed(drafts.token_QK)
    p_G = p.at(row_G, drafts.listed(usable_QK.to(torch.int64)) > 0)
    if drafts.logits is None:
        x_NSv, first_id_S = p.logits[:2]
        nothing = Logits(x_NSv[:1, :1, :1], first_id_S[:1], torch.full_like(row_G, -1))
        q_G = p_G._replace(logits=nothing, mass_RPC=torch.zeros_like(p_G.mass_RPC))
        one_hot_G = token_G
        weight_G = where.total(ops.lookup(*p_G.args, token_G, V))
        q_QK = torch.full_like(drafts.token_QK, ONE)
    else:
        q_G = weigh(drafts.logits, params.at(row_G), filters, where, V)
        one_hot_G = torch.where(drafts.listed(drafts.drawn_QK.to(torch.int64)) > 0, -1, token_G)
        mine_G2 = torch.stack([ops.lookup(*row.args, token_G, V) for row in (p_G, q_G)], 1)
        weight_G, draft_weight_G = where.total(mine_G2).unbind(1)
        q_QK = drafts.grid(ops.probability(draft_weight_G, q_G.total_R))
        q_QK = torch.where(drafts.drawn_QK, q_QK, ONE)
        usable_QK = usable_QK & (~drafts.drawn_QK | (drafts.grid(q_G.total_R) > 0))
    p_QK = drafts.grid(ops.probability(weight_G, p_G.total_R))
    places = Places(p_G, q_G, one_hot_G, torch.full_like(token_G, ONE))
    return places, p_QK, q_QK, usable_QK


def _longest_prefix(joint_QK: Tensor, spare_QK: Tensor, coin_QK: Tensor, limit_Q: Tensor) -> Tensor:
    """[Q] int64: the length of the longest prefix that passes in block verification.

    The prefix of the first i drafts passes with probability s / (s + 1 - r) for its joint ratio r
    and the residual mass s of the place after it, and with r where there is no such place.

    Args:
        joint_QK: [Q, K] int64, joint ratios of the prefixes, in units of 2**-60.
        spare_QK: [Q, K] int64, residual masses of all places, in the same units.
        coin_QK: [Q, K] int64 in [0, 2**62).
        limit_Q: [Q] int64, the longest prefix that may pass.
    """
    length_K = torch.arange(1, joint_QK.shape[1] + 1, device=joint_QK.device)
    after_QK = pad(spare_QK[:, 1:], (0, 1))
    whole_QK = after_QK + (ONE - joint_QK)
    within_QK = (scaled(coin_QK, whole_QK) < after_QK) | (whole_QK == 0)
    at_end_QK = scaled(coin_QK, torch.full_like(joint_QK, ONE)) < joint_QK
    passed_QK = torch.where(length_K == limit_Q[:, None], at_end_QK, within_QK)
    passed_QK &= length_K <= limit_Q[:, None]
    return (passed_QK * length_K).amax(1)


def _leading(passed_QK: Tensor) -> Tensor:
    """[Q] int64: how many entries pass before the first that does not."""
    return passed_QK.to(torch.int64).cumprod(1).sum(1)


class RejectionSampler:
    """Verifies the draft tokens of each request of a plan and draws the token after them.

    Args:
        state: built with num_speculative_tokens >= 1.
        method: "standard" or "block"; block verification accepts at least as many in expectation.
        compile: run `verify` under torch.compile.
    """

    def __init__(
        self, state: SamplingState, *, method: str = "block", compile: bool = False
    ) -> None:
        check.instance("state", state, SamplingState)
        check.one_of("method", method, METHODS)
        if state.num_speculative_tokens == 0:
            raise ValueError("state must have num_speculative_tokens >= 1 to verify drafts, got 0")
        self.state, self.method = state, method
        self.compiled = check.instance("compile", compile, bool)
        self._verify = compiled("verify", verify) if compile else verify

    def __call__(
        self,
        logits: Tensor,
        plan: ShardPlan,
        draft_token_ids: Tensor | Sequence[Sequence[int]],
        *,
        one_hot: Sequence[bool] | None = None,
        mask: TokenBitmask | None = None,
    ) -> SamplerOutput:
        """Tokens for the logits of the rows that `plan.select` gave; every rank must call this.

        Args:
            logits: DTensor [num_rows, V]: row j of a request is p of the token after its draft j.
            plan: a request with k drafts has k + 1 rows, and drafts beyond those are not
                judged; made after its drafts were drawn. With a budget, one that drafts were
                admitted to: those that were not are as if there were none.
            draft_token_ids: [B, K] int64, the same on every rank; as nested lists, some may be
                shorter. The first id outside the vocabulary (-1) ends a request's block as if it
                had no more drafts, and so does the first whose draft logits were not kept.
            one_hot: [B] on the host, whether each request's drafts were chosen rather than drawn.
                By default those are drawn that `DraftSampler` drew since the last step.
            mask: what a grammar allows in each row.

        Returns:
            In batch order, with num_rejected = rows - 1 - accepted. The drafts that the state kept
            are used up, and its positions advance by num_sampled.

        Raises:
            ValueError: names the argument; before any collective, and on every rank alike if
                arguments are equal on all; otherwise use debug mode.
        """
        state, plan, error = self.state, check_plan(plan, self.state), None
        drafts_BK, one_hot_B = torch.empty(0), [True]
        try:
            state.drafts.check_columns(logits, plan.slots)
            state.on_host(plan, state.drafts.check)
            drafts_BK = draft_ids(draft_token_ids, plan, state.num_speculative_tokens)
            one_hot_B = self._one_hot(plan, one_hot)
        except ValueError as refused:
            error = refused
        target = plan.place(
            logits,
            state,
            most_rows=state.num_speculative_tokens + 1,
            error=error,
            mask=mask,
            draft_token_ids=drafts_BK,
            one_hot=one_hot_B,
            method=self.method,
        )
        if mask is not None:
            drafts_BK = mask.acceptable(drafts_BK)
        drafts = self._grid(target, plan, drafts_BK, one_hot_B)
        width, count_R = logits.shape[-1], plan.row_offsets
        target = process(target, plan, width, drafts_BK=drafts_BK, count_R=count_R, mask=mask)
        if drafts.logits is not None:
            row_G = drafts.row_G.clamp(min=0)
            drawn_from = process(
                drafts.logits, plan, width, drafts_BK=drafts_BK, count_R=count_R, index_G=row_G
            )
            drafts = drafts._replace(logits=drawn_from)
        filters = plan.filters
        if self.compiled:
            filters = filters.coarse(plan.exchange.whole)
        run = self._verify if plan.slots else verify  # no rows: nothing worth compiling
        result_QW, row = run(
            target,
            drafts,
            *plan.row_params(),
            filters,
            plan.exchange,
            state.vocab_size,
            self.method,
        )
        output = SamplerOutput.of_result(plan.settle(result_QW), state.num_speculative_tokens)
        output = report(output, row, plan)  # before what it tells of has changed counts
        plan.finish(output)
        return output

    def _one_hot(self, plan: ShardPlan, given: Sequence[bool] | None) -> list[bool]:
        """[B]: whether each request's q is its draft tokens themselves."""
        kept = [steps > 0 for steps in plan.draft_steps]
        if given is None:
            return [not drawn for drawn in kept]
        chosen = check.bools("one_hot", given, len(kept))
        for i, (hot, drawn, slot) in enumerate(zip(chosen, kept, plan.slots, strict=True)):
            # One row has no drafts, and greedy requests ask for no q.
            q_matters = plan.num_logits[i] > 1 and not self.state.request(slot).params.greedy
            if q_matters and not (hot or drawn):
                raise ValueError(
                    f"one_hot[{i}] must be True, got False: no draft logits are kept of slot {slot}"
                )
        return [hot or not drawn for hot, drawn in zip(chosen, kept, strict=True)]

    def _grid(
        self, target: Logits, plan: ShardPlan, drafts_BK: Tensor, one_hot_B: list[bool]
    ) -> Drafts:
        """The drafts of the requests here, and where the rows they belong to lie."""
        device, last_row = drafts_BK.device, plan.row_slots.shape[0] - 1
        begin_Q, count_Q = plan.local_cu_num_logits[:-1], plan.local_cu_num_logits.diff()
        step_J = torch.arange(drafts_BK.shape[1] + 1, device=device)
        row_QJ = (begin_Q[:, None] + step_J).clamp(max=last_row)
        request_Q = plan.row_requests[row_QJ[:, 0]]
        # Drafts are listed in the order of rows, the last row of each request left out. The
        # compiler would treat 0 or 1 of them as cases of their own.
        size = plan.draft_capacity
        if self.compiled and plan.slots:
            size = max(size, 2)
        place_QK = (begin_Q - torch.arange(len(begin_Q), device=device))[:, None] + step_J[:-1]
        place_QK = torch.where(step_J[1:] < count_Q[:, None], place_QK, size)
        steps_Q = plan.row_draft_steps[row_QJ[:, 0]]
        if one_hot_B != [steps == 0 for steps in plan.draft_steps]:  # some are not to be read
            one_hot = torch.tensor(one_hot_B).to(device, non_blocking=True)
            steps_Q = steps_Q.masked_fill(one_hot[request_Q], 0)
        drafts = Drafts(
            row_QJ,
            count_Q,
            drafts_BK[request_Q],
            place_QK,
            torch.empty(size, dtype=torch.int64, device=device),
            (steps_Q > 0)[:, None].expand(-1, drafts_BK.shape[1]),
            None,
        )
        drafts = drafts._replace(row_G=drafts.listed(row_QJ[:, :-1]))
        if not all(one_hot_B):
            kept_MSw = self.state.drafts.logits(plan.exchange.name)
            assert kept_MSw is not None
            first_Q = plan.row_draft_rows[row_QJ[:, 0]]
            rows_QK = first_Q[:, None] + step_J[:-1]
            rows_QK = torch.where(step_J[:-1] < steps_Q[:, None], rows_QK, -1)
            logits = Logits(kept_MSw, target.first_id_S[:1], drafts.listed(rows_QK))
            drafts = drafts._replace(logits=logits)
        return drafts


def draft_ids(draft_token_ids: Tensor | Sequence[Sequence[int]], plan: ShardPlan, K: int) -> Tensor:
    """[B, K] int64 draft tokens on the device; ValueError for another shape or dtype."""
    B, drafts = len(plan.batch_slots), draft_token_ids
    if isinstance(drafts, Sequence):
        rows = drafts
        try:
            padded = [[*row, *[-1] * (K - len(row))] for row in drafts]
            drafts = torch.tensor(padded) if padded else torch.empty((0, K), dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(
                f"draft_token_ids must be [{B}, {K}] integers, got {draft_token_ids!r}"
            ) from None
        if any(isinstance(token, bool) for row in rows for token in row):
            raise ValueError(f"draft_token_ids must be integers, got {draft_token_ids!r}")
    if not isinstance(drafts, Tensor) or isinstance(drafts, DTensor):
        raise ValueError(f"draft_token_ids must be a plain tensor, got {type(drafts).__name__}")
    if drafts.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"draft_token_ids must be int64, got {drafts.dtype}")
    if drafts.shape != (B, K):
        raise ValueError(f"draft_token_ids must have shape [{B}, {K}], got {list(drafts.shape)}")
    return drafts.to(plan.state.device, torch.int64, non_blocking=True)
