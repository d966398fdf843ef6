"""The values of rows, copied: for what cannot be computed where they are read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.values import count_rows, values


@define("copy")
def copy(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
) -> Tensor:
    """[R, S, v] float32: the edited values of rows, -inf where an id does not exist; see `values`.

    It has no kernel of its own: custom processors need a copy anyway.
    """
    return values(x_NSv, first_id_S, rows_R, edits, vocab_size)


@copy.register_fake
def _(
    x_NSv: Tensor,
    first_id_S: Tensor,
    rows_R: Tensor | None,
    edits: Sequence[Tensor],
    vocab_size: int,
) -> Tensor:
    shape = (count_rows(x_NSv, rows_R), *x_NSv.shape[1:])
    return x_NSv.new_empty(shape, dtype=torch.float32)


shard_like(torch.ops.dtensor_sample.copy.default, "logits", "logits segment - - -")
