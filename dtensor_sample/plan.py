"""Who owns what this step, and where each row goes. Host arithmetic only.

A plan is a pure function of replicated host data (slots and rows per request), so ranks never talk to
agree on one. Under `batch`, rows are listed owner after owner, in batch order within each, padded to
one capacity C per owner: what `Shard(0)` of a DTensor [P * C, V] means. Padding repeats a valid row,
and its result is dropped. Under `vocab` and `replicate` rows stay in batch order, unpadded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtensor_sample.cost import Cost, cost_of
from dtensor_sample.exchange import Exchange, Logits, check_exchange, exchange_of
from dtensor_sample.layout import Layout, layout_of
from dtensor_sample.params import Filters, integer
from dtensor_sample.state import SamplingState

Array = np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardPlan:
    """One step's owners, splits and indices. P ranks, B requests, T rows, C rows per owner."""

    state: SamplingState
    """What the plan was made for."""
    exchange: Exchange
    """How this step's logits meet the sampler; `exchange.name` is its name."""
    slots: tuple[int, ...]
    """[B] in batch order."""
    owners: tuple[int, ...]
    """[B] the rank that samples each request."""
    rows_per_rank: tuple[int, ...]
    """[P] rows each rank owns: the splits to send, before padding."""
    capacity: int
    """C: rows per owner with padding, under `batch`; T otherwise."""
    num_rows: int
    """Rows of logits: P * C under `batch`, T otherwise."""
    local_rows: int
    """Rows that this rank samples, padding left out."""
    local_requests: int
    """Requests that this rank samples."""
    max_requests_per_rank: int
    """Most requests of any rank."""
    max_rows_per_request: int
    """Most rows of any request."""
    filters: Filters
    """Filters that any request of the batch uses."""
    logits_indices: Tensor
    """[num_rows] int64: for each row of logits, its row of hidden states."""
    gathered_src_indices: Tensor
    """[B] int64: where each request lies among gathered results, owner after owner."""
    batch_slots: Tensor
    """[B] int64: slots on the device."""
    local_cu_num_logits: Tensor
    """[max_requests_per_rank + 1] int64: where each local request's rows begin; the end repeats."""
    row_requests: Tensor
    """[R] int64: each local row's request, as an index into the batch. R counts padding."""
    row_slots: Tensor
    """[R] int64: each local row's slot."""
    row_offsets: Tensor
    """[R] int64: each local row's place in its request."""
    positions: Tensor | None
    """[B] int64 given by the caller, or None: the state's, which then advance."""

    def row_positions(self) -> Tensor:
        """[R] int64: position in its own sequence of the token that each local row emits."""
        if self.positions is None:
            return self.state.positions[self.row_slots] + self.row_offsets
        return self.positions[self.row_requests] + self.row_offsets

    def select(self, hidden: Tensor) -> Tensor:
        """The hidden rows that need logits, in the order in which the exchange wants them.

        Args:
            hidden: [N, H]: one row for each row of logits in batch order, or packed sequences if the
                plan has a `query_start_loc`. A plain tensor (the same on every rank), a DTensor
                Replicate(), or a DTensor Shard(0) on the sampling axis (sequence-parallel).

        Returns:
            [num_rows, H], plain or DTensor Replicate() as `hidden` was. Sequence-parallel rows are
            selected where they are and only those are summed over ranks.
        """
        if not isinstance(hidden, DTensor):
            return hidden.index_select(0, self.logits_indices)
        if hidden.device_mesh.ndim != 1:
            raise ValueError(f"hidden must be on a mesh of one dimension, got {hidden.device_mesh}")
        local = hidden.to_local()
        if hidden.placements[0].is_shard(0):
            chunk = -(-hidden.shape[0] // self.state.axis.size)
            row = self.logits_indices - self.state.axis.rank * chunk
            here = (row >= 0) & (row < local.shape[0])
            if local.shape[0] == 0:
                local = local.new_zeros(1, *local.shape[1:])
            picked = local.index_select(0, torch.where(here, row, 0))
            picked = torch.where(here[:, None], picked, torch.zeros_like(picked))
            picked = self.state.axis.all_reduce(picked, "sum")
        elif hidden.placements[0].is_replicate():
            picked = local.index_select(0, self.logits_indices)
        else:
            raise ValueError(
                f"hidden must be Replicate() or Shard(0), got {hidden.placements[0]}"
            )
        return DTensor.from_local(picked, hidden.device_mesh, [Replicate()], run_check=False)

    def place(self, logits: Tensor, state: SamplingState, *, most_rows: int) -> Logits:
        """Logits of the selected rows -> this rank's view of what it samples.

        Raises:
            ValueError: logits of another shape, dtype, axis or placement than the plan's, a plan of
                another state, or one with more rows a request than `most_rows`.
        """
        error = layout = None
        try:
            layout = self._check(logits, state, most_rows)
        except ValueError as refused:
            error = refused
        given = (getattr(logits, name, None) for name in ("shape", "dtype", "placements"))
        state.agree(error, plan=(self.slots, self.exchange.name, self.num_rows), logits=tuple(given))
        assert layout is not None
        return self.exchange.place(layout.local_Tv, self._splits, layout.width)

    def _check(self, logits: Tensor, state: SamplingState, most_rows: int) -> Layout:
        if self.state is not state:
            raise ValueError("plan must be made for this sampler's state, got another state's")
        if self.max_rows_per_request > most_rows:
            raise ValueError(
                f"plan must have at most {most_rows} rows a request for this sampler, "
                f"got {self.max_rows_per_request}"
            )
        layout = layout_of(logits, axis=state.axis_name, vocab_size=state.vocab_size)
        if layout.axis != state.axis:
            raise ValueError(f"logits must lie on the state's axis {state.axis}, got {layout.axis}")
        if tuple(logits.shape[:-1]) != (self.num_rows,):
            raise ValueError(
                f"logits must have shape [{self.num_rows}, V], one row for each that plan.select "
                f"gives, got {list(logits.shape)}"
            )
        return layout

    def settle(self, result_RW: Tensor) -> Tensor:
        """[R, W] results of the rows here -> [B, W] on every rank, in batch order."""
        return self.exchange.settle(result_RW, self._splits)[self.gathered_src_indices]

    def advance(self, num_sampled_B: Tensor) -> None:
        """Move the state's positions on by what was emitted, unless the caller gave positions."""
        if self.positions is None:
            self.state.positions.index_add_(0, self.batch_slots, num_sampled_B)

    @property
    def _splits(self) -> list[int]:
        return [self.capacity] * self.state.axis.size

    def cost(self, dtype: torch.dtype = torch.float32) -> Cost:
        """Bytes and collectives of this step for logits of a dtype, on one rank."""
        return cost_of(
            self.exchange, self.num_rows, self.state.vocab_size, self.filters, dtype
        )

    def explain(self, dtype: torch.dtype = torch.float32) -> str:
        """Owners, bytes, memory and collectives of this step, as text."""
        cost = self.cost(dtype)
        lines = [
            f"exchange     {self.exchange.name}, {self.state.axis.size} ranks",
            f"requests     {len(self.slots)} in {sum(self.rows_per_rank)} rows; "
            f"logits of {self.num_rows} rows x {self.state.vocab_size} ids, {dtype}",
            f"owned rows   {list(self.rows_per_rank)}, capacity {self.capacity} "
            f"({self.num_rows - sum(self.rows_per_rank)} rows of padding)",
            f"owners       {list(self.owners)}",
            f"receives     {cost.buffer_bytes:,} bytes a rank",
            f"sends        {cost.wire_bytes:,} bytes a rank",
            "collectives  " + (", ".join(cost.collectives) or "none"),
        ]
        return "\n".join(lines)


Policy = Callable[[Sequence[int], Sequence[int], int], list[int]]


def _by_slot(slots: Sequence[int], rows: Sequence[int], ranks: int) -> list[int]:
    return [slot % ranks for slot in slots]


def _by_position(slots: Sequence[int], rows: Sequence[int], ranks: int) -> list[int]:
    chunk = max(1, -(-len(slots) // ranks))
    return [i // chunk for i in range(len(slots))]


def _balanced(slots: Sequence[int], rows: Sequence[int], ranks: int) -> list[int]:
    load = [0] * ranks
    owners = []
    for count in rows:
        owner = load.index(min(load))
        load[owner] += count
        owners.append(owner)
    return owners


POLICIES: dict[str, Policy] = {"slot": _by_slot, "position": _by_position, "balanced": _balanced}
"""Owners of requests from their slots and rows. slot: slot % P; position: i // ceil(B / P); balanced:
the rank with the fewest rows so far, in batch order, ties to the lowest rank."""


class BatchSharder:
    """Makes plans for a state.

    Args:
        state: whose slots are planned.
        owners: "balanced" (fewest rows so far), "slot" (slot % P) or "position" (contiguous chunks).
    """

    def __init__(self, state: SamplingState, *, owners: str = "balanced") -> None:
        if owners not in POLICIES:
            raise ValueError(f"owners must be one of {tuple(POLICIES)}, got {owners!r}")
        self.state = state
        self.owners = owners

    def plan(
        self,
        slots: Sequence[int],
        num_logits: Sequence[int] | None = None,
        *,
        query_start_loc: Sequence[int] | None = None,
        capacity: int | None = None,
        exchange: str | None = None,
        positions: Sequence[int] | Tensor | None = None,
    ) -> ShardPlan:
        """Plan a step. Arguments are host data, the same on every rank.

        Args:
            slots: [B], the requests of this step in batch order.
            num_logits: [B], rows of each request, in [1, K + 1]; one each by default.
            query_start_loc: [B + 1], where each request's hidden rows begin if they are packed; its
                last `num_logits` rows are the ones that get logits.
            capacity: C under `batch`; by default the fullest owner's rows.
            exchange: for this step, by default the state's.
            positions: [B] of each request's next token, instead of the state's, which then stay.

        Raises:
            ValueError: names the argument; on every rank alike, before any collective. The state is
                unchanged, so the next plan works.
        """
        error = plan = None
        try:
            plan = self._plan(slots, num_logits, query_start_loc, capacity, exchange, positions)
        except ValueError as refused:
            error = refused
        self.state.agree(
            error,
            slots=_plain(slots),
            num_logits=_plain(num_logits),
            query_start_loc=_plain(query_start_loc),
            capacity=capacity,
            exchange=exchange or self.state.exchange,
            owners=self.owners,
            positions=positions if isinstance(positions, Tensor) else _plain(positions),
            requests=self.state.digest(slots) if error is None else None,
        )
        assert plan is not None
        self.state.upload()
        return plan

    def _plan(
        self,
        slots_given: Sequence[int],
        num_logits: Sequence[int] | None,
        query_start_loc: Sequence[int] | None,
        capacity: int | None,
        exchange_name: str | None,
        positions: Sequence[int] | Tensor | None,
    ) -> ShardPlan:
        state = self.state
        slots = [state.check_slot(slot) for slot in _host("slots", slots_given)]
        for slot in slots:
            state.params_of(slot)
        if len(set(slots)) < len(slots):
            twice = next(slot for slot in slots if slots.count(slot) > 1)
            raise ValueError(f"slots must be distinct, got {twice} more than once")
        B, P, K = len(slots), state.axis.size, state.num_speculative_tokens
        rows = _counts("num_logits", [1] * B if num_logits is None else num_logits, B, 1, K + 1)
        exchange = exchange_of(check_exchange(exchange_name or state.exchange), state.axis)
        owners = POLICIES[self.owners](slots, rows, P)

        rows_B, owners_B = np.array(rows, dtype=np.int64), np.array(owners, dtype=np.int64)
        rows_P = np.bincount(owners_B, weights=rows_B, minlength=P).astype(np.int64)
        requests_P = np.bincount(owners_B, minlength=P)
        batch = exchange.name == "batch"
        T = int(rows_B.sum())
        fullest = int(rows_P.max()) if B else 0
        if capacity is not None and (integer("capacity", capacity) < fullest or not batch):
            expected = f">= {fullest}, the fullest owner's rows" if batch else 'None without "batch"'
            raise ValueError(f"capacity must be {expected}, got {capacity}")
        C = (capacity or fullest) if batch and B else T if not batch else 0

        # Every row of the step in batch order: its request, its place there, its hidden row.
        row_request_T = np.repeat(np.arange(B), rows_B)
        row_offset_T = np.arange(T) - np.repeat(np.cumsum(rows_B) - rows_B, rows_B)
        source_T = np.arange(T)
        if query_start_loc is not None:
            ends_B = _packed_ends(query_start_loc, rows_B)
            source_T = np.repeat(ends_B - rows_B, rows_B) + row_offset_T

        # The order of logits: `order` lists rows of the step, repeating the first as padding.
        if batch:
            owner_T = owners_B[row_request_T]
            by_owner = np.argsort(owner_T, kind="stable")
            order = np.zeros((P, C), dtype=np.int64)
            place_T = np.arange(T) - (np.cumsum(rows_P) - rows_P)[owner_T[by_owner]]
            order[owner_T[by_owner], place_T] = by_owner
            mine = order[state.axis.rank]
            own_B = np.flatnonzero(owners_B == state.axis.rank)
            request_order = np.argsort(owners_B, kind="stable")
            per_owner = C
            gathered_B = np.empty(B, dtype=np.int64)
            first_P = np.cumsum(requests_P) - requests_P
            sorted_owners = owners_B[request_order]
            gathered_B[request_order] = sorted_owners * per_owner + np.arange(B) - first_P[sorted_owners]
        else:
            order, mine, own_B, gathered_B = np.arange(T), np.arange(T), np.arange(B), np.arange(B)

        most_requests = (int(requests_P.max()) if batch else B) if B else 0
        cu = np.full(most_requests + 1, rows_B[own_B].sum(), dtype=np.int64)
        cu[: len(own_B) + 1] = np.concatenate([[0], np.cumsum(rows_B[own_B])])
        fields = [
            source_T[order.reshape(-1)] if T else order.reshape(-1),
            gathered_B,
            np.array(slots, dtype=np.int64),
            cu,
            row_request_T[mine],
            np.array(slots, dtype=np.int64)[row_request_T[mine]],
            row_offset_T[mine],
        ]
        sizes = [len(field) for field in fields]
        on_device = torch.from_numpy(np.concatenate(fields)).to(state.device, non_blocking=True)
        split = on_device.split(sizes)
        return ShardPlan(
            state=state,
            exchange=exchange,
            slots=tuple(slots),
            owners=tuple(owners),
            rows_per_rank=tuple(int(n) for n in rows_P),
            capacity=C,
            num_rows=order.size,
            local_rows=int(rows_P[state.axis.rank]) if batch else T,
            local_requests=len(own_B),
            max_requests_per_rank=most_requests,
            max_rows_per_request=max(rows, default=0),
            filters=state.filters(slots),
            logits_indices=split[0],
            gathered_src_indices=split[1],
            batch_slots=split[2],
            local_cu_num_logits=split[3],
            row_requests=split[4],
            row_slots=split[5],
            row_offsets=split[6],
            positions=_device_positions(positions, B, state.device),
        )


def _packed_ends(query_start_loc: Sequence[int], rows_B: Array) -> Array:
    """[B] one past each request's last hidden row, checked."""
    B = len(rows_B)
    start = np.array(_counts("query_start_loc", query_start_loc, B + 1, 0, None), dtype=np.int64)
    short = np.flatnonzero(np.diff(start) < rows_B)
    if len(short):
        i = int(short[0])
        raise ValueError(
            f"query_start_loc must leave request {i} at least {rows_B[i]} hidden rows, "
            f"got {start[i + 1] - start[i]} (from {start[i]} to {start[i + 1]})"
        )
    return start[1:]


def _host(name: str, values: Sequence[int]) -> list[int]:
    """A sequence of ints; arrays and CPU tensors too. Device tensors would need a sync: refused."""
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise ValueError(f"{name} must be host data, got a tensor on {values.device}")
    if isinstance(values, Tensor | np.ndarray):
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a sequence of integers, got {values!r}")
    return [integer(f"{name}[{i}]", value) for i, value in enumerate(values)]


def _counts(name: str, values: Sequence[int], length: int, low: int, high: int | None) -> list[int]:
    numbers = _host(name, values)
    if len(numbers) != length:
        raise ValueError(f"{name} must have {length} entries, got {len(numbers)}")
    for i, number in enumerate(numbers):
        if number < low or (high is not None and number > high):
            expected = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise ValueError(f"{name}[{i}] must be {expected}, got {number}")
    return numbers


def _device_positions(
    positions: Sequence[int] | Tensor | None, length: int, device: torch.device
) -> Tensor | None:
    """Positions given by the caller, on the device."""
    if positions is None:
        return None
    if isinstance(positions, Tensor) and positions.device.type != "cpu":
        if positions.shape != (length,) or positions.dtype != torch.int64:
            raise ValueError(
                f"positions must be int64 of shape ({length},), "
                f"got {positions.dtype} of shape {tuple(positions.shape)}"
            )
        return positions.clamp(min=0)
    return torch.tensor(_counts("positions", positions, length, 0, None), dtype=torch.int64).to(device)


def _plain(values: object) -> object:
    """A form of host data whose repr compares by value."""
    return values.tolist() if isinstance(values, Tensor | np.ndarray) else values
