"""Inverse CDF: the token at which the running sum of weights passes a point."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.parts import first_beyond, part_of
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, values_at, weights


@define("pick")
def pick(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    start_RSC: Tensor,
    point_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """The lowest id whose running sum of weights, in id order over the whole row, exceeds `point`.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        start_RSC: [R, S, PARTS] int64, the mass of everything before each part, see `aim`.
        point_R: [R] int64, 0 <= point < the row's mass.

    Returns:
        [R] int64: the id, or -1 where no segment here holds the point.

    Example: weights [4, 0, 2] and point 4 give id 2; point 3 gives id 0.
    """
    at = part_of(start_RSC, point_R, x_NSv.shape[2])
    value_R1W, id_R1W = values_at(x_NSv, first_id_S, rows_R, edits, *at, vocab_size)
    weight_R1W = weights(value_R1W, peak_R, floor_R, scale_R, vocab_size)
    return first_beyond(weight_R1W[:, 0], start_RSC, point_R, id_R1W[:, 0])


@pick.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    start_RSC: Tensor,
    point_R: Tensor,
    vocab_size: int,
) -> Tensor:
    return x_NSv.new_empty(count_rows(x_NSv, rows_R), dtype=torch.int64)


shard_like(
    torch.ops.dtensor_sample.pick.default,
    "row_max",
    "logits segment - - row row row row_segment row -",
)
