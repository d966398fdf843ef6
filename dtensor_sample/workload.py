"""What a step is about, in shapes alone: enough to count its cost under every exchange."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtensor_sample.cost import (
    Cost,
    Shape,
    cost_of,
    cost_of_verifying,
    draft_cache_bytes,
    shape_of,
    within,
)
from dtensor_sample.exchange import Axis, Exchange, exchange_of
from dtensor_sample.params import Filters


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step on P ranks: B requests, some with more than one row of logits."""

    ranks: int
    """P."""
    rows_B: Sequence[int]
    """[B] rows of each request, >= 1."""
    owners_B: Sequence[int]
    """[B] the rank that owns it under `batch`."""
    vocab_size: int
    """V."""
    filters: Filters
    """What any request needs."""
    dtype: torch.dtype
    """Of the logits."""
    K: int = 0
    """num_speculative_tokens."""
    method: str | None = None
    """How drafts are verified; None: one token a row is sampled."""
    draft_dtype: torch.dtype | None = None
    """Of the draft logits; None: all drafts are one-hot."""
    capacity: int | None = None
    """Rows of an owner with padding, if more than needed."""
    lanes: int | None = None
    """Requests with padding, if there may not be as many as rows."""
    graphed: bool = False
    """Whether steps of other exchanges are padded too, to P times as many rows."""
    budget: int | None = None
    """How many drafts of the batch are verified at most; None: all."""

    @property
    def rows(self) -> int:
        """Rows of logits without padding."""
        requests = len(self.rows_B)
        return requests + within(self.budget, sum(self.rows_B) - requests)

    def exchange(self, name: str) -> Exchange:
        """An exchange over as many ranks, of no process group."""
        return exchange_of(name, Axis("", self.ranks, 0))

    def shape(self, name: str) -> Shape:
        """Rows of each holder under an exchange."""
        shape = shape_of(name == "batch", self.ranks, self.rows_B, self.owners_B, self.budget)
        if self.capacity is None or shape.rows == 0 or not (name == "batch" or self.graphed):
            return shape
        C = self.capacity * self.ranks // shape.holders
        requests = C if self.lanes is None else self.lanes // shape.holders
        return Shape(shape.holders, C, requests, C if self.K else 0)

    def cost(self, name: str) -> Cost:
        """The cost of the step under an exchange."""
        how = (self.vocab_size, self.filters, self.dtype)
        exchange, shape = self.exchange(name), self.shape(name)
        if self.method is None:
            return cost_of(exchange, shape, *how)
        return cost_of_verifying(
            exchange, shape, self.K, *how, draft_dtype=self.draft_dtype, method=self.method
        )

    def logits_bytes(self, name: str) -> int:
        """Bytes of the logits shard that the step is handed: padding counts under `batch`."""
        width = -(-self.vocab_size // self.ranks)
        return self.shape(name).num_rows * width * self.dtype.itemsize

    def cache_bytes(self, name: str, slots: int) -> int:
        """Bytes of draft logits that a rank keeps for `slots` requests."""
        if self.draft_dtype is None:
            return 0
        exchange = self.exchange(name)
        return draft_cache_bytes(exchange, slots, self.K, self.vocab_size, self.draft_dtype)
