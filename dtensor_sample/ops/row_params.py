"""What each row takes from its request: sampling parameters, position and uniform number."""

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.largest import TOP_P_ONE
from dtensor_sample.ops.sharding import shard_like
from dtensor_sample.ops.uniform import uniform


@define("row_params")
def row_params(
    table_M6: Tensor,
    row_R: Tensor | None,
    position_X: Tensor,
    place_R: Tensor | None,
    offset_R: Tensor | None,
    stream: int | None,
    step: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows of a packed table and of positions, and the uniform numbers of their tokens.

    Args:
        table_M6: [M, 6] int64, see `unpack`.
        row_R: [R] int64, the table's row of each; None: all M in order.
        position_X: [X] int64.
        place_R: [R] int64, the entry of `position_X` of each; None: all X = R in order.
        offset_R: [R] int64, added to the position; None: 0.
        stream: see `uniform`; None: no numbers are wanted.
        step: place within a block of drafts, as `uniform` counts it.

    Returns:
        What `unpack` returns, [R] int64 positions, and [R] int64 uniform numbers, or [0].
    """
    position_R = position_X.clone() if place_R is None else position_X[place_R]
    if offset_R is not None:
        position_R += offset_R
    table_R6 = table_M6 if row_R is None else table_M6[row_R]
    scale_R, min_p_R, top_k_R, top_p_R, seed_R, greedy_R = unpack(table_R6)
    uniform_R = seed_R.new_empty(0)
    if stream is not None:
        uniform_R = uniform(seed_R, position_R, torch.full_like(seed_R, step), stream)
    return scale_R, min_p_R, top_k_R, top_p_R, seed_R.clone(), greedy_R, position_R, uniform_R


@row_params.register_fake
def _(
    table_M6: Tensor,
    row_R: Tensor | None,
    position_X: Tensor,
    place_R: Tensor | None,
    offset_R: Tensor | None,
    stream: int | None,
    step: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    R = table_M6.shape[0] if row_R is None else row_R.shape[0]
    scale, min_p = (table_M6.new_empty(R, dtype=torch.float32) for _ in range(2))
    top_k, top_p, seed, position = (table_M6.new_empty(R) for _ in range(4))
    greedy = table_M6.new_empty(R, dtype=torch.bool)
    drawn = table_M6.new_empty(0 if stream is None else R)
    return scale, min_p, top_k, top_p, seed, greedy, position, drawn


def unpack(table_R6: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The columns of a packed table [R, 6] int64, clamped to their ranges.

    Returns:
        [R] float32 scale and min_p, of which the table has the bits, int64 top_k, top_p and seed,
        and bool greedy: see `RowParams`. The seed is a view.
    """
    scale, min_p, top_k, top_p, seed, greedy = table_R6.unbind(1)
    return (
        scale.to(torch.int32).view(torch.float32),
        min_p.to(torch.int32).view(torch.float32),
        top_k.clamp(min=1),
        top_p.clamp(0, TOP_P_ONE),
        seed,
        greedy != 0,
    )


shard_like(
    torch.ops.dtensor_sample.row_params.default,
    "row row row row row row row row",
    "row - row - - - -",
)
