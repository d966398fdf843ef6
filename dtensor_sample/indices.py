"""Owner-sorted indices: whose each row of logits is, and where it lies on its way and back.

Rows of a step are listed holder after holder, in batch order within each, padded to one capacity:
under `batch` owners hold their own requests' rows, otherwise one holder stands for every rank and
has them all. Host arithmetic only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dtensor_sample.cost import Shape
from dtensor_sample.draft.admit import packed_lanes
from dtensor_sample.params import SamplingParams, Wants

Array = np.ndarray
NAMES = (
    "logits_indices",
    "gathered_src_indices",
    "batch_slots",
    "local_cu_num_logits",
    "row_requests",
    "row_slots",
    "row_offsets",
    "row_numbers",
    "row_draft_rows",
    "row_draft_steps",
    "asked",
    "lanes",
)
"""The fields of a plan that lie on the device, in the order in which its `packed` has them."""


class Batch(NamedTuple):
    """B requests of a step, [B] int64 each."""

    slots_B: Array
    rows_B: Array
    """Rows of logits; with a budget, at most."""
    holder_B: Array
    """Who holds the rows: the owner under `batch`, otherwise 0."""
    hidden_B: Array
    """The first row of hidden states that needs logits."""
    draft_rows_B: Array
    """The row of the draft cache for draft 0; -1: there is no room."""
    draft_steps_B: Array
    """How many drafts have their logits kept."""


def indices_of(
    batch: Batch,
    shape: Shape,
    me: int,
    *,
    lanes: int,
    no_slot: int,
    drafted: bool,
    budget: int | None,
    packed: bool,
    asked: Array,
) -> tuple[dict[str, Array], int]:
    """What a plan keeps on the device, by NAMES, and how many requests holder `me` has.

    With a budget there is one row of each request, until `ShardPlan.admit` says which others.

    Args:
        batch: the requests.
        shape: what each holder has, padding included.
        me: which holder this rank is.
        lanes: requests with padding, at least B.
        no_slot: the slot of padding.
        drafted: whether the state has speculative tokens.
        budget: how many drafts are verified at most; None: all.
        packed: whether hidden rows are packed sequences, so that admission leaves them in place.
        asked: see `ShardPlan.asked`.
    """
    slots_B, rows_B, holder_B, hidden_B, draft_rows_B, draft_steps_B = batch
    B, (holders, C, requests, _) = len(slots_B), shape
    # Every row of the step in batch order: its request, and its place in it.
    held_B = rows_B if budget is None else np.ones_like(rows_B)
    request_T = np.repeat(np.arange(B), held_B)
    offset_T = np.arange(len(request_T)) - (np.cumsum(held_B) - held_B)[request_T]

    row_order = _by_holder(holder_B[request_T], holders, C)
    mine = row_order[me * C : (me + 1) * C]
    own_B = np.flatnonzero(holder_B == me)
    ends = np.cumsum(held_B[own_B])
    cu = np.full(requests + 1, held_B[own_B].sum(), dtype=np.int64)
    cu[0], cu[1 : len(own_B) + 1] = 0, ends
    real_R = np.arange(len(mine)) < cu[-1]

    lane_slots, lane_sources = np.full(lanes, no_slot), np.zeros(lanes, dtype=np.int64)
    lane_slots[:B] = slots_B
    lane_sources[:B] = holder_B * requests + _place_in_group(holder_B)
    lane_columns = np.zeros(0, np.int64)
    if budget is not None:
        starts_B = hidden_B if packed else np.full(B, -1)
        columns = [(rows_B - 1, -1), (starts_B, -1), (draft_rows_B, -1), (draft_steps_B, 0)]
        owned = [np.flatnonzero(holder_B == holder).tolist() for holder in range(holders)]
        lane_columns = packed_lanes(lanes, budget, owned, requests, columns)
    drafts_R = slice(None if drafted else 0)
    indices = {
        "logits_indices": (hidden_B[request_T] + offset_T)[row_order],
        "gathered_src_indices": lane_sources,
        "batch_slots": lane_slots,
        "local_cu_num_logits": cu,
        "row_requests": request_T[mine],
        "row_slots": slots_B[request_T[mine]],
        "row_offsets": offset_T[mine],
        "row_numbers": mine,
        "row_draft_rows": np.where(real_R, draft_rows_B[request_T[mine]], -1)[drafts_R],
        "row_draft_steps": draft_steps_B[request_T[mine]][drafts_R],
        "asked": asked,
        "lanes": lane_columns,
    }
    return indices, len(own_B)


def asked_of(params: Sequence[SamplingParams], wants: Wants, lanes: int) -> Array:
    """What each request wants told; see `ShardPlan.asked`. Padding wants nothing."""
    if not wants.logprobs:
        return np.zeros(0, np.int64)
    rows = np.full((lanes, len(Wants._fields) + wants.given), -1, np.int64)
    rows[:, : len(Wants._fields)] = Wants()
    for row, own in zip(rows, params, strict=False):
        told = (*own.wants, *own.logprob_token_ids)
        row[: len(told)] = told
    return rows.flatten()


def _place_in_group(group_N: Array) -> Array:
    """[N]: how many earlier entries have the same group. [0, 1, 0, 0] -> [0, 0, 1, 2]."""
    order = np.argsort(group_N, kind="stable")
    sizes = np.bincount(group_N)
    place = np.empty_like(group_N)
    place[order] = np.arange(len(group_N)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place


def _by_holder(holder_T: Array, holders: int, capacity: int) -> Array:
    """[holders * capacity]: rows listed holder after holder, in order, the first row as padding."""
    order = np.zeros(holders * capacity, dtype=np.int64)
    order[holder_T * capacity + _place_in_group(holder_T)] = np.arange(len(holder_T))
    return order
