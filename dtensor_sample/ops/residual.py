"""What the target has and the draft has not: max(ratio * p - q, 0), by token.

Each of ratio * p and q is a float64 product of a weight and one factor of its row, and what is left
of their difference is truncated to a multiple of 2**-51: the same bits wherever a token is
evaluated. So residuals add up over blocks and shards exactly as the weights do. V tokens together
lose less than V * 2**-51 of probability, 6e-11 for 129,280, and half of that is to be expected.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_sample.ops.define import define
from dtensor_sample.ops.parts import PARTS, aim, first_beyond, part_of, part_sums
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, token_ids, values, values_at, weights

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
    total_R: Tensor,
    ratio_R: Tensor,
    draft_MSw: Tensor,
    draft_rows_R: Tensor,
    draft_edits: Sequence[Tensor],
    draft_peak_R: Tensor,
    draft_floor_R: Tensor,
    draft_scale_R: Tensor,
    draft_total_R: Tensor,
    one_hot_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The sum of max(ratio * p - q, 0) over each row and part of a segment.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: the target's logits, see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        total_R: [R] int64, the target's mass over the whole vocabulary.
        ratio_R: [R] int64 in [0, 2**60], units of 2**-60.
        draft_MSw: [M, 1, w] the draft's logits; their ids count from the same first id, without a
            gap, as those of the target's segments then do.
        draft_rows_R: [R] int64, rows of those; -1: q is 0 but for `one_hot`.
        draft_edits: of those R rows, see `edited`.
        draft_peak_R, draft_floor_R, draft_scale_R, draft_total_R: as the target's.
        one_hot_R: [R] int64, an id of which q is 1; -1 for none.

    Returns:
        [R, S, PARTS] int64 in units of 2**-60, multiples of 2**9.
    """
    segments, width = x_NSv.shape[1:]
    value_RSv = values(x_NSv, first_id_S, rows_R, edits, vocab_size)
    p_RSv = _shares(value_RSv, peak_R, floor_R, scale_R, total_R, ratio_R, vocab_size)
    draft_RSw = values(draft_MSw, first_id_S[:1], draft_rows_R, draft_edits, vocab_size)
    draft = (draft_peak_R, draft_floor_R, draft_scale_R, draft_total_R)
    one_R = torch.full_like(ratio_R, ONE)
    q_RW = _shares(draft_RSw, *draft, one_R, vocab_size).flatten(1)
    q_RW = pad(q_RW, (0, segments * width - q_RW.shape[1]))  # ids line up; padding weighs nothing
    hot_RSv = token_ids(x_NSv, first_id_S) == one_hot_R[:, None, None]
    return part_sums(_residuals(p_RSv, q_RW.unflatten(1, (segments, width)), hot_RSv))


@residual_mass.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    total_R: Tensor,
    ratio_R: Tensor,
    draft_MSw: Tensor,
    draft_rows_R: Tensor,
    draft_edits: Sequence[Tensor],
    draft_peak_R: Tensor,
    draft_floor_R: Tensor,
    draft_scale_R: Tensor,
    draft_total_R: Tensor,
    one_hot_R: Tensor,
    vocab_size: int,
) -> Tensor:
    shape = (count_rows(x_NSv, rows_R), x_NSv.shape[1], PARTS)
    return x_NSv.new_empty(shape, dtype=torch.int64)


@define("residual_pick")
def residual_pick(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    total_R: Tensor,
    ratio_R: Tensor,
    draft_MSw: Tensor,
    draft_rows_R: Tensor,
    draft_edits: Sequence[Tensor],
    draft_peak_R: Tensor,
    draft_floor_R: Tensor,
    draft_scale_R: Tensor,
    draft_total_R: Tensor,
    one_hot_R: Tensor,
    spare_RPC: Tensor,
    first_segment: int,
    uniform_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The token that a uniform number points at in the running sum of residuals, in id order.

    Args:
        x_NSv to one_hot_R, vocab_size: see `residual_mass`.
        spare_RPC: [R, P, PARTS] int64, the residual of every part of the vocabulary.
        first_segment, uniform_R: see `pick`.

    Returns:
        [R] int64: the id, or -1 where no segment here holds it, or nothing is left.
    """
    _, segments, width = x_NSv.shape
    start_RSC, point_R = aim(spare_RPC, first_segment, segments, uniform_R)
    segment_RW, column_RW = part_of(start_RSC, point_R, width)
    at = (segment_RW, column_RW, vocab_size)
    value_R1W, id_R1W = values_at(x_NSv, first_id_S, rows_R, edits, *at)
    p_R1W = _shares(value_R1W, peak_R, floor_R, scale_R, total_R, ratio_R, vocab_size)
    at = (torch.zeros_like(segment_RW), segment_RW * width + column_RW, vocab_size)
    draft_R1W, _ = values_at(draft_MSw, first_id_S[:1], draft_rows_R, draft_edits, *at)
    draft = (draft_peak_R, draft_floor_R, draft_scale_R, draft_total_R)
    q_R1W = _shares(draft_R1W, *draft, torch.full_like(ratio_R, ONE), vocab_size)
    residual_R1W = _residuals(p_R1W, q_R1W, id_R1W == one_hot_R[:, None, None])
    return first_beyond(residual_R1W[:, 0], start_RSC, point_R, id_R1W[:, 0])


@residual_pick.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    total_R: Tensor,
    ratio_R: Tensor,
    draft_MSw: Tensor,
    draft_rows_R: Tensor,
    draft_edits: Sequence[Tensor],
    draft_peak_R: Tensor,
    draft_floor_R: Tensor,
    draft_scale_R: Tensor,
    draft_total_R: Tensor,
    one_hot_R: Tensor,
    spare_RPC: Tensor,
    first_segment: int,
    uniform_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return x_NSv.new_empty(count_rows(x_NSv, rows_R), dtype=torch.int64)


def _shares(
    value_RSv: Tensor,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    total_R: Tensor,
    ratio_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """[R, S, v] float64: ratio * weight / total in units of 2**-51."""
    weight_RSv = weights(value_RSv, peak_R, floor_R, scale_R, vocab_size)
    factor_R = ratio_R.double() * 0.5**SHIFT / total_R.clamp(min=1).double()
    return weight_RSv.double().mul_(factor_R[:, None, None])


def _residuals(p_RSv: Tensor, q_RSv: Tensor, hot_RSv: Tensor) -> Tensor:
    """[R, S, v] int64: max(p - q, 0), truncated, in units of 2**-60; q is 1 where hot."""
    return p_RSv.sub_(q_RSv).clamp_(min=0).masked_fill_(hot_RSv, 0).to(torch.int64) << SHIFT


for _op, _out, _more in (
    (torch.ops.dtensor_sample.residual_mass.default, "row_segment", ""),
    (torch.ops.dtensor_sample.residual_pick.default, "row_max", "row - row "),
):
    _target, _draft = "logits segment - - row row row row row", "logits row - row row row row row"
    shard_like(_op, _out, f"{_target} {_draft} {_more}-")
