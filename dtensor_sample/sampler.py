"""Sampling one token a row: the whole flow, written once for every place the vocabulary may lie."""

import torch
from torch import Tensor

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


@profiled("draw")
def draw(
    logits: Logits, params: RowParams, uniform_R: Tensor, filters: Filters, where: Exchange, V: int
) -> tuple[Tensor, Weighed]:
    """Draw a token from each row.

    Returns:
        [R, 3] int64: token id (-1: none is left, or it lies on another rank), NaN logits, failed;
        and what it was drawn from.
    """
    row = weigh(logits, params, filters, where, V)
    picked_R = row.pick(uniform_R, where, V) if filters.drawn else row.argmax_R
    drawn_R3: Tensor = ops.answer(picked_R, row.argmax_R, row.nans_R, params.greedy)
    return drawn_R3, row


class Sampler:
    """Draws one token for each request of a plan; `compile` runs `draw` under torch.compile."""

    def __init__(self, state: SamplingState, *, compile: bool = False) -> None:
        self.state = check.instance("state", state, SamplingState)
        self.compiled = check.instance("compile", compile, bool)
        self._draw = compiled("draw", draw) if compile else draw

    def __call__(
        self, logits: Tensor, plan: ShardPlan, *, mask: TokenBitmask | None = None
    ) -> SamplerOutput:
        """Tokens of selected rows from logits, a DTensor [num_rows, V]; every rank must call this.

        Raises ValueError, before any collective, for a stale plan, or logits or a grammar's mask
        that are not its own.
        """
        return self.gather(self.draw(self.exchange(logits, plan, mask=mask), plan), plan)

    def exchange(
        self, logits: Tensor, plan: ShardPlan, *, mask: TokenBitmask | None = None
    ) -> Logits:
        """The first of three steps: logits [num_rows, V] to where they are sampled."""
        rows = check_plan(plan, self.state).place(logits, self.state, most_rows=1, mask=mask)
        return process(rows, plan, mask=mask)

    def draw(self, rows: Logits, plan: ShardPlan) -> tuple[Tensor, Weighed]:
        """The second: the tokens of the rows here, and what they were drawn from."""
        filters = plan.filters.coarse if self.compiled else plan.filters
        params = plan.row_params()
        first_R = torch.zeros_like(plan.row_offsets)
        uniform_R = ops.uniform(params.seed, plan.row_positions(), first_R, TARGET)
        run = self._draw if plan.slots else draw  # no rows: nothing worth compiling
        return run(rows, params, uniform_R, filters, plan.exchange, self.state.vocab_size)

    def gather(self, drawn: tuple[Tensor, Weighed], plan: ShardPlan) -> SamplerOutput:
        """The third: results to every rank, in batch order; positions advance, drafts are void."""
        (drawn_R3, row), K = drawn, self.state.num_speculative_tokens
        output = SamplerOutput.of_drawn(plan.settle(drawn_R3), K)
        output = report(output, row, plan)  # before what it tells of has changed counts
        plan.finish(output)
        return output
