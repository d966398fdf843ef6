"""What a run costs: time of each part of a step, bytes moved, memory for logits."""

from collections import Counter, defaultdict
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

from dtensor_sample import RejectionSampler, Sampler, ShardPlan


class Meter:
    """Adds up the steps of a run. On GPUs it records events, and reads them when a step is over."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.steps: list[dict[str, float]] = []
        """Milliseconds of each part of each step."""
        self._exchanges: set[str] = set()
        self._emitted: Counter[int] = Counter()
        """By a number of tokens: how often a step brought a request as many."""
        self._drafted: Counter[int] = Counter()
        self._accepted: Counter[int] = Counter()
        self._tokens = self._wire_bytes = self._logits_bytes = self._replicated_bytes = 0
        self._most_rows = 0
        self._begin = self._end = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._begin = self._begin or perf_counter()
        self._marks = [("", self._now())]

    def lap(self, part: str) -> None:
        """Count the time since the last mark as spent on `part`."""
        self._marks.append((part, self._now()))

    def stop(
        self,
        plan: ShardPlan,
        sampler: Sampler | RejectionSampler,
        dtype: torch.dtype,
        *,
        one_hot: bool,
        drafting_bytes: int = 0,
    ) -> None:
        """End a step whose tokens have reached the host; drafts, if any, were `one_hot` or not.

        Drawing them made this rank send `drafting_bytes`.
        """
        self._end = perf_counter()
        step: dict[str, float] = defaultdict(float)
        for (_, begin), (part, end) in pairwise(self._marks):
            step[part] += begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3
        self.steps.append(step)
        self._exchanges.add(plan.exchange.name)
        if isinstance(sampler, RejectionSampler):
            draft_dtype = None if one_hot else dtype
            cost = plan.cost(dtype, method=sampler.method, draft_dtype=draft_dtype)
        else:
            cost = plan.cost(dtype)
        self._wire_bytes = max(self._wire_bytes, cost.wire_bytes + drafting_bytes)
        self._logits_bytes = max(self._logits_bytes, cost.buffer_bytes)
        if sum(plan.num_logits) > self._most_rows:
            self._most_rows = sum(plan.num_logits)
            ranks = plan.state.axis.size
            columns = -(-plan.state.vocab_size // ranks)
            everything = self._most_rows * ranks * columns * dtype.itemsize
            self._replicated_bytes = everything if ranks > 1 else 0

    def count(self, tokens: int, *, drafted: int = 0, accepted: int = 0) -> None:
        """A request's share of a step: `tokens` of text, and how many drafts were accepted."""
        self._tokens += tokens
        self._emitted[tokens] += 1
        self._drafted.update(range(drafted))
        self._accepted.update(range(accepted))

    def speculation(self) -> dict[str, Any]:
        """What drafts brought."""
        drafted = [self._drafted[i] for i in range(len(self._drafted))]
        accepted = [self._accepted[i] for i in range(len(drafted))]
        return {
            "drafted_tokens": sum(drafted),
            "accepted_tokens": sum(accepted),
            "drafted_per_position": drafted,
            "accepted_per_position": accepted,
            "acceptance_per_position": [a / d for a, d in zip(accepted, drafted, strict=True)],
            "acceptance_length": 1 + sum(accepted) / max(sum(drafted[:1]), 1),
            "tokens_per_target_step": self._tokens / self._emitted.total(),
            "steps_by_tokens": [self._emitted[n] for n in range(1, max(self._emitted) + 1)],
        }

    def figures(self) -> dict[str, Any]:
        """The run in numbers; times of a step are medians, bytes those of a rank's largest."""
        seconds = self._end - self._begin
        parts = {part: median(step[part] for step in self.steps) for part in self.steps[0]}
        return {
            "exchange": ", ".join(sorted(self._exchanges)),
            "tokens": self._tokens,
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "steps": len(self.steps),
            "step_ms": parts | {"total": median(sum(step.values()) for step in self.steps)},
            "wire_bytes": self._wire_bytes,
            "logits_bytes": self._logits_bytes,
            "replicated_logits_bytes": self._replicated_bytes,
        }

    def _now(self) -> Any:
        if not self._cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
