"""One step: who owns what, where each row of logits comes from and where each result goes.

A plan is a pure function of replicated host data (slots, rows per request, and where what earlier
steps kept of them lies), so ranks never talk to agree on one. Under `batch`, rows are listed owner
after owner, in batch order within each, padded to one capacity C per owner: what `Shard(0)` of a
DTensor [P * C, V] means. Padding repeats a valid row, and its result is dropped. Under `vocab` and
`replicate` rows stay in batch order, and only those of a `GraphedStep` are padded: to P capacities,
behind the last.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dtensor_sample import check, indices, ops
from dtensor_sample.choose import machine_of
from dtensor_sample.cost import Cost, Shape, cost_of, cost_of_verifying, with_report
from dtensor_sample.draft.admit import Lanes, best_first, locate
from dtensor_sample.exchange import Exchange, Logits
from dtensor_sample.explain import Explanation, explain
from dtensor_sample.layout import Layout, axis_index, check_dtype, layout_of, vocab_sharded
from dtensor_sample.output import SamplerOutput
from dtensor_sample.params import Filters, RowParams, Wants
from dtensor_sample.process import Needs, TokenBitmask
from dtensor_sample.state import Request, SamplingState
from dtensor_sample.workload import Workload


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardPlan:
    """One step's owners, splits and indices. P ranks, B requests, T rows, C rows per owner."""

    state: SamplingState
    """What the plan was made for."""
    version: int
    """The state's, when the plan was made."""
    exchange: Exchange
    """How this step's logits meet the sampler; `exchange.name` is its name."""
    slots: tuple[int, ...]
    """[B] in batch order."""
    requests: tuple[Request, ...]
    """[B] what was in each slot: a plan is refused once another request is."""
    num_logits: tuple[int, ...]
    """[B] rows of each request; with a budget, at most."""
    budget: int | None
    """How many drafts of the batch are verified at most, those that `admit` is told; None: all."""
    owners: tuple[int, ...]
    """[B] the rank that samples each request."""
    rows_per_rank: tuple[int, ...]
    """[P] rows each rank owns: the splits to send, before padding; with a budget, at most."""
    capacity: int
    """C: rows per owner with padding, under `batch`; otherwise all rows, T without padding."""
    num_rows: int
    """Rows of logits: P * C under `batch`, C otherwise."""
    bucketed: bool
    """Whether the capacity is one of a `GraphedStep`'s."""
    num_hidden_rows: int
    """Rows of hidden states that `select` needs; at least, if `sequences` or `bucketed`."""
    sequences: bool
    """Whether they are packed sequences: a `query_start_loc` was given."""
    local_rows: int
    """Rows that this rank samples, padding left out; with a budget, at most."""
    local_requests: int
    """Requests that this rank samples."""
    max_requests_per_rank: int
    """Most requests of any rank."""
    request_capacity: int
    """Requests per owner with padding: as many as results that each owner sends."""
    draft_capacity: int
    """Drafts per owner with padding: rows but the last of each request."""
    max_rows_per_request: int
    """Most rows of any request."""
    filters: Filters
    """What any request of the batch needs."""
    wants: Wants
    """What any request of the batch wants told of its tokens."""
    draft_blocks: tuple[int, ...]
    """[B] which block of the draft cache has, or would have, each request's drafts; -1: none."""
    draft_steps: tuple[int, ...]
    """[B] how many draft tokens of each request had their logits kept when the plan was made, or
    will have in the draft step that it was made `after`."""
    promised: bool
    """Whether it was made after one that has not run yet."""
    bound: str | None
    """The exchange that "auto" had to be, if any, when it was made."""
    packed: Tensor
    """All index tensors below, one after another: what a step uploads."""
    needs: Needs
    """What any of them asks of its values."""
    logits_indices: Tensor
    """[num_rows] int64: for each row of logits, its row of hidden states."""
    gathered_src_indices: Tensor
    """[B] int64: where each request lies among gathered results, owner after owner; in a plan of
    a `GraphedStep` as many as its capacity allows, here and in `batch_slots`."""
    batch_slots: Tensor
    """[B] int64: slots on the device; of padding, one behind the last."""
    local_cu_num_logits: Tensor
    """[request_capacity + 1] int64: where each local request's rows begin; the end repeats."""
    row_requests: Tensor
    """[R] int64: each local row's request, as an index into the batch. R counts padding."""
    row_slots: Tensor
    """[R] int64: each local row's slot."""
    row_offsets: Tensor
    """[R] int64: each local row's place in its request."""
    row_numbers: Tensor
    """[R] int64: each local row's place among all rows of the step, in batch order."""
    row_draft_rows: Tensor
    """[R] int64: the row of the draft cache for draft 0 of each local row's request; -1 for padding
    and where there is no room. Like `row_draft_steps` empty without speculative tokens."""
    row_draft_steps: Tensor
    """[R] int64: `draft_steps` of each local row's request."""
    asked: Tensor
    """[B * (5 + most given ids)] int64: what each request wants told, as in `Wants`, and its given
    ids, then -1; empty if none wants anything."""
    lanes: Tensor
    """What `admit` needs to know of each request, see `Lanes`; empty without a budget."""
    positions: Tensor | None
    """[B] int64 given by the caller, or None: the state's, which then advance."""
    counts: Tensor | None = None
    """[B] int64: how many drafts of each request were admitted; None: all, or none yet."""
    number: int = 0
    """Which plan it is of those of a `GraphedStep`'s step."""

    @cached_property
    def structure(self) -> Hashable:
        """All that decides which operations a step runs and the shapes of its tensors."""
        sizes = (self.capacity, self.num_rows, self.request_capacity, self.draft_capacity)
        told = (self.wants, self.told_rows if self.wants.logprobs else 0)
        kinds = (self.filters, self.needs, told, self.positions is None, any(self.draft_steps))
        return self.exchange, sizes, len(self.batch_slots), len(self.lanes), kinds

    @property
    def told_rows(self) -> int:
        """Of how many rows of each request something can be told."""
        return 1 if self.max_rows_per_request <= 1 else self.state.num_speculative_tokens + 1

    def on(self, packed: Tensor, positions: Tensor | None, number: int) -> "ShardPlan":
        """This plan with its index tensors elsewhere, as one of those of a step."""
        sizes = [getattr(self, name).shape[0] for name in indices.NAMES]
        fields = dict(zip(indices.NAMES, packed.split(sizes), strict=True))
        return replace(self, packed=packed, positions=positions, number=number, **fields)

    def best_first(self, confidences: Tensor, draft_token_ids: Tensor) -> Tensor:
        """How many drafts of each request to verify: those likeliest to be accepted.

        Of all drafts of the batch the `budget` ones with the largest product of confidences up to
        and with their own; ties go to the earlier place in a block, then to the earlier request.
        What is emitted follows the target's distribution exactly, provided that each confidence was
        known before its draft was drawn. Nothing waits for the device.

        Args:
            confidences: [B, K] float32 or float64, the same on every rank: the predicted
                probability that a draft is accepted if those before it are. Clamped to [0, 1], and
                NaN counts as 0. A confidence may depend on the drafts before its own, and on no
                others of its request.
            draft_token_ids: [B, K] int64 on the device; the first that is no id ends a block.

        Returns:
            [B] int64, for `admit`.

        Raises:
            ValueError: the plan has no budget; another shape or dtype.
        """
        lanes, shape = self._lanes(), (len(self.batch_slots), self.state.num_speculative_tokens)
        floats = (torch.float32, torch.float64)
        check.on_device("confidences", confidences, shape, floats, self.packed.device)
        drafts = draft_token_ids
        check.on_device("draft_token_ids", drafts, shape, (torch.int64,), self.packed.device)
        limits = lanes.limit_L, lanes.budget_1
        return best_first(confidences, drafts, *limits, self.state.vocab_size)

    def admit(self, counts: Tensor) -> "ShardPlan":
        """This plan for a step that verifies so many drafts of each request, and no others.

        The step has a row for each request and one for each admitted draft. Where they lie is
        computed on the device, in shapes that only the budget decides. Hidden rows are packed
        likewise, request after request: `hidden_requests` and `hidden_offsets` say which is which.

        Args:
            counts: [B] int64 on the device, the same on every rank. Clamped: to the rows that the
                plan has of each request, then in batch order to the budget.

        Raises:
            ValueError: the plan has no budget; another shape or dtype.

        Example:
            >>> plan = sharder.plan(slots, [5] * len(slots), budget=6)       # doctest: +SKIP
            >>> plan = plan.admit(plan.best_first(confidences, draft_ids))   # doctest: +SKIP
            >>> texts = torch.cat([last_ids[:, None], draft_ids], 1)         # doctest: +SKIP
            >>> ids = texts[plan.hidden_requests, plan.hidden_offsets]       # doctest: +SKIP
            >>> logits = lm_head(plan.select(backbone(ids)))                 # doctest: +SKIP
            >>> output = verifier(logits, plan, draft_ids)                   # doctest: +SKIP
        """
        lanes, L = self._lanes(), len(self.batch_slots)
        check.on_device("counts", counts, (L,), (torch.int64,), self.packed.device)
        if not self.slots:
            return replace(self, counts=counts)
        counts_L = lanes.clamped(counts)
        rows_L, K = lanes.rows(counts_L), self.state.num_speculative_tokens
        packed_L = rows_L.cumsum(0) - rows_L
        hidden_L = torch.where(lanes.hidden_L >= 0, lanes.hidden_L, packed_L)
        me = self.state.axis.rank if self.exchange.name == "batch" else 0
        owned_HQ = lanes.owned_HQ.view(-1, self.request_capacity)
        every = locate(rows_L, owned_HQ, self.capacity)
        request_R, offset_R = every.request_HC[me], every.offset_HC[me]
        draft_row_R = torch.where(every.real_HC[me], lanes.draft_row_L[request_R], -1)
        return replace(
            self,
            counts=counts_L,
            logits_indices=(hidden_L[every.request_HC] + every.offset_HC).flatten(),
            local_cu_num_logits=every.cu_HQ[me],
            row_requests=request_R,
            row_slots=self.batch_slots[request_R],
            row_offsets=offset_R,
            row_numbers=request_R * (K + 1) + offset_R,
            row_draft_rows=draft_row_R,
            row_draft_steps=lanes.draft_steps_L[request_R],
        )

    @cached_property
    def hidden_starts(self) -> Tensor:
        """[B + 1] int64: where each request's hidden rows begin, once drafts are admitted.

        As attention over packed sequences wants to know; the last is how many rows there are.
        """
        rows_L = self._admitted_rows()
        return torch.nn.functional.pad(rows_L.cumsum(0), (1, 0))

    @property
    def hidden_requests(self) -> Tensor:
        """[num_hidden_rows] int64: whose each hidden row is, once drafts are admitted.

        Of a plan without `query_start_loc`. Rows behind the last repeat the first.
        """
        return self._hidden_rows[0]

    @property
    def hidden_offsets(self) -> Tensor:
        """[num_hidden_rows] int64: the place of each of them in its request.

        0 is the last token emitted before this step, j is draft j - 1.
        """
        return self._hidden_rows[1]

    @cached_property
    def _hidden_rows(self) -> tuple[Tensor, Tensor]:
        rows_L = self._admitted_rows()
        if self.exchange.name != "batch":  # all rows are here, in the same order
            return self.row_requests, self.row_offsets
        every_1L = torch.arange(len(rows_L), device=rows_L.device)[None]
        found = locate(rows_L, every_1L, self.num_hidden_rows)
        return found.request_HC[0], found.offset_HC[0]

    def _lanes(self) -> Lanes:
        if self.budget is None:
            raise ValueError("plan must be made with a budget to admit drafts, got None")
        return Lanes.unpacked(self.lanes, len(self.batch_slots))

    def _admitted_rows(self) -> Tensor:
        """[B] int64 rows of each request, now that its drafts were admitted."""
        lanes = self._lanes()
        self._check_admitted()
        assert self.counts is not None
        return lanes.rows(self.counts)

    def _check_admitted(self) -> None:
        if self.budget is not None and self.counts is None:
            raise ValueError(
                f"plan must be given its drafts by plan.admit, since it has a budget of "
                f"{self.budget} for them"
            )

    @property
    def local(self) -> list[bool]:
        """[B] whether this rank samples each request."""
        batch, me = self.exchange.name == "batch", self.state.axis.rank
        return [not batch or owner == me for owner in self.owners]

    def row_params(
        self, stream: int | None = None, step: int = 0
    ) -> tuple[RowParams, Tensor, Tensor]:
        """What the R rows here take from their requests.

        Args:
            stream: of the uniform numbers, see `ops.uniform`; None: none are wanted.
            step: place within a block of drafts, as those count it.

        Returns:
            Parameters, [R] int64 the position of the token that each row emits, and [R] int64
            uniform numbers.
        """
        position_X, place_R = self.positions, self.row_requests
        if position_X is None:
            position_X, place_R = self.state.positions, self.row_slots
        table = self.state.params_table
        *params, position_R, uniform_R = ops.row_params(
            table, self.row_slots, position_X, place_R, self.row_offsets, stream, step
        )
        return RowParams(*params), position_R, uniform_R

    def select(self, hidden: Tensor) -> Tensor:
        """The hidden rows that need logits, in the order in which the exchange wants them.

        Whoever has logits of all rows already may give those: select(logits) is lm_head(select(x)),
        and copies this rank's part of them.

        Args:
            hidden: [N, H], or [N, K, H] with K rows that stay together: one for each row of logits
                in batch order, N = `num_hidden_rows`, or packed sequences if the plan has a
                `query_start_loc`, of which more may follow. Within a `GraphedStep` rows of padding
                follow. A plain tensor (the same on every rank), or a DTensor that on the sampling
                axis is Replicate(), Shard(0) (sequence-parallel), or Shard(-1) (logits).

        Returns:
            [num_rows, H] or [num_rows, K, H], plain as `hidden` was, or a DTensor that on the
            sampling axis is Shard(-1) if `hidden` was, otherwise Replicate(). Sequence-parallel
            rows are selected where they are, and only those travel.

        Raises:
            ValueError: another number of rows, another placement, or another device.
        """
        self._check_admitted()
        shape = check.instance("hidden", hidden, Tensor).shape
        if isinstance(hidden, DTensor) and hidden.device_mesh.ndim > 1:
            shape = hidden.to_local().shape  # other axes keep rows of their own
        least, exact = self.num_hidden_rows, not (self.sequences or self.bucketed)
        if len(shape) not in (2, 3) or shape[0] < least or (exact and shape[0] > least):
            more = " (of longer sequences, give the plan a query_start_loc)" if exact else ""
            raise ValueError(
                "hidden must have shape [N, H] or [N, K, H] with "
                f"N {'=' if exact else '>='} {least}{more}, got {list(shape)}"
            )
        if hidden.device != self.packed.device:
            raise ValueError(f"hidden must lie on {self.packed.device}, got {hidden.device}")
        if not isinstance(hidden, DTensor):
            return self._watched(hidden).index_select(0, self.logits_indices)
        mesh, axis = hidden.device_mesh, self.state.axis
        dim = axis_index(mesh, self.state.axis_name)
        local, placement = hidden.to_local(), hidden.placements[dim]
        own_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[dim]]
        if placement.is_shard(hidden.ndim - 1):
            (name,) = own_mesh.mesh_dim_names or ("tp",)
            picked = self._watched(local).index_select(0, self.logits_indices)
            return vocab_sharded(picked, own_mesh, vocab_size=hidden.shape[-1], axis=name)
        if placement.is_replicate():
            picked = self._watched(local).index_select(0, self.logits_indices)
        elif placement.is_shard(0) and mesh.ndim == 1:
            first_row = axis.rank * -(-hidden.shape[0] // axis.size)
            row = self.logits_indices - first_row
            here = (row >= 0) & (row < local.shape[0])
            # One row of zeros at the end stands for the rows of other ranks.
            local = torch.nn.functional.pad(local, (0, 0) * (len(shape) - 1) + (0, 1))
            picked = local.index_select(0, torch.where(here, row, local.shape[0] - 1))
            picked = axis.all_reduce(picked, "sum")
        else:
            raise ValueError(
                "hidden must be Replicate() or Shard(-1) on the sampling axis, or Shard(0) on a "
                f"mesh of that axis alone, got {hidden.placements} on {mesh}"
            )
        return DTensor.from_local(picked, own_mesh, [Replicate()], run_check=False)

    def _watched(self, rows: Tensor) -> Tensor:
        """The same rows, which a `GraphedStep` that runs is told of."""
        if self.state.on_select is not None and not torch.compiler.is_compiling():
            self.state.on_select(self, rows)
        return rows

    @torch.no_grad()
    def place(
        self,
        logits: Tensor,
        state: SamplingState,
        *,
        most_rows: int,
        steps: int | None = None,
        vocab_size: int | None = None,
        error: ValueError | None = None,
        mask: TokenBitmask | None = None,
        **replicated: object,
    ) -> Logits:
        """Logits of the selected rows -> this rank's view of what it samples, not yet edited.

        Args:
            logits: DTensor [num_rows, V].
            state: the sampler's.
            most_rows: how many rows of a request the sampler can take.
            steps: if given, logits are [num_rows, steps, V]: so many rows lie together.
            vocab_size: of a draft model, if it has ids of its own; by default the state's.
            mask: what the sampler was given, to be checked.
            error: what the sampler's other arguments were refused for, if they were.
            replicated: those arguments, for debug mode to compare.

        Raises:
            ValueError: logits of another shape, dtype, axis or placement than the plan's, a plan of
                another state, or one with more rows a request than `most_rows`; or else `error`.
        """
        layout = None
        try:
            lead = (self.num_rows,) if steps is None else (self.num_rows, steps)
            layout = self._check(logits, state, most_rows, lead, vocab_size or state.vocab_size)
            if mask is not None:
                check.instance("mask", mask, TokenBitmask).check(self)
        except ValueError as refused:
            error = refused
        given = {name: getattr(logits, name, None) for name in ("shape", "dtype", "placements")}
        alike = ("slots", "num_logits", "budget", "owners", "capacity", "num_rows")
        plan = {"exchange": self.exchange.name} | {name: getattr(self, name) for name in alike}
        if isinstance(mask, TokenBitmask):
            replicated |= vars(mask)
        at = {"positions": self.positions, "admitted": self.counts}
        state.agree(error, plan=plan, logits=given, **at, **replicated)
        assert layout is not None
        state.slot_edits.learn(self, len(self.exchange.ids(logits.shape[-1], state.vocab_size)))
        splits = [self.capacity * (steps or 1)] * state.axis.size
        return self.exchange.place(layout.local_Tv, splits, layout.width)

    def check_current(self, state: SamplingState) -> None:
        """ValueError unless the plan is of this state, and of the requests that it has now."""
        if self.state is not state:
            raise ValueError("plan must be made for this sampler's state, got another state's")
        if self.version == state.version:
            return
        for slot, request in zip(self.slots, self.requests, strict=True):
            if state.request(slot) is not request:
                raise ValueError(f"plan must be made after the request in slot {slot} was added")

    def _check(
        self,
        logits: Tensor,
        state: SamplingState,
        most_rows: int,
        lead: tuple[int, ...],
        vocab_size: int,
    ) -> Layout:
        self.check_current(state)
        self._check_admitted()
        if self.max_rows_per_request > most_rows:
            raise ValueError(
                f"plan must have at most {most_rows} rows a request for this sampler, "
                f"got {self.max_rows_per_request}"
            )
        layout = layout_of(logits, axis=state.axis_name, vocab_size=vocab_size)
        if layout.axis != state.axis:
            raise ValueError(
                f"logits must lie on the mesh of the state, axis {state.axis_name!r} with "
                f"{state.axis.size} ranks: got another process group of {layout.axis.size}"
            )
        if tuple(layout.lead) != lead:
            shape = "".join(f"{size}, " for size in lead)
            raise ValueError(
                f"logits must have shape [{shape}V], one row for each that plan.select "
                f"gives, got {[*layout.lead, logits.shape[-1]]}"
            )
        columns = len(self.exchange.ids(logits.shape[-1], state.vocab_size))
        state.slot_edits.check_columns(self, columns)
        return layout

    def settle(self, result_QW: Tensor) -> Tensor:
        """Results of the requests here, or of more rows -> [B, W] on every rank, in batch order."""
        return self._settled(result_QW)[self.gathered_src_indices]

    def deliver(self, result_QW: Tensor) -> SamplerOutput:
        """What `draw` or `verify` yield for the requests here -> the output of the step.

        Positions of the state advance by num_sampled, unless they were given or `finish` does it.
        """
        tokens, src_B = self.state.num_speculative_tokens + 1, self.gathered_src_indices
        settled_TW = self._settled(result_QW)
        at_once = self.positions is None and not self._moves_last
        moving = self.state.padded_positions if at_once else None
        fields = ops.deliver(settled_TW, src_B, tokens, self.batch_slots, moving)
        return SamplerOutput(*fields)

    @property
    def _moves_last(self) -> bool:
        """Whether the step does more between `deliver` and `finish`, which may fail."""
        return self.wants.logprobs or self.needs.edited

    def _settled(self, result_QW: Tensor) -> Tensor:
        """Results of the requests of all ranks, in the order of their owners."""
        capacity = self.request_capacity
        return self.exchange.settle(result_QW[:capacity], [capacity] * self.state.axis.size)

    def finish(self, output: SamplerOutput) -> None:
        """Note what was emitted: it counts, positions advance, and drafts are used."""
        self.state.slot_edits.emit(self, output.token_ids, output.num_sampled)
        if self.positions is None and self._moves_last:
            self.state.padded_positions.index_add_(0, self.batch_slots, output.num_sampled)
        self.state.on_host(self, forget_drafts)

    def cost(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        method: str | None = None,
        draft_dtype: torch.dtype | None = None,
    ) -> Cost:
        """Bytes and collectives of this step, on one rank.

        It is at most that if a `DraftSampler` is greedy, or drafts for requests that ask for
        log-probabilities: those are told of emitted tokens only.

        Args:
            dtype: of the logits.
            method: how drafts are verified; None: "block" if any request has more than one row, and
                otherwise the step samples, or drafts, one token a request.
            draft_dtype: of the draft logits; None: all drafts are one-hot. With `method` it matters
                under `vocab` only.
        """
        check_dtype(dtype)
        shape = Shape(
            self.state.axis.size if self.exchange.name == "batch" else 1,
            self.capacity,
            self.request_capacity,
            self.draft_capacity,
        )
        method = method or ("block" if self.max_rows_per_request > 1 else None)
        how = (self.state.vocab_size, self.filters, dtype)
        rounded = self.needs.wide or bool(self.state.processors)
        values = torch.float32 if rounded else None
        if method is None:
            cost = cost_of(self.exchange, shape, *how, value_dtype=values)
        else:
            K = self.state.num_speculative_tokens
            cost = cost_of_verifying(
                self.exchange,
                shape,
                K,
                *how,
                value_dtype=values,
                draft_dtype=draft_dtype,
                method=method,
            )
        tokens = shape.holders * shape.requests * self.told_rows
        raw = self.state.logprobs_mode.startswith("raw")
        return with_report(cost, self.exchange, tokens, self.wants, raw=raw)

    def explain(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        method: str | None = None,
        draft_dtype: torch.dtype | None = None,
        hidden: int = 0,
    ) -> Explanation:
        """Owners, bytes, memory, collectives and predicted time of this step under each exchange.

        Nothing runs. Printed, it is a table; its fields and `as_json` hold the same figures.

        Args:
            dtype: of the logits.
            method: as for `cost`.
            draft_dtype: as for `cost`; the draft logits of all slots then count as memory.
            hidden: width of the hidden rows, to count those that `select` copies.
        """
        P, batch = self.state.axis.size, self.exchange.name == "batch"
        step = Workload(
            ranks=P,
            rows_B=self.num_logits,
            owners_B=self.owners,
            vocab_size=self.state.vocab_size,
            filters=self.filters,
            dtype=check_dtype(dtype),
            K=self.state.num_speculative_tokens,
            method=method or ("block" if self.max_rows_per_request > 1 else None),
            draft_dtype=draft_dtype,
            lanes=len(self.batch_slots) if self.bucketed else None,
            graphed=self.bucketed,
            budget=self.budget,
        )
        if self.bucketed or self.capacity != step.shape(self.exchange.name).rows:
            step = replace(step, capacity=self.capacity if batch else self.capacity // P)
        return explain(
            step,
            machine_of(self.state.device.type),
            slots=0 if draft_dtype is None else self.state.max_num_reqs,
            hidden=hidden,
            taken=self.exchange.name,
            bound=self.bound,
            among=self.state.possible_exchanges,
            details={
                "slots": f"{list(self.slots)}",
                "owners": f"{list(self.owners)}",
                "owned rows": f"{list(self.rows_per_rank)}",
                "padding": f"{self.num_rows - step.rows} rows, to a capacity of {self.capacity}",
            },
        )


def forget_drafts(plan: ShardPlan) -> None:
    """Void what is kept of a plan's drafts: they are used, or will be overwritten."""
    plan.state.drafts.forget(plan.slots)


def check_plan(plan: object, state: SamplingState) -> ShardPlan:
    """`plan` if it is one; ValueError, in debug mode on every rank, if it is not."""
    if not isinstance(plan, ShardPlan):
        state.agree(ValueError(f"plan must be a ShardPlan, got {type(plan).__name__}"))
    assert isinstance(plan, ShardPlan)
    return plan
