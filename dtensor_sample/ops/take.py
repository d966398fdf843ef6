"""Some of the rows that were weighed, in any order: what verification and reports compare."""

import torch
from torch import Tensor

from dtensor_sample.ops.define import define


@define("take")
def take(
    index_Q: Tensor,
    wanted_Q: Tensor,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Row `index` for each of Q where it is wanted, a row without tokens elsewhere.

    Args:
        index_Q: [Q] int64 in [0, R).
        wanted_Q: [Q] bool.
        rows_R: [R] int64, where each row lies among the logits; None: in order.
        peak_R, floor_R, scale_R: [R] float32, see `Weighed`; so are the others.
        mass_RPC: [R, P, C] int64.
        argmax_R, nans_R: [R] int64.

    Returns:
        [Q] int64, where each lies among the logits, -1 for one without tokens; and the fields of
        row `index`, wanted or not.
    """
    row_Q = index_Q if rows_R is None else rows_R[index_Q]
    return (
        torch.where(wanted_Q, row_Q, -1),
        peak_R[index_Q],
        floor_R[index_Q],
        scale_R[index_Q],
        mass_RPC[index_Q],
        argmax_R[index_Q],
        nans_R[index_Q],
    )


@take.register_fake
def _(
    index_Q: Tensor,
    wanted_Q: Tensor,
    rows_R: Tensor | None,
    peak_R: Tensor,
    floor_R: Tensor,
    scale_R: Tensor,
    mass_RPC: Tensor,
    argmax_R: Tensor,
    nans_R: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    Q = index_Q.shape[0]
    return (
        index_Q.new_empty(Q),
        peak_R.new_empty(Q),
        peak_R.new_empty(Q),
        peak_R.new_empty(Q),
        index_Q.new_empty((Q, *mass_RPC.shape[1:])),
        index_Q.new_empty(Q),
        index_Q.new_empty(Q),
    )
