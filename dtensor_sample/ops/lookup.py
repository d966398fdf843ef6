"""The weight of one given token in each of some rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.take import rows_at
from dtensor_sample.ops.values import values_at, weights


@define("lookup")
def lookup(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    index_G: Tensor | None,
    token_G: Tensor,
    vocab_size: int,
) -> Tensor:
    """The integer weights of tokens, one each of some rows.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        peak_R, floor_R, scale_R: [R] float32, see `weights`.
        index_G: [G] int64, which of the R rows each is about, -1 for none; None: all R = G in
            order.
        token_G: [G] int64; any value that is no id of the vocabulary weighs 0.

    Returns:
        [G] int64: its weight, 0 where the token is not kept or lies in no segment here.
    """
    if index_G is not None:
        row = rows_at(index_G, rows_R, edits, peak_R, floor_R, scale_R)
        rows_R, edits, peak_R, floor_R, scale_R = row
    column_GS = token_G[:, None] - first_id_S
    segment_GS = torch.arange(x_NSv.shape[1], device=x_NSv.device).expand_as(column_GS)
    logits = (x_NSv, first_id_S, rows_R, edits)
    value_G1S, _ = values_at(*logits, segment_GS, column_GS, vocab_size)
    return weights(value_G1S, peak_R, floor_R, scale_R, vocab_size).sum((1, 2))


@lookup.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    index_G: Tensor | None,
    token_G: Tensor,
    vocab_size: int,
) -> Tensor:
    return torch.empty_like(token_G)
