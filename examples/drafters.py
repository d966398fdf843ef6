"""Where draft tokens come from: the text itself, or a second model.

A step of the target verifies all drafts of a request at once and emits one token more than it
accepts. So drafts decide how many steps a text takes, never how likely it is.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from llama import Batch, Llama
from prompts import Request

from dtensor_sample import BatchSharder, DraftSampler, SamplingState, ngram_drafts


class Drafter(Protocol):
    """Proposes tokens for a step of the target to verify."""

    one_hot: bool
    """Whether drafts are chosen rather than drawn from a distribution."""
    wire_bytes: int
    """Bytes that drawing drafts has made this rank send so far."""

    def propose(
        self, slots: Sequence[int], requests: Sequence[Request], limits: Sequence[int]
    ) -> list[list[int]]:
        """Drafts of the requests in `slots`, up to a limit for each; the same on every rank."""
        ...


class NgramDrafter:
    """Drafts what followed a request's last tokens when its text had them before."""

    one_hot = True
    wire_bytes = 0

    def propose(
        self, slots: Sequence[int], requests: Sequence[Request], limits: Sequence[int]
    ) -> list[list[int]]:
        pairs = zip(requests, limits, strict=True)
        return [ngram_drafts(request.all_token_ids, limit) for request, limit in pairs]


class ModelDrafter:
    """Drafts what a second model says, with each request's own sampling parameters.

    K drafts take K steps, each of one more token a request. The first also shows the model what it
    has not seen of the text: all of it at first, later what verification added.
    """

    def __init__(self, model: Llama, state: SamplingState, *, greedy: bool) -> None:
        self.one_hot = greedy
        self.wire_bytes = 0
        self._model, self._state = model, state
        self._sharder, self._sampler = BatchSharder(state), DraftSampler(state)
        self._num_cached: dict[int, int] = defaultdict(int)
        """By request, how many tokens the model has cached, drafts included."""

    def propose(
        self, slots: Sequence[int], requests: Sequence[Request], limits: Sequence[int]
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in slots]
        # Of cached drafts some were refused. The last token never is cached: the target emitted it.
        cached = [min(self._num_cached[r.index], r.num_tokens - 1) for r in requests]
        for step in range(max(limits)):
            # A request without a draft for the step before: the model's logits are not numbers.
            live = [i for i, own in enumerate(drafts) if len(own) == step < limits[i]]
            if not live:
                break
            batch = Batch.pack(
                [slots[i] for i in live],
                [(requests[i].all_token_ids + drafts[i])[cached[i] :] for i in live],
                [cached[i] for i in live],
                device=self._state.device,
            )
            # A plan for each step: what the first drafts are drawn from binds requests to owners.
            plan = self._sharder.plan(
                [slots[i] for i in live], query_start_loc=batch.query_start_loc
            )
            logits = self._model.lm_head(plan.select(self._model(batch)))
            token_ids = self._sampler(logits, plan, step=step).tolist()
            self.wire_bytes += plan.cost(logits.dtype).wire_bytes
            for i, token_id in zip(live, token_ids, strict=True):
                cached[i] = requests[i].num_tokens + step
                if token_id >= 0:
                    drafts[i].append(token_id)
        self._num_cached.update(zip((r.index for r in requests), cached, strict=True))
        return drafts
