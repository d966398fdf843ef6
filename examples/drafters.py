"""Drafts from a second model."""

from collections.abc import Sequence

from llama import Batch, Llama

from dtensor_sample import BatchSharder, DraftSampler, SamplingState


class ModelDrafter:
    """Drafts what a second model says, with each request's own sampling parameters.

    K drafts take K steps, each of one more token a request. The first also shows the model what it
    has not seen of the text: all of it at first, later what verification added.
    """

    def __init__(self, model: Llama, state: SamplingState) -> None:
        self.wire_bytes = 0
        """Bytes that drawing drafts has made this rank send so far."""
        self._model, self._state = model, state
        self._sharder, self._sampler = BatchSharder(state), DraftSampler(state)
        self._num_cached: dict[int, tuple[object, int]] = {}
        """By slot: the request, and how many of its tokens the model has cached, drafts too."""

    def propose(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> tuple[list[list[int]], list[bool]]:
        drafts: list[list[int]] = [[] for _ in slots]
        requests = [self._state.request(slot) for slot in slots]
        cached = [0] * len(slots)
        for i, slot in enumerate(slots):
            request, count = self._num_cached.get(slot, (None, 0))
            if request is requests[i]:
                # Of cached drafts some were refused. The last token never is cached: the target
                # emitted it.
                cached[i] = min(count, len(token_ids[i]) - 1)
        for step in range(max(limits, default=0)):
            # A request without a draft for the step before: the model's logits are not numbers.
            live = [i for i, own in enumerate(drafts) if len(own) == step < limits[i]]
            if not live:
                break
            batch = Batch.pack(
                [slots[i] for i in live],
                [[*token_ids[i], *drafts[i]][cached[i] :] for i in live],
                [cached[i] for i in live],
                device=self._state.device,
            )
            # A plan for each step: what the first drafts are drawn from binds requests to owners.
            plan = self._sharder.plan(
                [slots[i] for i in live], query_start_loc=batch.query_start_loc
            )
            logits = self._model.lm_head(plan.select(self._model(batch)))
            drawn = self._sampler(logits, plan, step=step).tolist()
            self.wire_bytes += plan.cost(logits.dtype).wire_bytes
            for i, token_id in zip(live, drawn, strict=True):
                cached[i] = len(token_ids[i]) + step
                if token_id >= 0:
                    drafts[i].append(token_id)
        self._num_cached.update(zip(slots, zip(requests, cached, strict=True), strict=True))
        return drafts, [request.params.greedy for request in requests]
