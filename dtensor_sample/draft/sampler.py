"""Drawing draft tokens, and keeping what they were drawn from."""

from functools import partial

import torch
from torch import Tensor

from dtensor_sample import check
from dtensor_sample.params import filters_of
from dtensor_sample.plan import ShardPlan, check_plan
from dtensor_sample.process import process
from dtensor_sample.random import DRAFT
from dtensor_sample.sampler import draw
from dtensor_sample.state import SamplingState


class DraftSampler:
    """Draws one draft token a request from a draft model's logits.

    A request's own temperature and filters shape the draft's distribution q, and q is what
    verification divides by. The logits go to the cache that the state owns. Greedy draws, of all
    requests or of greedy ones, need no cache: their q is one token.

    Args:
        state: built with num_speculative_tokens >= 1.
        greedy: take the largest logit for every request.
    """

    def __init__(self, state: SamplingState, *, greedy: bool = False) -> None:
        check.instance("state", state, SamplingState)
        if state.num_speculative_tokens == 0:
            raise ValueError("state must have num_speculative_tokens >= 1 to draft, got 0")
        self.state, self.greedy = state, check.instance("greedy", greedy, bool)
        if not greedy:
            state.expect_drafts()

    def __call__(self, draft_logits: Tensor, plan: ShardPlan, *, step: int) -> Tensor:
        """Draw draft token `step` of each request; every rank of the axis must call this.

        Args:
            draft_logits: DTensor [num_rows, V], one row a request, in the plan's order; of one
                dtype over the life of the state, and under `vocab` padded as the target's are, and
                no wider than the first.
            plan: of one row a request. Positions do not advance: all drafts of a block are keyed by
                the position of its first token and by their step.
            step: in [0, K); 0 begins a new block. Drafts of a block are all drawn or all greedy.

        Returns:
            [B] int64 plain tensor in batch order, the same on every rank; -1 where no token is
            left, which ends the block there.

        Raises:
            ValueError: names the argument; before any collective, and on every rank alike if
                arguments are equal on all; otherwise use debug mode.
        """
        state, plan, error = self.state, check_plan(plan, self.state), None
        try:
            step = check.integer("step", step, 0, state.num_speculative_tokens - 1)
            state.drafts.check_columns(draft_logits, plan.slots)
            state.on_host(plan, partial(self._check, step=step))
            if any(self._drawn(plan)):
                state.drafts.check_logits(draft_logits, plan.exchange)
        except ValueError as refused:
            error = refused
        rows = plan.place(
            draft_logits, state, most_rows=1, error=error, step=step, greedy=self.greedy
        )
        step_R = torch.full_like(plan.row_slots, step)
        width, drafts_BK = draft_logits.shape[-1], state.slot_edits.drafted(plan)
        edited = process(rows, plan, width, drafts_BK=drafts_BK, count_R=step_R)
        (params, _, uniform_R), filters = plan.row_params(DRAFT, step), plan.filters
        if self.greedy:
            params = params._replace(greedy=torch.ones_like(params.greedy))
            filters = filters_of([])
        drawn_R5, row = draw(edited, params, uniform_R, filters, plan.exchange, state.vocab_size)
        if filters.drawn:
            first_R = plan.row_draft_rows
            state.drafts.write(rows, row, first_R, step, params.greedy, plan.exchange, width)
        token_B = plan.settle(drawn_R5)[:, 0]
        state.slot_edits.remember(plan, token_B, step)
        state.on_host(plan, partial(self._keep, step=step))  # now that they are
        return token_B

    def _drawn(self, plan: ShardPlan) -> list[bool]:
        """[B] whether each request's draft is drawn, and not chosen."""
        return [not (self.greedy or request.params.greedy) for request in plan.requests]

    def _check(self, plan: ShardPlan, step: int) -> None:
        self.state.drafts.check_step(plan, step, self._drawn(plan))

    def _keep(self, plan: ShardPlan, step: int) -> None:
        self.state.drafts.keep(plan, step, self._drawn(plan))
