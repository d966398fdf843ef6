"""Drafts from a second model, or from what the target itself computed."""

from collections.abc import Sequence
from typing import Any

import torch
from draft_models import BlockModel, DraftWeights, build, decoder_layers, rotary_pair
from llama import Batch, Llama
from torch import Tensor, nn
from weights import Checkpoint

from dtensor_sample import BatchSharder, DraftSampler, SamplingState
from dtensor_sample.draft.sequential import MarkovHead, SequentialDraftSampler


class ModelDrafter:
    """Drafts what a second model says, with each request's own sampling parameters.

    K drafts take K steps, each of one more token a request. The first also shows the model what it
    has not seen of the text: all of it at first, later what verification added.
    """

    def __init__(self, model: Llama, state: SamplingState) -> None:
        self.wire_bytes = 0
        """Bytes that drawing the last drafts made this rank send."""
        self._model, self._state = model, state
        self._sharder, self._sampler = BatchSharder(state), DraftSampler(state)
        self._num_cached: dict[int, tuple[object, int]] = {}
        """By slot: the request, and how many of its tokens the model has cached, drafts too."""

    def propose(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> tuple[list[list[int]], list[bool]]:
        self.wire_bytes = 0
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


class BlockDrafter:
    """Drafts a block in one pass of a small model that reads hidden states of the target.

    Whenever the target runs, hooks take what some of its layers put out, and keep the keys and
    values that the small model makes of it. They are of every token that the target has seen, of
    drafts too; those that were refused, the next step overwrites. The token emitted last has not
    been seen: it begins the block. The small model is the same on every rank, as what it reads is;
    logits of all positions come from one run of the target's lm_head, sharded over the vocabulary,
    and owners draw the block from them, each token with the bias of the one before.

    Args:
        target: whose features `model` reads; tensor-parallel as it may be.
        model: on the target's device, in its dtype.
        embedding_VH: the target's whole embedding, anywhere.
        lm_head_VH: the weight of its lm_head, whole too.
        state: of the sampler.
        max_length: tokens of the longest text.

    Shapes: N rows of a step of the target, B requests, S slots, L tokens of a text, C of them in
    the window, K queries; H hidden size, G key-value heads, D head size, r rank of the Markov head.
    """

    def __init__(
        self,
        target: Llama,
        model: BlockModel,
        embedding_VH: Tensor,
        lm_head_VH: Tensor,
        state: SamplingState,
        *,
        max_length: int,
    ) -> None:
        self.wire_bytes = 0
        """Bytes that drawing the last drafts made this rank send."""
        self._target, self._model, self._state = target, model.eval().requires_grad_(False), state
        weight = model.project.weight
        with torch.inference_mode():
            w1_Vr = torch.cat([model.markov(part.to(weight)) for part in embedding_VH.split(4096)])
            w2_rV = model.markov_up.weight.T @ lm_head_VH.to(weight).T
            head = MarkovHead(w1_Vr, w2_rV)
        self._sharder, self._sampler = BatchSharder(state), SequentialDraftSampler(state, head)
        S, config = state.max_num_reqs, model.config
        shape = S, max_length, config.num_kv_heads, config.head_dim
        self._keys = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in model.layers]
        self._context_SLH = weight.new_zeros(S, max_length, config.hidden_size)
        self._outputs: list[Tensor] = []
        layers = list(target.layers)
        for index in model.features:
            layers[index].register_forward_hook(self._take)
        target.register_forward_hook(self._remember)

    def propose(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> tuple[list[list[int]], list[bool]]:
        self.wire_bytes = 0
        drafts: list[list[int]] = [[] for _ in slots]
        greedy = [self._state.request(slot).params.greedy for slot in slots]
        begun = [i for i, limit in enumerate(limits) if limit > 0]
        if not begun:
            return drafts, greedy
        own_slots, texts = [slots[i] for i in begun], [token_ids[i] for i in begun]
        plan = self._sharder.plan(own_slots)
        logits = self._target.lm_head(plan.select(self._hidden(own_slots, texts)))
        drawn, _ = self._sampler(logits, plan, [ids[-1] for ids in texts])
        self.wire_bytes = plan.cost(logits.dtype).wire_bytes * logits.shape[1]
        for i, ids in zip(begun, drawn.tolist(), strict=True):
            drafts[i] = [token_id for token_id in ids[: limits[i]] if token_id >= 0]
        return drafts, greedy

    def _hidden(self, slots: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Tensor:
        """[B, K, H] hidden states of the blocks that begin with the last tokens.

        K is that of the state: queries see those before them, so a block may be cut short.
        """
        model, device, K = self._model, self._context_SLH.device, self._state.num_speculative_tokens
        last_B, anchor_B, slot_B = (
            torch.tensor(x, device=device)
            for x in ([ids[-1] for ids in token_ids], [len(ids) - 1 for ids in token_ids], slots)
        )
        C = min(model.window, max(len(ids) - 1 for ids in token_ids))
        context_BH = self._context_SLH[slot_B, anchor_B - 1]
        x_BKH = model.queries(self._target.embed(last_B), context_BH)[:, :K]
        place_BC = anchor_B[:, None] - C + torch.arange(C, device=device)
        own_KK = torch.ones(K, K, dtype=torch.bool, device=device).tril()
        mask_B1KX = torch.cat(
            [
                (place_BC >= 0)[:, None].expand(-1, K, -1),
                own_KK.expand(len(slots), -1, -1),
            ],
            -1,
        ).unsqueeze(1)
        rotary = rotary_pair(anchor_B[:, None] + torch.arange(K, device=device), model.config)
        where = slot_B[:, None], place_BC.clamp(min=0)
        for layer, (k_SLGD, v_SLGD) in zip(decoder_layers(model), self._keys, strict=True):
            x_BKH = layer(x_BKH, rotary, context=(k_SLGD[where], v_SLGD[where]), mask=mask_B1KX)
        hidden_BKH: Tensor = model.norm(x_BKH)
        return hidden_BKH

    def _take(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._outputs.append(output)

    def _remember(self, module: nn.Module, args: tuple[Batch], output: Tensor) -> None:
        """Keep what the small model makes of the target's features in this step."""
        (batch,), model = args, self._model
        context_NH = model.context(torch.cat(self._outputs, -1))
        self._outputs.clear()
        where = batch.slots_N, batch.positions_N
        self._context_SLH[where] = context_NH
        rotary = rotary_pair(batch.positions_N, model.config)
        for layer, kept in zip(decoder_layers(model), self._keys, strict=True):
            for cache_SLGD, new_NGD in zip(kept, layer.keys(context_NH, rotary), strict=True):
                cache_SLGD[where] = new_NGD


def load_block(
    weights: DraftWeights,
    target: Llama,
    checkpoint: Checkpoint,
    state: SamplingState,
    *,
    max_length: int,
) -> BlockDrafter:
    """A block drafter for `target`, which `checkpoint` was read into."""
    model = build(weights)
    assert isinstance(model, BlockModel)
    own = target.embed.weight
    embedding_VH = checkpoint.read("model.embed_tokens.weight")
    model.to(own.device, own.dtype)
    lm_head_VH = embedding_VH
    if not checkpoint.config.tied_embeddings:
        lm_head_VH = checkpoint.read("lm_head.weight")
    return BlockDrafter(target, model, embedding_VH, lm_head_VH, state, max_length=max_length)
