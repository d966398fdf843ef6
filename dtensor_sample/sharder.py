"""Making plans: owners, owner-sorted indices, capacity. Host arithmetic only.

A plan is a pure function of replicated host data, so ranks never talk to agree on one, and the
shapes and the collectives of a step are the same on every rank.
"""

import itertools
from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_sample import check
from dtensor_sample.choose import fastest, machine_of
from dtensor_sample.cost import Shape, shape_of, within
from dtensor_sample.exchange import WHOLE, Exchange, check_exchange, exchange_of
from dtensor_sample.indices import NAMES, Array, Batch, asked_of, indices_of
from dtensor_sample.layout import check_dtype
from dtensor_sample.log import say
from dtensor_sample.params import Filters, SamplingParams, filters_of, wants_of
from dtensor_sample.plan import ShardPlan
from dtensor_sample.process import needs_of
from dtensor_sample.profile import profiled
from dtensor_sample.state import SamplingState

MOST_ROWS = 1 << 24
"""More padding than that is a mistake."""
MOST_REMEMBERED = 8
"""Plans of a sharder."""
POLICIES = ("balanced", "slot", "position")


def assign_owners(
    policy: str,
    slots: Sequence[int],
    rows: Sequence[int],
    pinned: Sequence[int | None],
    room: list[int],
) -> list[int]:
    """The rank that samples each request.

    A request of which some rank keeps drafts, biases or counts stays there. The others go by the
    policy, in batch order, but never to a rank without room to keep theirs while another has some.

    Args:
        policy: "balanced": the rank with the fewest rows, ties to the lowest. "slot": slot % P.
            "position": i // ceil(B / P).
        slots: [B], each request's slot.
        rows: [B], its rows of logits.
        pinned: [B], the rank that it is bound to, if any.
        room: [P], of how many more requests each rank can keep what it must.
    """
    ranks, chunk = len(room), -(-len(slots) // len(room))
    load, room = [0] * ranks, list(room)
    for owner, count in zip(pinned, rows, strict=True):
        if owner is not None:
            load[owner] += count
    owners = []
    for i, (slot, count, bound) in enumerate(zip(slots, rows, pinned, strict=True)):
        if bound is not None:
            owners.append(bound)
            continue
        if policy == "balanced":
            owner = load.index(min(load))
        else:
            owner = slot % ranks if policy == "slot" else i // chunk
        if room[owner] <= 0:
            owner = min(range(ranks), key=lambda rank: (room[rank] <= 0, load[rank]))
        load[owner] += count
        room[owner] -= 1
        owners.append(owner)
    return owners


class BatchSharder:
    """Makes plans for a state.

    Args:
        state: whose slots are planned.
        owners: "balanced", "slot" or "position", see `assign_owners`.
        buckets: row capacities of an owner, to one of which plans are padded with all that they
            hold, so that steps of one capacity have the same shapes: what samplers take and return
            then has `len(plan.batch_slots)` rows, of which those behind the requests mean nothing.
            `GraphedStep` uses them, and hides that.
        dtype: of the logits to come; it matters to what "auto" takes, and to nothing else.
    """

    def __init__(
        self,
        state: SamplingState,
        *,
        owners: str = "balanced",
        buckets: Sequence[int] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.state = check.instance("state", state, SamplingState)
        self.owners = check.one_of("owners", owners, POLICIES)
        self.buckets = sorted(check.integers("buckets", buckets, None, 1, MOST_ROWS))
        self.dtype = check_dtype(dtype)
        self._made: dict[Hashable, ShardPlan] = {}
        """Latest plans, by all that they follow from."""

    @profiled("plan")
    def plan(
        self,
        slots: Sequence[int],
        num_logits: Sequence[int] | None = None,
        *,
        query_start_loc: Sequence[int] | None = None,
        capacity: int | None = None,
        exchange: str | None = None,
        positions: Sequence[int] | Tensor | None = None,
        budget: int | None = None,
        after: ShardPlan | None = None,
    ) -> ShardPlan:
        """Plan a step. Arguments are host data, the same on every rank.

        A step that is like an earlier one may get the plan of that one: its tensors are not to be
        written to.

        Args:
            slots: [B], the requests of this step in batch order.
            num_logits: [B], rows of each request, in [1, K + 1]; one each by default.
            query_start_loc: [B + 1], where each request's hidden rows begin if they are packed; its
                last `num_logits` rows are the ones that get logits. With a budget, the first ones
                of these, one more than drafts are admitted.
            capacity: C under `batch`, which "auto" then is; by default the fullest owner's rows.
            exchange: for this step, by default the state's. "auto" takes what is predicted to be
                fastest, or what wide state of the state is bound to.
            positions: [B], of each request's next token, instead of the state's, which then stay.
                All else that a request has advances with what is emitted even so: its counts, its
                progress towards `min_tokens`, the text that bad words are looked for in. The only
                argument that may lie on the device; negative values there count as 0.
            budget: how many drafts of the batch are verified at most, whichever requests have them;
                `num_logits` then limits those of each. `ShardPlan.admit` tells which. The step has
                at most B + budget rows and padding. None: all drafts.
            after: the plan of a draft step that will have run when this step does, but has not yet:
                requests stay with its owners, and as many drafts as this plan can judge count as
                kept of every request that is in both and not greedy.

        Raises:
            ValueError: names the argument; before any collective, and on every rank alike if
                arguments are equal on all; otherwise use debug mode. The state is unchanged, so the
                next plan works.
        """
        given = slots, num_logits, query_start_loc, capacity, exchange, positions, budget, after
        plan = error = None
        try:
            plan = self._remembered(*given)
        except ValueError as refused:
            error = refused
        self.state.agree(error, **(self._replicated(plan) if self.state.debug else {}))
        assert plan is not None
        self.state.upload()
        self.state.slot_edits.settle(plan)
        return plan

    def _remembered(self, *given: Any) -> ShardPlan:
        """The plan made of the same before, if there is one: most steps are like the last one.

        All that a plan follows from is in the key, so that one made anew would be no other: ranks
        need not have made the same plans before.
        """
        *lists, capacity, exchange, positions, budget, after = given
        state, known = self.state, positions is None and after is None
        # Where drafts lie changes from step to step.
        if not known or state.drafts.waiting or not all(map(_listed, lists)):
            return self._plan(*given)
        lists = [x.tolist() if isinstance(x, np.ndarray) else x for x in lists]
        parts = [None if x is None else tuple(x) for x in lists]
        every = itertools.chain(*(part or () for part in parts), (capacity, exchange, budget))
        if not {int, str, NoneType}.issuperset(map(type, every)):
            return self._plan(*given)
        owners = state.pinned("batch")
        held = owners and (tuple(map(owners.get, parts[0] or ())), tuple(state.room()))
        free = state.bound_exchange, state.needs_whole_rows
        key = *parts, capacity, exchange, budget, free, held or None, state.version
        plan = self._made.get(key)
        if plan is None:
            plan = self._plan(*given)
            if len(self._made) == MOST_REMEMBERED:
                del self._made[next(iter(self._made))]
            self._made[key] = plan
        return plan

    def _replicated(self, plan: ShardPlan | None) -> dict[str, object]:
        """What must be the same on every rank, for debug mode; nothing where a plan was refused.

        What others follow from comes before them.
        """
        if plan is None:
            return {}
        return {
            "slots": plan.slots,
            **self.state.digest(plan.slots),
            "num_logits": plan.num_logits,
            "budget": plan.budget,
            "exchange": plan.exchange.name,
            "capacity": plan.capacity,
            "owners": plan.owners,
            "positions": plan.positions,
            "hidden rows": plan.logits_indices,
        }

    def _plan(
        self,
        slots_given: Sequence[int],
        num_logits: Sequence[int] | None,
        query_start_loc: Sequence[int] | None,
        capacity: int | None,
        exchange_name: str | None,
        positions: Sequence[int] | Tensor | None,
        budget: int | None,
        after: ShardPlan | None,
    ) -> ShardPlan:
        """Check what was asked for; who owns what; what is where; and all of it on the device."""
        state, axis, K = self.state, self.state.axis, self.state.num_speculative_tokens
        slots, rows, budget = self._checked(slots_given, num_logits, budget)
        requests = tuple(state.request(slot) for slot in slots)
        params = [request.params for request in requests]
        filters, wants = filters_of(params), wants_of(params, state.vocab_size)
        auto = self._bound(slots, capacity)
        name = self._named(exchange_name, auto, after)
        state.slot_edits.check_exchange(slots, name)

        promised: dict[int, tuple[int, int]] = {}  # owners and blocks of drafts to come
        if after is not None:
            places = zip(after.owners, after.draft_blocks, strict=True)
            promised = dict(zip(after.slots, places, strict=True))
        bound = state.pinned(name) | {slot: owner for slot, (owner, _) in promised.items()}
        pinned = [bound.get(slot) for slot in slots]
        owners = assign_owners(self.owners, slots, rows, pinned, state.room())
        slots_B, rows_B, owners_B = (np.array(a, dtype=np.int64) for a in (slots, rows, owners))
        by_owners, by_all = (
            shape_of(batch, axis.size, rows_B, owners_B, budget) for batch in (True, False)
        )
        exchange = exchange_of(name or self._fastest(by_owners, by_all, filters), axis)

        batch = exchange.name == "batch"
        least = by_owners if batch else by_all
        shape, lanes, bucketed = self._shaped(least, len(slots), batch, capacity, after)
        given_B = None if positions is None else _on_device(positions, len(slots), state.device)
        hidden_B, num_hidden = np.cumsum(rows_B) - rows_B, by_all.rows
        if query_start_loc is not None:
            hidden_B = _ends(query_start_loc, rows_B) - rows_B
            num_hidden = int((hidden_B + rows_B).max(initial=0))
        elif budget is not None:  # one row of each, until others are admitted
            hidden_B = np.arange(len(slots))
            num_hidden = shape.num_rows if bucketed else num_hidden
        blocks, steps = self._drafts(slots, rows, params, owners, exchange, promised)
        block_B, steps_B = (np.array(a, dtype=np.int64) for a in (blocks, steps))
        holder_B, me = (owners_B, axis.rank) if batch else (np.zeros_like(owners_B), 0)
        draft_rows_B = np.where(block_B >= 0, block_B * K, -1)
        indices, local_requests = indices_of(
            Batch(slots_B, rows_B, holder_B, hidden_B, draft_rows_B, steps_B),
            shape,
            me,
            lanes=lanes,
            no_slot=state.max_num_reqs,
            drafted=K > 0,
            budget=budget,
            packed=query_start_loc is not None,
            asked=asked_of(params, wants, lanes),
        )
        fields = [indices[name] for name in NAMES]
        with torch.inference_mode(False):  # steps inside and outside of it may share a plan
            packed = torch.from_numpy(np.concatenate(fields)).to(state.device, non_blocking=True)
            on_device = packed.split([len(field) for field in fields])

        requests_P = np.bincount(owners_B, minlength=axis.size).tolist()
        drafts_P = np.bincount(owners_B, rows_B - 1, axis.size).astype(np.int64).tolist()
        rows_per_rank = tuple(
            own + within(budget, drafts) for own, drafts in zip(requests_P, drafts_P, strict=True)
        )
        return ShardPlan(
            state=state,
            version=state.version,
            exchange=exchange,
            slots=tuple(slots),
            requests=requests,
            num_logits=tuple(rows),
            budget=budget,
            owners=tuple(owners),
            rows_per_rank=rows_per_rank,
            capacity=shape.rows,
            num_rows=shape.num_rows,
            bucketed=bucketed,
            num_hidden_rows=num_hidden,
            sequences=query_start_loc is not None,
            local_rows=rows_per_rank[me] if batch else by_all.rows,
            local_requests=local_requests,
            max_requests_per_rank=least.requests,
            request_capacity=shape.requests,
            draft_capacity=shape.drafts,
            max_rows_per_request=max(rows, default=0),
            filters=filters,
            wants=wants,
            needs=needs_of(params, state.processors),
            draft_blocks=blocks,
            draft_steps=steps,
            promised=after is not None,
            bound=auto,
            packed=packed,
            **dict(zip(NAMES, on_device, strict=True)),
            positions=given_B,
        )

    def _checked(
        self, slots_given: Sequence[int], num_logits: Sequence[int] | None, budget: int | None
    ) -> tuple[list[int], list[int], int | None]:
        """Slots with requests in them, rows of each, and the budget."""
        state, K = self.state, self.state.num_speculative_tokens
        slots = check.integers("slots", slots_given, None, 0, state.max_num_reqs - 1)
        for slot in slots:
            state.request(slot)
        if len(set(slots)) < len(slots):
            twice = next(slot for i, slot in enumerate(slots) if slot in slots[:i])
            raise ValueError(f"slots must be distinct, got {twice} more than once")
        given = [1] * len(slots) if num_logits is None else num_logits
        rows = check.integers("num_logits", given, len(slots), 1, K + 1)
        if budget is not None:
            budget = check.integer("budget", budget, 0, check.INT64_MAX)
            if K == 0:
                raise ValueError(f"budget must be None without speculative tokens, got {budget}")
        return slots, rows, budget

    def _shaped(
        self, least: Shape, B: int, batch: bool, capacity: int | None, after: ShardPlan | None
    ) -> tuple[Shape, int, bool]:
        """A step's shape with padding, its lanes, and whether they are of a bucket."""
        if capacity is not None:
            if not batch:
                raise ValueError(f'capacity must be None except under "batch", got {capacity}')
            C = check.integer("capacity", capacity, least.rows, MOST_ROWS) * bool(B)
            drafts = C * bool(self.state.num_speculative_tokens)
            return Shape(least.holders, C, C, drafts), B, False
        if not (B and self.buckets):
            return least, B, False
        padded = self._padded(least)
        if padded is None:
            share = self.state.axis.size // least.holders
            raise ValueError(
                f"capacities must reach {-(-least.rows // share)} rows an owner, got {self.buckets}"
            )
        if after is not None and after.bucketed:  # drafts are of as many requests
            lanes, requests = len(after.batch_slots), after.request_capacity
            if lanes < B or requests < least.requests:
                raise ValueError(
                    f"after must be a plan with room for {B} requests, {least.requests} an owner, "
                    f"got one for {lanes}, {requests} an owner"
                )
            return padded._replace(requests=requests), lanes, True
        return padded, padded.num_rows, True

    def _drafts(
        self,
        slots: list[int],
        rows: list[int],
        params: list[SamplingParams],
        owners: list[int],
        exchange: Exchange,
        promised: dict[int, tuple[int, int]],
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """[B] blocks of the draft cache, and [B] drafts with logits in them; see `ShardPlan`."""
        drafts = self.state.drafts
        free = (-1,) * len(slots)
        if self.state.num_speculative_tokens:
            free = drafts.blocks(slots, owners, exchange)
        blocks = (promised.get(slot, (0, own))[1] for slot, own in zip(slots, free, strict=True))
        steps = (
            count - 1 if slot in promised and not own.greedy else drafts.steps(slot)
            for slot, count, own in zip(slots, rows, params, strict=True)
        )
        return tuple(blocks), tuple(steps)

    def _bound(self, slots: Sequence[int], capacity: int | None) -> str | None:
        """What "auto" has to be for these requests; None: any exchange will do."""
        state, drafts, wide = self.state, self.state.drafts, self.state.slot_edits.exchange
        if any(map(drafts.keeps, slots)):
            return drafts.exchange
        if wide is not None and any(state.request(slot).params.needs.wide for slot in slots):
            return wide
        if capacity is not None:
            return "batch"
        return drafts.exchange or state.bound_exchange

    def _named(
        self, exchange: str | None, bound: str | None, after: ShardPlan | None
    ) -> str | None:
        """The exchange that was asked for or that state asks for; None: any will do."""
        state = self.state
        name: str | None = check_exchange(state.exchange if exchange is None else exchange)
        if after is not None:
            check.instance("after", after, ShardPlan).check_current(state)
            if name not in ("auto", after.exchange.name):
                raise ValueError(
                    f'exchange must be "{after.exchange.name}", that of the plan that comes before '
                    f'it, got "{name}"'
                )
            name = after.exchange.name
        if name == "auto":
            name = bound
        if name == "vocab" and state.needs_whole_rows is not None:
            raise ValueError(
                f'exchange must be one of {WHOLE}, got "vocab": {state.needs_whole_rows}'
            )
        return name

    def _padded(self, shape: Shape) -> Shape | None:
        """What a step's shape is padded to; None: no bucket holds it."""
        if not (self.buckets and shape.rows):
            return shape
        # Ranks that hold everything have as many rows as all owners together.
        share = self.state.axis.size // shape.holders
        fit = [bucket * share for bucket in self.buckets if bucket * share >= shape.rows]
        drafts = self.state.num_speculative_tokens > 0
        return Shape(shape.holders, fit[0], fit[0], fit[0] * drafts) if fit else None

    def _fastest(self, by_owners: Shape, by_all: Shape, filters: Filters) -> str:
        """What "auto" takes for a step of these shapes, under `batch` and under the others."""
        state, among = self.state, self.state.possible_exchanges
        batch, every = self._padded(by_owners), self._padded(by_all)
        if batch is None and every is not None:
            batch, among = by_owners, tuple(name for name in among if name != "batch")
        if state.needs_whole_rows is not None:
            say(state.axis, f'"auto" takes one of {WHOLE}: {state.needs_whole_rows}')
        return fastest(
            machine_of(state.device.type),
            batch or by_owners,
            every or by_all,
            state.vocab_size,
            filters,
            self.dtype,
            K=state.num_speculative_tokens,
            method="block" if by_all.drafts > 0 else None,
            among=among,
        )


def _listed(values: object) -> bool:
    flat = isinstance(values, np.ndarray) and values.ndim == 1
    return values is None or isinstance(values, list | tuple | range) or flat


def _ends(query_start_loc: Sequence[int], rows_B: Array) -> Array:
    """[B]: one past each request's last hidden row."""
    start = check.integers("query_start_loc", query_start_loc, len(rows_B) + 1, 0, check.INT64_MAX)
    for i, (begin, end) in enumerate(itertools.pairwise(start)):
        if end - begin < rows_B[i]:
            raise ValueError(
                f"query_start_loc must leave request {i} at least {rows_B[i]} hidden rows, "
                f"got {begin} to {end}"
            )
    return np.array(start[1:], dtype=np.int64)


def _on_device(positions: Sequence[int] | Tensor, length: int, device: torch.device) -> Tensor:
    """Positions given by the caller, on the device. Values already there are clamped, not read."""
    if isinstance(positions, Tensor) and not (positions.is_cpu or isinstance(positions, DTensor)):
        wanted = (torch.Size([length]), torch.int64, device)
        if (positions.shape, positions.dtype, positions.device) != wanted:
            raise ValueError(
                f"positions must be int64 of shape [{length}] on {device} or on the host, got "
                f"{positions.dtype} of shape {list(positions.shape)} on {positions.device}"
            )
        return positions
    numbers = check.integers("positions", positions, length, 0, check.INT64_MAX)
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
