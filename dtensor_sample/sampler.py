"""Sampling one token a row: the whole flow.

place -> peak -> threshold -> mass -> pick -> settle. `draw` is written once against reductions over the
segments of a vocabulary; where those segments lie is the exchange's business.
"""

import torch
from torch import Tensor

from dtensor_sample import ops
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.layout import layout_of
from dtensor_sample.output import SamplerOutput
from dtensor_sample.params import Filters, RowParams
from dtensor_sample.plan import ShardPlan
from dtensor_sample.random import TARGET, scaled
from dtensor_sample.state import SamplingState
from dtensor_sample.threshold import threshold


def draw(
    logits: Logits,
    params_table: Tensor,
    position_R: Tensor,
    filters: Filters,
    exchange: Exchange,
    vocab_size: int,
) -> Tensor:
    """[R, 3] int64: token id (-1: none is left, or it lies on another rank), NaN logits, failed."""
    params = RowParams.unpack(params_table)
    peaks_RP, nans_RP = exchange.segments(ops.peak(*logits, vocab_size)).unbind(2)
    peak_R, argmax_R = ops.unpack_peak(peaks_RP.amax(1))
    floor_R = threshold(logits, peak_R, params, filters, exchange, vocab_size)
    weighed = (*logits, peak_R, floor_R, params.scale)
    mass_RP = exchange.segments(ops.mass(*weighed, vocab_size))
    start_RS = exchange.own_segments(mass_RP.cumsum(1) - mass_RP)
    first_R = torch.zeros_like(position_R)
    uniform_R = ops.uniform(params.seed, position_R.clamp(min=0), first_R, TARGET)
    picked_R = ops.pick(*weighed, start_RS, scaled(uniform_R, mass_RP.sum(1)), vocab_size)
    token_R = torch.where(params.greedy, argmax_R, picked_R)
    return torch.stack([token_R, nans_RP.sum(1), (argmax_R < 0).to(torch.int64)], 1)


class Sampler:
    """Draws one token for each request of a plan; `compile` runs `draw` under torch.compile."""

    def __init__(self, state: SamplingState, *, compile: bool = False) -> None:
        self.state = state
        self._draw = torch.compile(draw, fullgraph=True) if compile else draw

    def __call__(self, logits: Tensor, plan: ShardPlan) -> SamplerOutput:
        """Tokens of `plan.select`ed rows' logits; every rank of the axis must call this."""
        return self.gather(self.draw(self.exchange(logits, plan), plan), plan)

    def exchange(self, logits: Tensor, plan: ShardPlan) -> Logits:
        """The first of three steps: logits [num_rows, V] to where they are sampled."""
        return plan.place(logits, self.state, most_rows=1)

    def draw(self, rows: Logits, plan: ShardPlan) -> Tensor:
        """The second: see `draw`."""
        params_table, V = self.state.params_table[plan.row_slots], self.state.vocab_size
        return self._draw(rows, params_table, plan.row_positions(), plan.filters, plan.exchange, V)

    def gather(self, drawn_RW: Tensor, plan: ShardPlan) -> SamplerOutput:
        """The third: results to every rank, in batch order; positions advance."""
        output = SamplerOutput.of_drawn(plan.settle(drawn_RW), self.state.num_speculative_tokens)
        plan.advance(output.num_sampled)
        return output
