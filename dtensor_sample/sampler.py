"""Sampling one token a row: the whole flow, written once for every place the vocabulary may lie."""

import torch
from torch import Tensor

from dtensor_sample import ops
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.output import SamplerOutput
from dtensor_sample.params import Filters, RowParams
from dtensor_sample.plan import ShardPlan
from dtensor_sample.random import TARGET, scaled
from dtensor_sample.state import SamplingState
from dtensor_sample.threshold import threshold


def draw(
    logits: Logits, table_RC: Tensor, position_R: Tensor, filters: Filters, exchange: Exchange, V: int
) -> Tensor:
    """[R, 3] int64: token id (-1: none is left, or it lies on another rank), NaN logits, failed."""
    params = RowParams.unpack(table_RC)
    peaks_RP, nans_RP = exchange.segments(ops.peak(*logits, V)).unbind(2)
    peak_R, argmax_R = ops.unpack_peak(peaks_RP.amax(1))
    floor_R = threshold(logits, peak_R, params, filters, exchange, V)
    weighed = (*logits, peak_R, floor_R, params.scale)
    mass_RP = exchange.segments(ops.mass(*weighed, V))
    start_RS = exchange.own_segments(mass_RP.cumsum(1) - mass_RP)
    uniform_R = ops.uniform(params.seed, position_R, torch.zeros_like(position_R), TARGET)
    picked_R = ops.pick(*weighed, start_RS, scaled(uniform_R, mass_RP.sum(1)), V)
    token_R = torch.where(params.greedy, argmax_R, picked_R)
    return torch.stack([token_R, nans_RP.sum(1), (argmax_R < 0).to(torch.int64)], 1)


class Sampler:
    """Draws one token for each request of a plan; `compile` runs `draw` under torch.compile."""

    def __init__(self, state: SamplingState, *, compile: bool = False) -> None:
        self.state, self.compiled = state, compile
        self._draw = torch.compile(draw, fullgraph=True, dynamic=True) if compile else draw

    def __call__(self, logits: Tensor, plan: ShardPlan) -> SamplerOutput:
        """Tokens of `plan.select`ed rows' logits; every rank of the axis must call this."""
        return self.gather(self.draw(self.exchange(logits, plan), plan), plan)

    def exchange(self, logits: Tensor, plan: ShardPlan) -> Logits:
        """The first of three steps: logits [num_rows, V] to where they are sampled."""
        return plan.place(logits, self.state, most_rows=1)

    def draw(self, rows: Logits, plan: ShardPlan) -> Tensor:
        """The second: see `draw`."""
        filters = plan.filters.coarse if self.compiled else plan.filters
        table_RC, V = self.state.params_table[plan.row_slots], self.state.vocab_size
        return self._draw(rows, table_RC, plan.row_positions(), filters, plan.exchange, V)

    def gather(self, drawn_RW: Tensor, plan: ShardPlan) -> SamplerOutput:
        """The third: results to every rank, in batch order; positions advance."""
        output = SamplerOutput.of_drawn(plan.settle(drawn_RW), self.state.num_speculative_tokens)
        plan.advance(output.num_sampled)
        return output
