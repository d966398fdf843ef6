"""The draft-logits cache: what each draft token was drawn from, kept where it will be verified.

Verification needs the distribution q of every draft. Its logits are kept as they came, before
temperature and in the draft's dtype, and beside them what weighing them found when the draft was
drawn: a few numbers, for which they would have to be read twice again. Under `batch` each rank
keeps the drafts of the requests that it owns, `[ceil(slots / P), K, V]`; under `vocab` it keeps its
own columns of all, `[slots, K, v]`: 1/P of the bytes either way. Under `replicate` every rank keeps
everything.

Who keeps what is host data, the same on every rank. A row is worth nothing until it was written for
the request that is in the slot now, and nothing again once its drafts were verified; since drafts
are drawn anew every step, their owners can be balanced anew. So can the exchange, once no drafts
are left: `batch` and `vocab` take the same memory, to which each gives a shape of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dtensor_sample.exchange import Axis, Exchange, Logits
from dtensor_sample.ops import store
from dtensor_sample.weigh import Weighed

if TYPE_CHECKING:
    from dtensor_sample.plan import ShardPlan


class _Kept(NamedTuple):
    owner: int
    """The rank that keeps it; 0 where every rank does."""
    block: int
    """Which K rows of the owner's cache."""
    steps: int
    """How many draft tokens are written."""


class DraftCache:
    """Draft logits of up to `num_slots` requests with up to K draft tokens each.

    Args:
        axis: the ranks that share it.
        num_slots: slots of the state.
        K: num_speculative_tokens.
        vocab_size: V.
        moves: whether the exchange may change while there are no drafts; else the first one stays.
    """

    def __init__(self, axis: Axis, *, num_slots: int, K: int, vocab_size: int, moves: bool) -> None:
        self.axis, self.num_slots, self.K, self.vocab_size = axis, num_slots, K, vocab_size
        self.moves = moves
        self.exchange: str | None = None
        """Under which exchange drafts are kept, or have to be; None: any may be next."""
        self._memory: Tensor | None = None
        """What all of them lie in; None before the first draft."""
        self._fields: tuple[Tensor, ...] = ()
        """[M] numbers of each of its rows, as `ops.store` writes them."""
        self._most = 0
        """Logits that it has room for, where shards are longest."""
        self._views: dict[str, Tensor] = {}
        self._width = 0
        """Columns, padding included, of all draft logits ever kept under `vocab`; 0: of none."""
        self._kept: dict[int, _Kept] = {}
        self._free: list[dict[int, None]] = []
        """Free blocks of each holder, the next one first."""

    @property
    def bytes(self) -> int:
        """Bytes of draft logits that this rank has allocated."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def waiting(self) -> bool:
        """Whether drafts of any request are kept."""
        return bool(self._kept)

    def logits(self, exchange: str) -> Tensor | None:
        """[blocks * K, 1, w] what was last written under an exchange; w = V, or v under `vocab`."""
        return self._views.get(exchange)

    def drawn_from(self, exchange: str, first_id_1: Tensor, row_G: Tensor) -> Weighed:
        """What G drafts were drawn from, rows of `logits` without edits; -1: one without tokens.

        `first_id_1`: the id of the first column here.
        """
        logits = self.logits(exchange)
        assert logits is not None  # plans of what is not kept are refused before
        return Weighed(Logits(logits, first_id_1), *self._fields).at(row_G)

    def owners(self) -> dict[int, int]:
        """The rank that must verify each slot that it keeps drafts of, if one must."""
        if self.exchange != "batch":
            return {}
        return {slot: kept.owner for slot, kept in self._kept.items()}

    def room(self) -> list[int]:
        """Of how many more requests each rank can keep drafts."""
        if self.exchange == "batch" and self._free:
            return [len(free) for free in self._free]
        return [-(-self.num_slots // self.axis.size)] * self.axis.size

    def steps(self, slot: int) -> int:
        """How many draft tokens of a slot have logits here; 0 with one-hot drafts or none."""
        return self._kept[slot].steps if slot in self._kept else 0

    def blocks(
        self, slots: Sequence[int], owners: Sequence[int], exchange: Exchange
    ) -> tuple[int, ...]:
        """[B] the block that has each request's drafts, or would; -1: there is no room for them."""
        if exchange.name != (self.exchange or exchange.name):
            return (-1,) * len(slots)
        size, holders = self._blocks(exchange.name)
        free: Sequence[Iterable[int]] = self._free or [range(size)] * holders
        following, blocks = [iter(each) for each in free], []
        for slot, owner in zip(slots, owners, strict=True):
            holder, kept = self._holder(owner, exchange), self._kept.get(slot)
            if kept is not None:
                blocks.append(kept.block if kept.owner == holder else -1)
            else:
                blocks.append(next(following[holder], -1))
        return tuple(blocks)

    def keeps(self, slot: int) -> bool:
        """Whether a rank has drafts of a slot, or room for them."""
        return slot in self._kept

    def digest(self, slots: Sequence[int]) -> object:
        """What must be the same on every rank about the drafts of `slots`."""
        kept = {slot: self._kept.get(slot) for slot in slots}
        return {f"slot {slot}": own and (own.owner, own.steps) for slot, own in kept.items()}

    def check(self, plan: ShardPlan) -> None:
        """Refuse a step in which the drafts that its requests have could not be read.

        Raises:
            ValueError: drafts kept under another exchange, or drawn after the plan was made.
        """
        for slot, owner, block, steps in zip(
            plan.slots, plan.owners, plan.draft_blocks, plan.draft_steps, strict=True
        ):
            kept = self._kept.get(slot)
            if kept is None and steps == 0:
                continue
            if kept is not None:
                self._check_exchange(plan.exchange)
            # A plan that came first was promised at least as many drafts as it can judge.
            known = 0 if kept is None else min(kept.steps, steps) if plan.promised else kept.steps
            place = self._holder(owner, plan.exchange), block
            if kept is None or (kept.owner, kept.block, known) != (*place, steps):
                found = "none are kept" if kept is None else f"{kept.steps} are kept"
                raise ValueError(
                    f"plan must be made after the drafts of slot {slot} were drawn: {found}, by "
                    f"rank {owner if kept is None else kept.owner}, and the plan, whose owner is "
                    f"rank {owner}, knows of {steps}"
                )

    def check_columns(self, logits: object, slots: Sequence[int]) -> None:
        """Refuse logits whose columns lie otherwise than those that are kept of any of `slots`."""
        shape = getattr(logits, "shape", ())
        if self.exchange != "vocab" or not shape or not any(slot in self._kept for slot in slots):
            return
        kept, columns = self._columns(self._width), self._columns(shape[-1])
        if columns != kept:
            raise ValueError(
                f"logits must have {kept} columns a rank with padding, as the draft logits that "
                f'are kept under "vocab", got {columns}'
            )

    def check_step(self, plan: ShardPlan, step: int, keep: Sequence[bool]) -> None:
        """Refuse drafts that could not be kept: the arguments of `keep`, before any collective.

        Raises:
            ValueError: steps out of order, chosen tokens after drawn ones, or a plan made when its
                owners had more room.
        """
        for slot, owner, block, wanted in zip(
            plan.slots, plan.owners, plan.draft_blocks, keep, strict=True
        ):
            kept, holder = self._kept.get(slot), self._holder(owner, plan.exchange)
            if kept is not None or (wanted and self.exchange is not None):
                self._check_exchange(plan.exchange)
            if wanted and step > self.steps(slot):
                raise ValueError(
                    f"step must be at most {self.steps(slot)} for slot {slot}, the number of its "
                    f"draft tokens so far, got {step}"
                )
            if not wanted and step > 0 and kept is not None:
                raise ValueError(
                    f"step must be 0 for greedy drafts of slot {slot}, since those before were "
                    f"drawn, got {step}"
                )
            free = block >= 0 and (not self._free or block in self._free[holder])
            same = kept is not None and (kept.owner, kept.block) == (holder, block)
            if wanted and not (free if kept is None else same):
                raise ValueError(
                    f"plan must be made after other drafts were drawn: its owner of slot {slot}, "
                    f"rank {owner}, has no room for more, or none where the plan looked"
                )

    def check_logits(self, logits: object, exchange: Exchange) -> None:
        """Refuse draft logits of another dtype than those before, or that there is no room for."""
        dtype, shape = getattr(logits, "dtype", None), getattr(logits, "shape", ())
        if self._memory is None or not shape:
            return
        if dtype != self._memory.dtype:
            raise ValueError(f"draft_logits must stay {self._memory.dtype}, got {dtype}")
        if exchange.name == "vocab" and shape[-1] != (self._width or shape[-1]):
            raise ValueError(
                f"draft_logits must have {self._width} columns with padding, as those before under "
                f'"vocab", got {shape[-1]}'
            )
        if self._size(exchange.name, self._columns(shape[-1])) > self._most:
            raise ValueError(
                f'exchange must be "batch", as there is no room for draft logits of {shape[-1]} '
                f'columns under "{exchange.name}": the first ones were kept under another '
                "exchange, or had less padding"
            )

    def keep(self, plan: ShardPlan, step: int, wanted: Sequence[bool]) -> None:
        """Note on the host that draft token `step` of these requests is kept, or not `wanted`."""
        self.forget(slot for slot, keep in zip(plan.slots, wanted, strict=True) if not keep)
        if any(wanted) and not self._free:
            size, holders = self._blocks(plan.exchange.name)
            self.exchange = plan.exchange.name
            self._free = [dict.fromkeys(range(size)) for _ in range(holders)]
        for slot, owner, block, keep in zip(
            plan.slots, plan.owners, plan.draft_blocks, wanted, strict=True
        ):
            if not keep:
                continue
            holder = self._holder(owner, plan.exchange)
            if slot not in self._kept:
                del self._free[holder][block]
            self._kept[slot] = _Kept(holder, block, step + 1)

    def write(
        self,
        logits: Logits,
        drawn: Weighed,
        first_R: Tensor,
        step: int,
        greedy_R: Tensor,
        exchange: Exchange,
        width: int,
    ) -> None:
        """Keep draft logits, and what was found of them, on the device.

        Args:
            logits: R rows, as the exchange placed them.
            drawn: the same rows, edited and weighed.
            first_R: [R] int64, where the first draft of each row's request lies; -1: nowhere.
            step: which draft this is.
            greedy_R: [R] bool, rows that are not kept.
            exchange: by which they are kept.
            width: of the whole logits, padding of the vocabulary included.
        """
        memory_MW = self._viewed(logits, exchange.name, width).flatten(1)
        store(memory_MW, self._fields, first_R, step, greedy_R, logits.x_NSv, *drawn[1:])

    def forget(self, slots: Iterable[int]) -> None:
        """Invalidate the drafts of some slots, if they have any."""
        if not self._kept:
            return
        for slot in slots:
            if (kept := self._kept.pop(slot, None)) is not None:
                self._free[kept.owner][kept.block] = None
        if not self._kept:
            self._free = []
            self.exchange = None if self.moves else self.exchange

    def saved(self) -> tuple[object, ...]:
        """What is kept now, for `restore`."""
        return self.exchange, dict(self._kept), [dict(free) for free in self._free]

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Keep what was kept then."""
        self.exchange, self._kept, self._free = saved

    def _check_exchange(self, exchange: Exchange) -> None:
        if exchange.name != self.exchange:
            raise ValueError(
                f'exchange must be "{self.exchange}", under which drafts are kept, '
                f'got "{exchange.name}"'
            )

    def _holder(self, owner: int, exchange: Exchange) -> int:
        return owner if exchange.name == "batch" else 0

    def _blocks(self, exchange: str) -> tuple[int, int]:
        """Blocks of each holder, and how many holders there are."""
        holders = self.axis.size if exchange == "batch" else 1
        return -(-self.num_slots // holders), holders

    def _columns(self, width: int) -> int:
        """Columns of every vocabulary shard but shorter last ones."""
        return -(-width // self.axis.size)

    def _size(self, exchange: str, columns: int) -> int:
        """Draft logits that a rank keeps whose shard has so many columns."""
        blocks, _ = self._blocks(exchange)
        return blocks * self.K * (columns if exchange == "vocab" else self.vocab_size)

    def _viewed(self, logits: Logits, name: str, width: int) -> Tensor:
        """The memory in the shape that an exchange gives to it."""
        columns, size = self._columns(width), self._size(name, logits.x_NSv.shape[2])
        with torch.inference_mode(False):  # written by steps inside and outside of it
            if self._memory is None:
                every = {name, "batch", "vocab"} if self.moves else {name}
                self._most = max(self._size(each, columns) for each in every)
                self._memory = logits.x_NSv.new_empty(self._most if self.moves else size)
                rows = max(self._blocks(each)[0] for each in every) * self.K
                floats = (logits.x_NSv.new_zeros(rows, dtype=torch.float32) for _ in range(3))
                integers = (
                    logits.first_id_S.new_zeros(shape) for shape in ((rows, 1, 1), rows, rows)
                )
                self._fields = (*floats, *integers)
            rows = self._blocks(name)[0] * self.K
            view = self._memory[:size].view(rows, 1, -1)
        self._views[name] = view
        self._width = width if name == "vocab" else self._width
        return view
