"""Inverse CDF: the token at which the running sum of weights passes a point, and what it means."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.parts import aim, first_beyond, part_of
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.take import rows_at
from dtensor_sample.ops.values import values_at, weights


@define("pick")
def pick(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    first_segment: int,
    index_Q: Tensor | None,
    uniform_Q: Tensor,
    vocab_size: int,
) -> Tensor:
    """The token that a uniform number points at: inverse CDF over a whole row.

    It is the lowest id whose running sum of weights, in id order, exceeds uniform * total / 2**62.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        mass_RPC: [R, P, PARTS] int64, the mass of every part of the vocabulary, see `mass`.
        first_segment: which of its P segments is the first one here; a rank's own.
        index_Q: [Q] int64, which of the R rows each number is for, -1 for none; None: all R = Q in
            order.
        uniform_Q: [Q] int64 in [0, 2**62).

    Returns:
        [Q] int64: the id, or -1 where no segment here holds it, or the row has no token.

    Example: of weights [4, 0, 2], a uniform of 2**61 takes id 0, and one of 3 * 2**60 id 2.
    """
    _, S, v = x_NSv.shape
    if index_Q is not None:
        row = rows_at(index_Q, rows_R, edits, peak_R, floor_R, scale_R, mass_RPC)
        rows_R, edits, peak_R, floor_R, scale_R, mass_RPC = row
    start_QSC, point_Q = aim(mass_RPC, first_segment, S, uniform_Q)
    at = part_of(start_QSC, point_Q, v)
    value_Q1W, id_Q1W = values_at(x_NSv, first_id_S, rows_R, edits, *at, vocab_size)
    weight_Q1W = weights(value_Q1W, peak_R, floor_R, scale_R, vocab_size)
    return first_beyond(weight_Q1W[:, 0], start_QSC, point_Q, id_Q1W[:, 0])


@pick.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    first_segment: int,
    index_Q: Tensor | None,
    uniform_Q: Tensor,
    vocab_size: int,
) -> Tensor:
    return torch.empty_like(uniform_Q)


@define("draw")
def draw(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    first_segment: int,
    uniform_R: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
    greedy_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """What each row's draw comes to, see `SamplerOutput`.

    Args:
        x_NSv to first_segment, vocab_size: see `pick`; masses without parts, [R, P, 0], if no row
            is to be drawn, but all take their largest value.
        argmax_R: [R] int64, the lowest id of the largest value; -1 where a row has no token.
        nans_R: [R] int64, NaN logits.
        greedy_R: [R] bool, rows that take the largest value.

    Returns:
        [R, 5] int64: the token (-1 also where no segment here holds it), how many were sampled (0
        where none was left, else 1) and rejected (0), the NaN logits, and 1 where no token was
        left.
    """
    token_R = argmax_R
    if mass_RPC.shape[2] > 0:
        row = (x_NSv, first_id_S, rows_R, edits, peak_R, floor_R, scale_R)
        picked_R: Tensor = pick(*row, mass_RPC, first_segment, None, uniform_R, vocab_size)
        token_R = torch.where(greedy_R, argmax_R, picked_R)
    failed_R = (argmax_R < 0).to(torch.int64)
    return torch.stack([token_R, 1 - failed_R, torch.zeros_like(nans_R), nans_R, failed_R], 1)


@draw.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    first_segment: int,
    uniform_R: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
    greedy_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return argmax_R.new_empty((argmax_R.shape[0], 5))


for _op, _more in (
    (torch.ops.dtensor_sample.pick.default, "- row"),
    (torch.ops.dtensor_sample.draw.default, "row row row row"),
):
    shard_like(_op, "row_max", f"logits segment - - row row row row - {_more} -")
