"""Counts and sums of each row that what is told about its token takes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, spreads, values_by_rows


@define("tally")
def tally(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    value_R: Tensor,
    vocab_size: int,
    spread: bool,
) -> Tensor:
    """How many tokens of each row are larger than a value, how many are kept, and their spread.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        value_R: [R] float32, the value to compare with.
        spread: whether that is asked for; it is 0 otherwise.

    Returns:
        [R, 3] int64, sums over the segments here: tokens with strictly larger values, kept or not;
        kept tokens; and the sum of w * -y over weights w = 2**(S + y), see `entropy`.

    Example: of values [1, 7, 7] with floor 7, one of 1 has two larger ones, and two are kept.
    """
    tally_R3 = torch.zeros(len(value_R), 3, dtype=torch.int64, device=x_NSv.device)
    for part, value_rSv in values_by_rows(x_NSv, first_id_S, rows_R, edits, vocab_size):
        row = (peak_R[part], floor_R[part], scale_R[part])
        floor_r11 = row[1][:, None, None]
        tally_R3[part, 0] = (value_rSv > value_R[part, None, None]).sum((1, 2))
        tally_R3[part, 1] = ((value_rSv >= floor_r11) & (value_rSv > -torch.inf)).sum((1, 2))
        if spread:
            tally_R3[part, 2] = spreads(value_rSv, *row, vocab_size).sum((1, 2))
    return tally_R3


@tally.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    value_R: Tensor,
    vocab_size: int,
    spread: bool,
) -> Tensor:
    return x_NSv.new_empty((count_rows(x_NSv, rows_R), 3), dtype=torch.int64)


shard_like(
    torch.ops.dtensor_sample.tally.default, "row_sum", "logits segment - - row row row row - -"
)
