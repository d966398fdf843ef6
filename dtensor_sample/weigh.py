"""The integer weights of rows: what both sampling and verification stand on.

A row's distribution is its logits, the largest of them, the threshold at or above which tokens are
kept, the temperature, and the mass that the kept tokens weigh: a few numbers a row, found in this
order. Weights themselves are never stored; the ops compute them where they read the logits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_sample import ops
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.params import Filters, RowParams
from dtensor_sample.threshold import threshold


class Weighed(NamedTuple):
    """The distributions of R rows."""

    logits: Logits
    """Where the rows are read."""
    peak_R: Tensor
    """float32, the largest value of each row; -inf where it has no token."""
    floor_R: Tensor
    """float32, the value at or above which tokens are kept."""
    scale_R: Tensor
    """float32, log2(e) / temperature."""
    mass_RP: Tensor
    """int64, the weight of each segment of the whole vocabulary, wherever segments lie."""
    argmax_R: Tensor
    """int64, the lowest id of the largest value; -1 where a row has no token."""
    nans_R: Tensor
    """int64, NaN logits of each row."""

    @property
    def args(self) -> tuple[Tensor | None, ...]:
        """The leading arguments of every op that weighs tokens."""
        return (*self.logits, self.peak_R, self.floor_R, self.scale_R)

    @property
    def total_R(self) -> Tensor:
        """int64, the weight of each row: at most 2**62, 0 where it has no token."""
        return self.mass_RP.sum(1)

    def starts(self, where: Exchange) -> Tensor:
        """[R, S] int64: the weight of everything before each of this rank's segments."""
        return where.own_segments(self.mass_RP.cumsum(1) - self.mass_RP)

    def at(self, index_Q: Tensor, wanted_Q: Tensor) -> "Weighed":
        """Row `index` for each of Q where it is wanted, a row without tokens elsewhere."""
        x_NSv, first_id_S, rows_R = self.logits
        row_Q = index_Q if rows_R is None else rows_R[index_Q]
        logits = Logits(x_NSv, first_id_S, torch.where(wanted_Q, row_Q, -1))
        return Weighed(logits, *(field[index_Q] for field in self[1:]))


def weigh(
    logits: Logits, params: RowParams, filters: Filters, where: Exchange, vocab_size: int
) -> Weighed:
    """The distributions of rows under their parameters.

    Args:
        logits: R rows.
        params: of each row.
        filters: which filters any row uses; replicated host data.
        where: the exchange that placed the logits.
        vocab_size: V.
    """
    peaks_RP, nans_RP = where.segments(ops.peak(*logits, vocab_size)).unbind(2)
    peak_R, argmax_R = ops.unpack_peak(peaks_RP.amax(1))
    floor_R = threshold(logits, peak_R, params, filters, where, vocab_size)
    mass_RS = ops.mass(*logits, peak_R, floor_R, params.scale, vocab_size)
    mass_RP = where.segments(mass_RS)
    return Weighed(logits, peak_R, floor_R, params.scale, mass_RP, argmax_R, nans_RP.sum(1))
