"""What the target has and the draft has not: max(ratio * p - q, 0), by token.

Each of ratio * p and q is a float64 product of a weight and one factor of its row, and what is left
of their difference is truncated to a multiple of 2**-51: the same bits wherever a token is
evaluated. So residuals add up over blocks and shards exactly as the weights do. V tokens together
lose less than V * 2**-51 of probability, 6e-11 for 129,280, and half of that is to be expected.

Both ops are about G places, each a row of the target beside a row of the draft, as `row_G` says.
They take plain tensors only, as what else judges drafts does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.ops.define import define
from dtensor_sample.ops.parts import PARTS, aim, first_beyond, part_of, part_sums
from dtensor_sample.ops.pick import pick
from dtensor_sample.ops.take import rows_at
from dtensor_sample.ops.values import token_ids, values, values_at, weights

ONE = 1 << 60
"""Probability 1."""
SHIFT = 9
"""Residuals are multiples of 2**9 units of 2**-60."""


def probability(weight_R: Tensor, total_R: Tensor) -> Tensor:
    """Weights out of totals as [R] int64 probabilities in units of 2**-60.

    A token that weighs anything has at least one unit: what could be drawn can be accepted.
    """
    factor_R = ONE / total_R.clamp(min=1).double()
    units_R = weight_R.double().mul_(factor_R).clamp_(max=float(ONE)).to(torch.int64)
    return torch.maximum(units_R, (weight_R > 0).to(torch.int64))


@define("residual_mass")
def residual_mass(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    row_G: Tensor,
    total_G: Tensor,
    ratio_G: Tensor | None,
    draft_MSw: Tensor | None,
    draft_rows_G: Tensor | None,
    draft_edits: Sequence[Tensor],
    draft_peak_G: Tensor | None,
    draft_floor_G: Tensor | None,
    draft_scale_G: Tensor | None,
    draft_total_G: Tensor | None,
    one_hot_G: Tensor,
    index_Q: Tensor | None,
    vocab_size: int,
) -> Tensor:
    """The sum of max(ratio * p - q, 0) over each part of a segment, at some places.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: the target's logits, see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        row_G: [G] int64, the target's row at each place; -1: p is 0.
        total_G: [G] int64, that row's mass over the whole vocabulary.
        ratio_G: [G] int64 in [0, 2**60], units of 2**-60; None: all are 1.
        draft_MSw: [M, 1, w] the draft's logits; their ids count from the same first id, without a
            gap, as those of the target's segments then do. None, as all that follows: every q is 0
            but for `one_hot`.
        draft_rows_G: [G] int64, rows of those; -1: q is 0 but for `one_hot`.
        draft_edits: of those G rows, see `edited`.
        draft_peak_G, draft_floor_G, draft_scale_G, draft_total_G: as the target's.
        one_hot_G: [G] int64, an id of which q is 1; -1 for none.
        index_Q: [Q] int64, which places are wanted, -1 for one without tokens; None: all Q = G.

    Returns:
        [Q, S, PARTS] int64 in units of 2**-60, multiples of 2**9.
    """
    p = (rows_R, edits, peak_R, floor_R, scale_R, row_G, total_G, ratio_G)
    q = (draft_rows_G, draft_edits, draft_peak_G, draft_floor_G, draft_scale_G, draft_total_G)
    segments, width = x_NSv.shape[1:]
    mass_QSC = row_G.new_zeros((len(row_G if index_Q is None else index_Q), segments, PARTS))
    some: slice | Tensor = slice(None)
    if index_Q is not None and index_Q.is_cpu:  # a GPU would have to wait for how many there are
        some = index_Q >= 0
        index_Q = index_Q[some]
    target, draft, hot_Q = _places(p, q, one_hot_G, index_Q)
    rows_Q, own, *weighed = target
    p_QSv = _shares(values(x_NSv, first_id_S, rows_Q, own, vocab_size), weighed, vocab_size)
    if draft_MSw is None:
        q_QSv = torch.zeros_like(p_QSv)
    else:
        rows_Q, own, *weighed = draft
        draft_QSw = values(draft_MSw, first_id_S[:1], rows_Q, own, vocab_size)
        q_QW = _shares(draft_QSw, weighed, vocab_size).flatten(1)
        # Ids line up; padding weighs nothing.
        q_QSv = pad(q_QW, (0, segments * width - q_QW.shape[1])).unflatten(1, (segments, width))
    hot_QSv = token_ids(x_NSv, first_id_S) == hot_Q[:, None, None]
    mass_QSC[some] = part_sums(_residuals(p_QSv, q_QSv, hot_QSv))
    return mass_QSC


@residual_mass.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    row_G: Tensor,
    total_G: Tensor,
    ratio_G: Tensor | None,
    draft_MSw: Tensor | None,
    draft_rows_G: Tensor | None,
    draft_edits: Sequence[Tensor],
    draft_peak_G: Tensor | None,
    draft_floor_G: Tensor | None,
    draft_scale_G: Tensor | None,
    draft_total_G: Tensor | None,
    one_hot_G: Tensor,
    index_Q: Tensor | None,
    vocab_size: int,
) -> Tensor:
    places = (row_G if index_Q is None else index_Q).shape[0]
    return row_G.new_empty((places, x_NSv.shape[1], PARTS))


@define("recover")
def recover(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    row_G: Tensor,
    total_G: Tensor,
    ratio_G: Tensor | None,
    draft_MSw: Tensor | None,
    draft_rows_G: Tensor | None,
    draft_edits: Sequence[Tensor],
    draft_peak_G: Tensor | None,
    draft_floor_G: Tensor | None,
    draft_scale_G: Tensor | None,
    draft_total_G: Tensor | None,
    one_hot_G: Tensor,
    mass_RPC: Tensor,
    spare_XPC: Tensor,
    of_places: bool,
    place_Q: Tensor,
    end_Q: Tensor,
    first_segment: int,
    uniform_Q: Tensor,
    vocab_size: int,
) -> Tensor:
    """The tokens that uniform numbers point at after the accepted drafts, in id order.

    In the running sum of the residuals of a refused draft's place, if any is left there, and
    otherwise in that of the target's weights.

    Args:
        x_NSv to one_hot_G, vocab_size: see `residual_mass`.
        mass_RPC: [R, P, PARTS] int64, the mass of every part of the vocabulary, see `mass`.
        spare_XPC: the residual of every part: [G, P, PARTS] int64 of all places, or [Q, P, PARTS]
            of those that are wanted.
        of_places: which of the two.
        place_Q: [Q] int64, the place of the refused draft; -1 for none.
        end_Q: [Q] int64, the target's row after the accepted drafts; -1 for none.
        first_segment, uniform_Q: see `pick`.

    Returns:
        [Q] int64: the id, or -1 where no segment here holds it, or the row has no token.
    """
    p = (rows_R, edits, peak_R, floor_R, scale_R, row_G, total_G, ratio_G)
    q = (draft_rows_G, draft_edits, draft_peak_G, draft_floor_G, draft_scale_G, draft_total_G)
    spare_QPC = spare_XPC[place_Q.clamp(min=0)] if of_places else spare_XPC
    left_Q = (place_Q >= 0) & (spare_QPC.sum((1, 2)) > 0)
    target, draft, hot_Q = _places(p, q, one_hot_G, torch.where(left_Q, place_Q, -1))
    _, segments, width = x_NSv.shape
    start_QSC, point_Q = aim(spare_QPC, first_segment, segments, uniform_Q)
    segment_QW, column_QW = part_of(start_QSC, point_Q, width)
    at = (segment_QW, column_QW, vocab_size)
    rows_Q, own, *weighed = target
    value_Q1W, id_Q1W = values_at(x_NSv, first_id_S, rows_Q, own, *at)
    p_Q1W = _shares(value_Q1W, weighed, vocab_size)
    if draft_MSw is None:
        q_Q1W = torch.zeros_like(p_Q1W)
    else:
        at = (torch.zeros_like(segment_QW), segment_QW * width + column_QW, vocab_size)
        rows_Q, own, *weighed = draft
        draft_Q1W, _ = values_at(draft_MSw, first_id_S[:1], rows_Q, own, *at)
        q_Q1W = _shares(draft_Q1W, weighed, vocab_size)
    residual_Q1W = _residuals(p_Q1W, q_Q1W, id_Q1W == hot_Q[:, None, None])
    recovered_Q = first_beyond(residual_Q1W[:, 0], start_QSC, point_Q, id_Q1W[:, 0])
    row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R, mass_RPC, first_segment)
    drawn_Q: Tensor = pick(*row, torch.where(left_Q, -1, end_Q), uniform_Q, vocab_size)
    return torch.where(left_Q, recovered_Q, drawn_Q)


@recover.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    row_G: Tensor,
    total_G: Tensor,
    ratio_G: Tensor | None,
    draft_MSw: Tensor | None,
    draft_rows_G: Tensor | None,
    draft_edits: Sequence[Tensor],
    draft_peak_G: Tensor | None,
    draft_floor_G: Tensor | None,
    draft_scale_G: Tensor | None,
    draft_total_G: Tensor | None,
    one_hot_G: Tensor,
    mass_RPC: Tensor,
    spare_XPC: Tensor,
    of_places: bool,
    place_Q: Tensor,
    end_Q: Tensor,
    first_segment: int,
    uniform_Q: Tensor,
    vocab_size: int,
) -> Tensor:
    return torch.empty_like(uniform_Q)


def _places(
    p: tuple[Any, ...], q: tuple[Any, ...], one_hot_G: Tensor, index_Q: Tensor | None
) -> tuple[tuple[Any, ...], tuple[Any, ...], Tensor]:
    """What target and draft have side by side at the places that are wanted.

    Args:
        p, q, one_hot_G, index_Q: of `residual_mass`.

    Returns:
        Of each of both: rows, edits, peaks, floors, scales, totals and ratios; and one-hot ids.
    """
    *of_rows, row_G, total_G, ratio_G = p
    ones_G = torch.full_like(total_G, ONE)
    ratio_G = ones_G if ratio_G is None else ratio_G
    if index_Q is None:
        index_Q = torch.arange(len(row_G), device=row_G.device)
    row_Q, _, total_Q, ratio_Q, hot_Q, one_Q = rows_at(
        index_Q, row_G, (), total_G, ratio_G, one_hot_G, ones_G
    )
    target = (*rows_at(row_Q, *of_rows), total_Q, ratio_Q)
    draft = () if q[0] is None else (*rows_at(index_Q, *q), one_Q)
    return target, draft, hot_Q


def _shares(value_RSv: Tensor, weighed: Sequence[Tensor], vocab_size: int) -> Tensor:
    """[R, S, v] float64: ratio * weight / total in units of 2**-51.

    `weighed`: of the R rows, peaks, floors, scales, totals and ratios.
    """
    peak_R, floor_R, scale_R, total_R, ratio_R = weighed
    weight_RSv = weights(value_RSv, peak_R, floor_R, scale_R, vocab_size)
    factor_R = ratio_R.double() * 0.5**SHIFT / total_R.clamp(min=1).double()
    return weight_RSv.double().mul_(factor_R[:, None, None])


def _residuals(p_RSv: Tensor, q_RSv: Tensor, hot_RSv: Tensor) -> Tensor:
    """[R, S, v] int64: max(p - q, 0), truncated, in units of 2**-60; q is 1 where hot."""
    return p_RSv.sub_(q_RSv).clamp_(min=0).masked_fill_(hot_RSv, 0).to(torch.int64) << SHIFT
