"""The draft-logits cache: what each draft token was drawn from, kept where it will be verified.

Verification needs the distribution q of every draft. Its logits are kept as they came, before
temperature and in the draft's dtype, and q is computed again from what was stored. Under `batch`
each rank keeps the drafts of the requests that it owns, `[ceil(slots / P), K, V]`; under `vocab` it
keeps its own columns of all, `[slots, K, v]`: 1/P of the bytes either way. Under `replicate` every
rank keeps everything.

Who keeps what is host data, the same on every rank. A row is worth nothing until it was written for
the request that is in the slot now, and nothing again once its drafts were verified; since drafts
are drawn anew every step, their owners can be balanced anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtensor_sample.exchange import Axis, Exchange, Logits
from dtensor_sample.ops import store

if TYPE_CHECKING:
    from dtensor_sample.plan import ShardPlan


@dataclass(slots=True)
class _Kept:
    owner: int
    """The rank that keeps it; 0 where every rank does."""
    block: int
    """Which K rows of the owner's cache."""
    steps: int = 0
    """How many draft tokens are written."""


class DraftCache:
    """Draft logits of up to `num_slots` requests with up to K draft tokens each.

    Args:
        axis: the ranks that share it.
        num_slots: slots of the state.
        K: num_speculative_tokens.
        vocab_size: V.
    """

    def __init__(self, axis: Axis, *, num_slots: int, K: int, vocab_size: int) -> None:
        self.axis, self.num_slots, self.K, self.vocab_size = axis, num_slots, K, vocab_size
        self.exchange: str | None = None
        """Under which exchange drafts are kept, from the first one on."""
        self.logits_MSw: Tensor | None = None
        """[blocks * K, 1, w]: w = V, or v under `vocab`; None before the first draft."""
        self.columns = 0
        """Columns of a vocabulary shard of the draft logits, padding included."""
        self._kept: dict[int, _Kept] = {}
        self._free: list[list[int]] = []

    @property
    def bytes(self) -> int:
        """Bytes of draft logits that this rank has allocated."""
        return 0 if self.logits_MSw is None else self.logits_MSw.nbytes

    def pinned(self, slot: int, exchange: Exchange) -> int | None:
        """The rank that must verify a slot, since it keeps its drafts; None: any will do."""
        batch = exchange.name == self.exchange == "batch"
        return self._kept[slot].owner if batch and slot in self._kept else None

    def room(self) -> list[int]:
        """Of how many more requests each rank can keep drafts."""
        if self.exchange == "batch":
            return [len(free) for free in self._free]
        return [-(-self.num_slots // self.axis.size)] * self.axis.size

    def steps(self, slot: int) -> int:
        """How many draft tokens of a slot have logits here; 0 with one-hot drafts or none."""
        return self._kept[slot].steps if slot in self._kept else 0

    def first_row(self, slot: int) -> int:
        """The row of draft token 0 of a slot, on its owner; -1 without logits."""
        return self._kept[slot].block * self.K if slot in self._kept else -1

    def digest(self, slots: Sequence[int]) -> object:
        """What must be the same on every rank about the drafts of `slots`."""
        return [(self._kept[s].owner, self._kept[s].steps) if s in self._kept else 0 for s in slots]

    def check(self, plan: ShardPlan, logits: object) -> None:
        """Refuse a step in which the drafts that its requests have could not be read.

        Raises:
            ValueError: drafts kept under another exchange or by another rank than the owner, or in
                other columns than those of the logits beside them.
        """
        for slot, owner in zip(plan.slots, plan.owners, strict=True):
            if slot not in self._kept:
                continue
            self._check_layout(plan.exchange, logits)
            if self.pinned(slot, plan.exchange) not in (None, owner):
                raise ValueError(
                    f"plan must be made after the drafts of slot {slot} were drawn: rank "
                    f"{self._kept[slot].owner} keeps them, and the plan's owner is rank {owner}"
                )

    def check_step(self, plan: ShardPlan, step: int, keep: Sequence[bool], logits: object) -> None:
        """Refuse drafts that could not be kept: the arguments of `write`, before any collective.

        Raises:
            ValueError: steps out of order, chosen tokens after drawn ones, logits of another dtype
                or layout than the cache's, or a plan made when its owners had more room.
        """
        self.check(plan, logits)
        if self.logits_MSw is not None and any(keep):
            dtype = getattr(logits, "dtype", None)
            if dtype != self.logits_MSw.dtype:
                raise ValueError(f"draft_logits must stay {self.logits_MSw.dtype}, got {dtype}")
            self._check_layout(plan.exchange, logits)
        room = self.room() if plan.exchange.name == "batch" else [self.num_slots] * self.axis.size
        for slot, owner, wanted in zip(plan.slots, plan.owners, keep, strict=True):
            if wanted and step > self.steps(slot):
                raise ValueError(
                    f"step must be at most {self.steps(slot)} for slot {slot}, the number of its "
                    f"draft tokens so far, got {step}"
                )
            if not wanted and step > 0 and slot in self._kept:
                raise ValueError(
                    f"step must be 0 for greedy drafts of slot {slot}, since those before were "
                    f"drawn, got {step}"
                )
            room[owner] -= wanted and slot not in self._kept
            if room[owner] < 0:
                raise ValueError(
                    f"plan must be made after other drafts were drawn: its owner of slot {slot}, "
                    f"rank {owner}, has no room left to keep more"
                )

    def write(
        self, logits: Logits, plan: ShardPlan, step: int, keep: Sequence[bool], width: int
    ) -> None:
        """Keep the logits of draft token `step`.

        Args:
            logits: of the plan's local rows, as its exchange placed them. Padding writes nothing.
            plan: of one row a request.
            step: in [0, K); 0 begins a new block of drafts.
            keep: [B], False for drafts that were chosen rather than drawn: one-hot.
            width: of the whole logits, padding of the vocabulary included.
        """
        if any(keep) and self.logits_MSw is None:
            self._allocate(logits, plan.exchange, width)
        local = []
        for slot, owner, wanted in zip(plan.slots, plan.owners, keep, strict=True):
            if not wanted:
                self.forget([slot])
            else:
                self._of(slot, owner if plan.exchange.name == "batch" else 0).steps = step + 1
            if plan.exchange.name != "batch" or owner == self.axis.rank:
                local.append(self.first_row(slot) + step if wanted else -1)
        if self.logits_MSw is not None and any(keep):
            rows = torch.full((logits.x_NSv.shape[0],), -1)
            rows[: len(local)] = torch.tensor(local, dtype=torch.int64)
            rows = rows.to(self.logits_MSw.device, non_blocking=True)
            store(self.logits_MSw.flatten(1), rows, logits.x_NSv)

    def forget(self, slots: Sequence[int]) -> None:
        """Invalidate the drafts of some slots, if they have any."""
        for slot in slots:
            if (kept := self._kept.pop(slot, None)) is not None:
                self._free[kept.owner].append(kept.block)

    def _check_layout(self, exchange: Exchange, logits: object) -> None:
        if exchange.name != self.exchange:
            raise ValueError(
                f'exchange must be "{self.exchange}", under which drafts are kept, '
                f'got "{exchange.name}"'
            )
        shape = getattr(logits, "shape", ())
        if exchange.name == "vocab" and shape and self._columns(shape[-1]) != self.columns:
            raise ValueError(
                f"logits must have {self.columns} columns a rank with padding, as the draft logits "
                f'that are kept under "vocab", got {self._columns(shape[-1])}'
            )

    def _columns(self, width: int) -> int:
        """Columns of every vocabulary shard but shorter last ones."""
        return -(-width // self.axis.size)

    def _allocate(self, logits: Logits, exchange: Exchange, width: int) -> None:
        holders = self.axis.size if exchange.name == "batch" else 1
        blocks = -(-self.num_slots // holders)
        kept = logits.x_NSv.shape[2] if exchange.name == "vocab" else self.vocab_size
        with torch.inference_mode(False):  # written by steps inside and outside of it
            self.logits_MSw = torch.empty(
                (blocks * self.K, 1, kept), dtype=logits.x_NSv.dtype, device=logits.x_NSv.device
            )
        self.exchange, self.columns = exchange.name, self._columns(width)
        self._free = [list(range(blocks)) for _ in range(holders)]

    def _of(self, slot: int, holder: int) -> _Kept:
        """The entry of a slot, with a block of the holder's if it has none yet."""
        if slot not in self._kept:
            self._kept[slot] = _Kept(holder, self._free[holder].pop())
        return self._kept[slot]
