"""What a run costs: time of each part of a step, bytes moved, memory for logits."""

from collections import defaultdict
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

from dtensor_sample import BatchSharder, ShardPlan


class Meter:
    """Adds up the steps of a run. On GPUs it records events, and reads them when a step is over."""

    def __init__(self, device_type: str) -> None:
        self._cuda = device_type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self._steps: list[dict[str, float]] = []
        self._exchanges: set[str] = set()
        self._tokens = self._wire_bytes = self._logits_bytes = self._replicated_bytes = 0
        self._most_requests = 0
        self._begin = self._end = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._begin = self._begin or perf_counter()
        self._marks = [("", self._now())]

    def lap(self, part: str) -> None:
        """Count the time since the last mark as spent on `part`."""
        self._marks.append((part, self._now()))

    def stop(self, plan: ShardPlan, sharder: BatchSharder, dtype: torch.dtype) -> None:
        """End a step whose tokens have reached the host."""
        self._end = perf_counter()
        step: dict[str, float] = defaultdict(float)
        for (_, begin), (part, end) in pairwise(self._marks):
            step[part] += begin.elapsed_time(end) if self._cuda else (end - begin) * 1e3
        self._steps.append(step)
        self._exchanges.add(plan.exchange.name)
        self._tokens += len(plan.slots)
        cost = plan.cost(dtype)
        self._wire_bytes += cost.wire_bytes
        self._logits_bytes = max(self._logits_bytes, cost.buffer_bytes)
        if len(plan.slots) > self._most_requests:
            self._most_requests = len(plan.slots)
            replicated = sharder.plan(plan.slots, exchange="replicate").cost(dtype)
            self._replicated_bytes = replicated.buffer_bytes

    def figures(self) -> dict[str, Any]:
        """The run in numbers; times of a step are medians, bytes are those of one rank."""
        seconds = self._end - self._begin
        parts = {part: median(step[part] for step in self._steps) for part in self._steps[0]}
        return {
            "exchange": ", ".join(sorted(self._exchanges)),
            "tokens": self._tokens,
            "seconds": seconds,
            "tokens_per_second": self._tokens / seconds,
            "steps": len(self._steps),
            "step_ms": parts | {"total": median(sum(step.values()) for step in self._steps)},
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
