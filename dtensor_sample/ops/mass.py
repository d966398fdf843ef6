"""The sums of the integer weights of each row's kept tokens, part by part."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.parts import PARTS, part_sums
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, values, weights


@define("mass")
def mass(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    """Total integer weight of each row and part of a segment.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.

    Returns:
        [R, S, PARTS] int64; a row's parts sum to at most 2**62.
    """
    value_RSv = values(x_NSv, first_id_S, rows_R, edits, vocab_size)
    return part_sums(weights(value_RSv, peak_R, floor_R, scale_R, vocab_size))


@mass.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    vocab_size: int,
) -> Tensor:
    shape = (count_rows(x_NSv, rows_R), x_NSv.shape[1], PARTS)
    return x_NSv.new_empty(shape, dtype=torch.int64)


shard_like(torch.ops.dtensor_sample.mass.default, "row_segment", "logits segment - - row row row -")
