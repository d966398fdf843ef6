"""Some of the rows that were weighed, in any order: what verification and reports compare."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor_sample.ops.define import define
from dtensor_sample.ops.edits import Edits


@define("take")
def take(
    index_Q: Tensor,
    wanted_Q: Tensor | None,
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
        index_Q: [Q] int64 in [-1, R); -1 has no tokens and no mass, and other fields of any row.
        wanted_Q: [Q] bool; None: all are.
        rows_R: [R] int64, where each row lies among the logits; None: in order.
        peak_R, floor_R, scale_R: [R] float32, see `Weighed`; so are the others.
        mass_RPC: [R, P, C] int64.
        argmax_R, nans_R: [R] int64.

    Returns:
        [Q] int64, where each lies among the logits, -1 for one without tokens; and the fields of
        row `index`, wanted or not.
    """
    exists_Q = index_Q >= 0
    at_Q = index_Q.clamp(min=0)
    row_Q = row_at(index_Q, rows_R)
    return (
        row_Q if wanted_Q is None else torch.where(wanted_Q, row_Q, -1),
        peak_R[at_Q],
        floor_R[at_Q],
        scale_R[at_Q],
        mass_RPC[at_Q] * exists_Q[:, None, None],
        argmax_R[at_Q],
        nans_R[at_Q],
    )


@take.register_fake
def _(
    index_Q: Tensor,
    wanted_Q: Tensor | None,
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


def row_at(index_Q: Tensor, rows_R: Tensor | None) -> Tensor:
    """[Q] int64: where row `index` of each lies among the logits; -1 for -1."""
    at_Q = index_Q.clamp(min=0)
    return torch.where(index_Q >= 0, at_Q if rows_R is None else rows_R[at_Q], -1)


def rows_at(
    index_Q: Tensor, rows_R: Tensor | None, edits: Sequence[Tensor], *fields: Tensor
) -> tuple[Any, ...]:
    """Rows, edits and fields [R, ...] of row `index` for each of Q; no row for -1."""
    at_Q = index_Q.clamp(min=0)
    own = Edits(*edits).at(at_Q) if edits else ()
    return row_at(index_Q, rows_R), own, *(field_R[at_Q] for field_R in fields)
