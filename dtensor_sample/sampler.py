"""Sampling one token a row: the whole flow, written once for every place the vocabulary may lie."""

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
        [R, 5] int64, as `ops.draw` returns it, the token -1 also if it lies on another rank; and
        what it was drawn from.
    """
    row = weigh(logits, params, filters, where, V)
    drawn = (row.mass_RPC, where.first_segment, uniform_R)
    told = (row.argmax_R, row.nans_R, params.greedy)
    drawn_R5: Tensor = ops.draw(*row.args, *drawn, *told, V)
    return drawn_R5, row


class Sampler:
    """Draws one token for each request of a plan.

    A call is three steps, `exchange`, `draw` and `gather`, which may be called one by one, to time
    them or to do something else in between.

    Args:
        state: of the requests.
        compile: run `draw` under torch.compile.

    Raises:
        ValueError: an argument of another type.
    """

    def __init__(self, state: SamplingState, *, compile: bool = False) -> None:
        self.state = check.instance("state", state, SamplingState)
        self.compiled = check.instance("compile", compile, bool)
        self._draw = compiled("draw", draw) if compile else draw

    def __call__(
        self, logits: Tensor, plan: ShardPlan, *, mask: TokenBitmask | None = None
    ) -> SamplerOutput:
        """Draw a token for each request of a plan; every rank of the axis must call this.

        Args:
            logits: DTensor [num_rows, V] (float32, bfloat16, float16), of the rows that
                `plan.select` gave, Shard(-1) or Replicate(). May be padded beyond the state's
                vocab_size: ids from there on are never drawn.
            plan: of one row a request, made since its requests were added.
            mask: what a grammar allows in each row; the same on every rank. None: every id.

        Returns:
            Tokens in batch order, and what was asked to be told of them, the same on every rank.
            Positions of the state advance by num_sampled; drafts that it kept are void.

        Raises:
            ValueError: a plan that is stale, another state's, or of more rows a request, or logits
                or a mask that are not the plan's; before any collective, and on every rank alike if
                arguments are equal on all; otherwise use debug mode.
        """
        return self.gather(self.draw(self.exchange(logits, plan, mask=mask), plan), plan)

    def exchange(
        self, logits: Tensor, plan: ShardPlan, *, mask: TokenBitmask | None = None
    ) -> Logits:
        """The first of three steps: bring logits to where they are sampled.

        Takes, and raises, what a call does. One collective at most.

        Returns:
            The R rows that this rank samples, for `draw` and nothing else. They may be views of
            `logits`, which must not change until `gather` has returned.
        """
        rows = check_plan(plan, self.state).place(logits, self.state, most_rows=1, mask=mask)
        return process(rows, plan, logits.shape[-1], mask=mask)

    def draw(self, rows: Logits, plan: ShardPlan) -> tuple[Tensor, Weighed]:
        """The second: draw tokens of the rows here. Only under "vocab" do ranks communicate.

        Args:
            rows: what `exchange` returned.
            plan: the same one. Neither is checked again.

        Returns:
            [R, 5] int64, for each row that this rank samples, padding too: its token id (-1: none
            is left or, under "vocab", it lies on another rank), how many tokens were sampled and
            rejected, its NaN logits, and 1 if no token was left; and what they were drawn from, for
            `gather` and nothing else.
        """
        filters = plan.filters
        if self.compiled:
            filters = filters.coarse(plan.exchange.whole)
        params, _, uniform_R = plan.row_params(TARGET)
        run = self._draw if plan.slots else draw  # no rows: nothing worth compiling
        return run(rows, params, uniform_R, filters, plan.exchange, self.state.vocab_size)

    def gather(self, drawn: tuple[Tensor, Weighed], plan: ShardPlan) -> SamplerOutput:
        """The third: results to every rank. One collective, more if requests ask to be told things.

        Args:
            drawn: what `draw` returned.
            plan: the same one. Neither is checked again.

        Returns:
            What a call does; positions of the state advance, drafts that it kept are void.
        """
        drawn_R5, row = drawn
        output = plan.deliver(drawn_R5)
        output = report(output, row, plan)  # before what it tells of has changed counts
        plan.finish(output)
        return output
