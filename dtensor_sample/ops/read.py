"""The values of given tokens of each row."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, from_ordered_keys, ordered_keys, values_at


@define("read")
def read(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    ids_RI: Tensor,
    vocab_size: int,
) -> Tensor:
    """What the values of some tokens of each row are, such that a sum over segments finds them.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        ids_RI: [R, I] int64; those that are no id of the vocabulary have no value.

    Returns:
        [R, I] int64, see `unpack_read`; 0 where the token has no value or lies in no segment here.
    """
    column_RIS = ids_RI[..., None] - first_id_S
    segment_RIS = torch.arange(x_NSv.shape[1], device=x_NSv.device).expand_as(column_RIS)
    at = (segment_RIS.flatten(1), column_RIS.flatten(1))
    value_R1W, _ = values_at(x_NSv, first_id_S, rows_R, edits, *at, vocab_size)
    value_RIS = value_R1W.view(column_RIS.shape)
    return torch.where(value_RIS > -torch.inf, ordered_keys(value_RIS) + 1, 0).sum(2)


@read.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    ids_RI: Tensor,
    vocab_size: int,
) -> Tensor:
    return ids_RI.new_empty((count_rows(x_NSv, rows_R), ids_RI.shape[1]))


def unpack_read(total_RI: Tensor) -> Tensor:
    """Float32 values of summed results of `read`; -inf where there is none."""
    value_RI = from_ordered_keys((total_RI - 1).clamp(min=0))
    return torch.where(total_RI > 0, value_RI, -torch.inf)


shard_like(torch.ops.dtensor_sample.read.default, "row_sum", "logits segment - - row -")
