"""The integer weights of rows: what both sampling and verification stand on.

A row's distribution is its logits, the largest of them, the threshold at or above which tokens are
kept, the temperature, and the mass that the kept tokens weigh: a few numbers a row, found in this
order. Weights themselves are never stored; the ops compute them where they read the logits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_sample import ops
from dtensor_sample.exchange import HERE, Exchange, Logits
from dtensor_sample.ops.define import define
from dtensor_sample.ops.edits import Edits
from dtensor_sample.params import Filters, RowParams
from dtensor_sample.profile import profiled
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
    mass_RPC: Tensor
    """int64, the weight of each part of the whole vocabulary, wherever its segments lie, of rows
    that are drawn; without parts if no request draws."""
    argmax_R: Tensor
    """int64, the lowest id of the largest value; -1 where a row has no token."""
    nans_R: Tensor
    """int64, NaN logits of each row."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The leading arguments of every op that weighs tokens."""
        return (*self.logits, self.peak_R, self.floor_R, self.scale_R)

    @property
    def total_R(self) -> Tensor:
        """int64, the weight of each row: at most 2**62, 0 where it has no token."""
        mass_RG = self.mass_RPC.flatten(1)
        # Of draft logits the sum of all parts is kept.
        return mass_RG[:, 0] if mass_RG.shape[1] == 1 else mass_RG.sum(1)

    def read(self, ids_RI: Tensor, where: Exchange, vocab_size: int) -> Tensor:
        """[R, I] float32 values of tokens, wherever they lie; -inf of what is no token."""
        found_RI = where.total(ops.read(*self.logits, ids_RI, vocab_size))
        return ops.unpack_read(found_RI)

    def at(self, index_Q: Tensor, wanted_Q: Tensor | None = None) -> "Weighed":
        """Row `index` for each of Q where it is wanted and not -1, a row without tokens elsewhere.

        `wanted_Q`: [Q] bool; None: all are.
        """
        x_NSv, first_id_S, rows_R, edits = self.logits
        row_Q, *fields = ops.take(index_Q, wanted_Q, rows_R, *self[1:])
        own = Edits(*edits).at(index_Q) if edits else ()
        return Weighed(Logits(x_NSv, first_id_S, row_Q, own), *fields)


@profiled("threshold")
def weigh(
    logits: Logits, params: RowParams, filters: Filters, where: Exchange, vocab_size: int
) -> Weighed:
    """The distributions of rows under their parameters.

    Args:
        logits: R rows.
        params: of each row.
        filters: what any row needs; replicated host data.
        where: the exchange that placed the logits.
        vocab_size: V.
    """
    shape = (params.scale, params.min_p, params.top_k, params.top_p)
    if where.whole and filters.drawn:
        used = filters.top_k, filters.top_p, filters.top_p_alone
        found = whole(*logits, *shape, *used, vocab_size)
    else:
        found = _stages(logits, *shape, filters, where, vocab_size)
    peak_R, floor_R, mass_RPC, argmax_R, nans_R = found
    return Weighed(logits, peak_R, floor_R, params.scale, mass_RPC, argmax_R, nans_R)


def _stages(
    logits: Logits,
    scale_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    filters: Filters,
    where: Exchange,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `Weighed` holds of rows, one small exchange after another."""
    wanted = (scale_R, top_k_R, top_p_R)
    if filters.candidates and not where.whole:
        listed_RPn = where.segments(ops.shortlist(*logits, vocab_size, filters.candidates))
        peak_R, floor_R, argmax_R, nans_R = ops.join_peaks(listed_RPn[..., :2], min_p_R)
        floor_R, mass_RPC = ops.sift(listed_RPn, peak_R, floor_R, *wanted, vocab_size)
        if filters.bounded:
            return peak_R, floor_R, mass_RPC, argmax_R, nans_R
        del listed_RPn, mass_RPC  # before there are those of all that is kept
    else:
        peaks_RP2 = where.segments(ops.peak(*logits, vocab_size))
        peak_R, floor_R, argmax_R, nans_R = ops.join_peaks(peaks_RP2, min_p_R)
        if not filters.drawn:
            return peak_R, floor_R, argmax_R.new_empty((*peaks_RP2.shape[:2], 0)), argmax_R, nans_R
        if filters.top_k or filters.top_p:
            floor_R = threshold(logits, peak_R, floor_R, *wanted, filters, where, vocab_size)
    mass_RPC = where.segments(ops.mass(*logits, peak_R, floor_R, scale_R, vocab_size))
    return peak_R, floor_R, mass_RPC, argmax_R, nans_R


@define("weigh")
def whole(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    scale_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    filter_top_k: bool,
    filter_top_p: bool,
    filter_top_p_alone: bool,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """All stages at once, for rows whose whole vocabulary is here.

    Args:
        x_NSv: [N, S, v] logits, see `Logits`.
        first_id_S: [S] int64.
        rows_R: [R] int64 or None.
        edits: of the R rows, see `Edits`, or none.
        scale_R: [R] float32, see `RowParams`.
        min_p_R: [R] float32.
        top_k_R: [R] int64.
        top_p_R: [R] int64.
        filter_top_k: whether any row uses it, see `Filters`.
        filter_top_p: likewise.
        filter_top_p_alone: whether any row may use top-p and no top-k below the vocabulary's size,
            or a large one; it decides what is fast, and nothing else.
        vocab_size: V.

    Returns:
        [R] float32 peaks and floors, [R, S, PARTS] int64 masses, [R] int64 argmaxes and NaN counts,
        see `Weighed`.
    """
    filters = Filters(filter_top_k, filter_top_p, drawn=True)
    shape = (scale_R, min_p_R, top_k_R, top_p_R)
    logits = Logits(x_NSv, first_id_S, rows_R, tuple(edits))
    return _stages(logits, *shape, filters, HERE, vocab_size)


@whole.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    scale_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    filter_top_k: bool,
    filter_top_p: bool,
    filter_top_p_alone: bool,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mass_RSC = first_id_S.new_empty((scale_R.shape[0], x_NSv.shape[1], ops.PARTS))
    peak_R, floor_R = torch.empty_like(scale_R), torch.empty_like(scale_R)
    argmax_R, nans_R = torch.empty_like(top_k_R), torch.empty_like(top_k_R)
    return peak_R, floor_R, mass_RSC, argmax_R, nans_R
