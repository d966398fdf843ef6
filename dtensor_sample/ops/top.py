"""The largest values of each row, with their ids."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.peak import pack_value, unpack_peak
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, token_ids, values_by_rows


@define("top")
def top(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    count: int,
) -> Tensor:
    """The `count` largest values of each row here, equal ones by their ids, lowest first.

    Args:
        x_NSv, first_id_S, rows_R, edits, vocab_size: see `values`.
        count: how many of each row, >= 1.

    Returns:
        [R, 1, count] int64 in descending order, packed as in `peak`, hence all distinct, so that
        the largest of several segments' are the row's; -1 where there are fewer.

    Example: the two largest of [7, 1, 7] are 7 at id 0 and 7 at id 2.
    """
    return top_by_rows(x_NSv, first_id_S, rows_R, edits, vocab_size, count)


@top.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    count: int,
) -> Tensor:
    return x_NSv.new_empty((count_rows(x_NSv, rows_R), 1, count), dtype=torch.int64)


def top_by_rows(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
    count: int,
) -> Tensor:
    """What `top` computes, by looking at all tokens of a few rows at a time."""
    rows = count_rows(x_NSv, rows_R)
    found_RC = x_NSv.new_full((rows, count), -1, dtype=torch.int64)
    here = min(count, x_NSv.shape[1] * x_NSv.shape[2])
    id_Sv = token_ids(x_NSv, first_id_S)
    for part, value_rSv in values_by_rows(x_NSv, first_id_S, rows_R, edits, vocab_size):
        packed_rSv = torch.where(value_rSv > -torch.inf, pack_value(value_rSv, id_Sv), -1)
        found_RC[part, :here] = packed_rSv.flatten(1).topk(here).values
    return found_RC[:, None]


def unpack_top(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(value float32, id int64) of results of `top`; -inf and -1 where there is none."""
    value, ids = unpack_peak(packed.clamp(min=0))
    return torch.where(packed < 0, -torch.inf, value), torch.where(packed < 0, -1, ids)


shard_like(torch.ops.dtensor_sample.top.default, "row_segment", "logits segment - - - -")
