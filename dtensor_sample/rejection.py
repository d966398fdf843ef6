"""Verification of draft tokens by rejection sampling.

What is emitted is distributed exactly as the target's processed distribution p, whatever the
drafts' q. "standard" is speculative sampling (Leviathan et al., 2023; Chen et al., 2023): draft i
is accepted with probability min(1, p/q), and the first refused one is replaced by a draw from max(p
- q, 0). "block" is block verification (Sun et al., arXiv 2403.10444): the joint ratio of a prefix
decides, and the longest prefix that passes is accepted; in expectation at least as many drafts.
Whether a prefix passes also depends on a sum over the vocabulary, max(ratio * p - q, 0). Most need
not be added up: where the ratio is 1 the prefix passes anyway, where its coin lies above the ratio
it cannot, and those before one that passes decide nothing.

Decisions are integers: probabilities in units of 2**-60 against coins of 62 bits, so that every
layout accepts the same drafts. Requests lie in a grid [Q, K] of draft tokens: draft j of a request
is judged by its row j of target logits and by row j of its drafts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_sample import check, ops
from dtensor_sample.compiled import compiled
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.output import SamplerOutput
from dtensor_sample.params import Filters, RowParams
from dtensor_sample.plan import ShardPlan, check_plan
from dtensor_sample.process import TokenBitmask, process
from dtensor_sample.profile import profiled
from dtensor_sample.random import TARGET
from dtensor_sample.report import report
from dtensor_sample.state import SamplingState
from dtensor_sample.weigh import Weighed, weigh

METHODS = ("standard", "block")


class Drafts(NamedTuple):
    """Draft tokens of the Q requests here, up to K each: as a grid, and as a list of G.

    See `ops.lay_out` for all but the last field.
    """

    row_QJ: Tensor
    count_Q: Tensor
    token_QK: Tensor
    place_QK: Tensor
    drawn_Q: Tensor
    row_G: Tensor
    token_G: Tensor
    one_hot_G: Tensor
    q: Weighed | None
    """What each was drawn from; no tokens where nothing was kept. None: all are one-hot."""

    @property
    def size(self) -> int:
        """G."""
        return self.row_G.shape[0]


class Places(NamedTuple):
    """Target and draft side by side at G places, of which max(ratio * p - q, 0) is wanted."""

    p: Weighed
    """The target's distributions, of all R rows."""
    q: Weighed | None
    """The drafts' at each place, without tokens where they are one-hot; None: all are."""
    row_G: Tensor
    """int64, the row of p at each place; -1 where its draft cannot be judged."""
    total_G: Tensor
    """int64, the weight of that row."""
    one_hot_G: Tensor
    """int64, the id of which q is 1; -1 where it was drawn."""
    ratio_G: Tensor | None = None
    """int64 in units of 2**-60: what multiplies p; None: 1."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The leading arguments of the residual ops."""
        target = (*self.p.args, self.row_G, self.total_G, self.ratio_G)
        if (q := self.q) is None:
            return (*target, None, None, (), None, None, None, None, self.one_hot_G)
        x_MSw, _, rows_G, edits = q.logits
        draft = (x_MSw, rows_G, edits, q.peak_R, q.floor_R, q.scale_R, q.total_R)
        return (*target, *draft, self.one_hot_G)

    def weights(self, token_G: Tensor, where: Exchange, V: int) -> tuple[Tensor, Tensor | None]:
        """[G] int64: the weight of a token of each place under p, and under q if there is one."""
        p_G = ops.lookup(*self.p.args, self.row_G, token_G, V)
        if self.q is None:
            return where.total(p_G), None
        q_G = ops.lookup(*self.q.args, None, token_G, V)
        p_G, q_G = where.totals(p_G, q_G)
        return p_G, q_G

    def spare(self, index_Q: Tensor, where: Exchange, V: int) -> Tensor:
        """[Q, P, PARTS] int64: the residual mass of each part of the vocabulary, at some places."""
        return where.segments(ops.residual_mass(*self.args, index_Q, V))


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
    p = weigh(target, params, filters, where, V)
    judged: tuple[Tensor | None, Tensor | None] = (None, None)
    if filters.drawn:
        judged = _judge(p, drafts, params, position_R, where, V, method)
    grid = (drafts.row_QJ, drafts.count_Q, drafts.token_QK)
    result_QW: Tensor = ops.emit(p.argmax_R, p.nans_R, params.greedy, *grid, *judged)
    return result_QW, p


def _judge(
    p: Weighed,
    drafts: Drafts,
    params: RowParams,
    position_R: Tensor,
    where: Exchange,
    V: int,
    method: str,
) -> tuple[Tensor, Tensor]:
    """Judge the drafts of requests that are not greedy by coins, and draw what follows them.

    Returns:
        [Q] int64 how many drafts are accepted, and [Q] int64 the token after them (-1 if it is not
        here).
    """
    row_QJ, place_QK, G = drafts.row_QJ, drafts.place_QK, drafts.size
    here = where.first_segment
    if G == 0:
        first_Q = row_QJ[:, 0]
        counters = (params.seed[first_Q], position_R[first_Q], torch.zeros_like(first_Q))
        uniform_Q = ops.uniform(*counters, TARGET)
        end_Q = torch.where(params.greedy[first_Q], -1, first_Q)
        token_Q = ops.pick(*p.args, p.mass_RPC, here, end_Q, uniform_Q, V)
        return torch.zeros_like(first_Q), token_Q

    # How many drafts can be accepted at all, and how many are.
    rows = (p.argmax_R, params.greedy, p.mass_RPC)
    row_G, total_G = ops.eligible(*rows, drafts.row_G, drafts.token_G, V)
    places = Places(p, drafts.q, row_G, total_G, drafts.one_hot_G)
    weight_G, draft_weight_G = places.weights(drafts.token_G, where, V)
    draft_total_G = None if drafts.q is None else drafts.q.total_R
    grid, of_rows = (row_QJ, place_QK), (params.seed, position_R)
    target_QK, draft_QK, coin_QK, limit_Q = ops.chances(
        row_G, weight_G, total_G, draft_weight_G, draft_total_G, drafts.drawn_Q, *grid, *of_rows
    )
    joint_QK, spare_GPC = None, None
    if method == "block":
        joint_QK, ratio_G, wanted_G = ops.prefixes(
            target_QK, draft_QK, coin_QK, limit_Q, place_QK, G
        )
        places = places._replace(ratio_G=ratio_G)
        spare_GPC = places.spare(wanted_G, where, V)
    of_drafts = (target_QK, draft_QK, coin_QK, joint_QK, spare_GPC, limit_Q)
    accepted_Q, place_Q, end_Q, uniform_Q = ops.accept(*of_drafts, *grid, *of_rows, params.greedy)

    # The token after them: from what the refused draft leaves of p, or else from p.
    of_places = spare_GPC is not None
    spare = spare_GPC if spare_GPC is not None else places.spare(place_Q, where, V)
    left = (p.mass_RPC, spare, of_places, place_Q, end_Q)
    return accepted_Q, ops.recover(*places.args, *left, here, uniform_Q, V)


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
            draft_token_ids: [B, K] int64 or int32, the same on every rank; as nested lists, some
                may be shorter. The first id outside the vocabulary (-1) ends a request's block as
                if it had no more drafts, and so does the first whose draft logits were not kept.
                Drawn drafts are to be given as they were drawn, which nothing checks: others would
                be judged as if they had been drawn from the logits that are kept.
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
        if drafts.q is not None:
            q_logits = process(
                drafts.q.logits,
                plan,
                width,
                drafts_BK=drafts_BK,
                count_R=count_R,
                index_G=drafts.row_G.clamp(min=0),  # of padding any row
            )
            drafts = drafts._replace(q=drafts.q._replace(logits=q_logits))
        filters = plan.filters
        if self.compiled:
            filters = filters.coarse(plan.exchange.whole)
        run = self._verify if plan.slots else verify  # no rows: nothing worth compiling
        result_QW, row = run(
            target,
            drafts,
            *plan.row_params()[:2],
            filters,
            plan.exchange,
            state.vocab_size,
            self.method,
        )
        output = plan.deliver(result_QW)
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
        # The compiler would treat 0 or 1 drafts as cases of their own.
        size = plan.draft_capacity
        if self.compiled and plan.slots:
            size = max(size, 2)
        one_hot = None
        if one_hot_B != [steps == 0 for steps in plan.draft_steps]:  # some are not to be read
            one_hot = torch.tensor(one_hot_B).to(drafts_BK.device, non_blocking=True)
        of_rows = (plan.row_requests, plan.row_draft_rows, plan.row_draft_steps)
        laid = ops.lay_out(plan.local_cu_num_logits, *of_rows, one_hot, drafts_BK, size)
        row_QJ, count_Q, token_QK, place_QK, drawn_Q, list_4G = laid
        row_G, token_G, one_hot_G, kept_G = list_4G.unbind()
        q = None
        if not all(one_hot_B):
            kept = (plan.exchange.name, target.first_id_S[:1], kept_G)
            q = self.state.drafts.drawn_from(*kept)
        grid = (row_QJ, count_Q, token_QK, place_QK, drawn_Q)
        return Drafts(*grid, row_G, token_G, one_hot_G, q)


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
        raise ValueError(
            f"draft_token_ids must be a plain tensor or nested lists, got {type(drafts).__name__}"
        )
    if drafts.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"draft_token_ids must be int64 or int32, got {drafts.dtype}")
    if drafts.shape != (B, K):
        raise ValueError(f"draft_token_ids must have shape [{B}, {K}], got {list(drafts.shape)}")
    return drafts.to(plan.state.device, torch.int64, non_blocking=True)
