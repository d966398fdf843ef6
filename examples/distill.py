"""Distillation: text sampled from a target, and small models that learn its distributions.

The target is frozen and stays as it is loaded for decoding. What a drafter is for is to agree with
it: a draft x is accepted with probability min(1, p(x) / q(x)), which on average is the overlap of
both distributions, 1 - TV(p, q). So that is what most of the loss is; cross-entropy, which has a
gradient where q is still far off, is the rest, and all of it at first.

Shapes: S sequences at a time, T tokens of each, N rows, H hidden size, V vocabulary; G key-value
heads, R query heads for each, X = R + 2.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from draft_models import BlockModel, DraftModel, rotary_pair, rotate, save_weights
from llama import Batch, Llama
from torch import Tensor, nn
from weights import Checkpoint

TEMPERATURES = ((1.0, 0.50), (0.7, 0.20), (0.0, 0.30))
"""Temperatures of sampled texts, and the share of each."""
CHAT_SHARE = 0.5
"""Of texts that begin with the chat template; the others begin as documents do."""
FREE_TOKENS = 24
"""Tokens of a document that are drawn at temperature 1 at first, so that greedy ones differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaffold:
    """The tokens of a conversation that its parties do not write."""

    begin: list[int]
    """Up to where the user writes for the first time."""
    answer: list[int]
    """From the end of what the user wrote to where the model answers."""
    again: list[int]
    """From the end of the answer to where the user writes again."""
    end: int
    """The token that ends a message."""
    document: int
    """The token that lies between documents."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Scaffold":
        """Read off what the chat template makes of an empty message.

        Raises:
            ValueError: the model has no template, or one that is built otherwise.
        """
        tokenizer = checkpoint.tokenizer
        ids, ends = tokenizer.encode("", chat=True), tokenizer.eos_token_ids
        places = [i for i, token_id in enumerate(ids) if token_id in ends]
        if len(places) < 2 or len(ends) != 2:
            raise ValueError("the chat template must end messages, and the model know two ends")
        before, last = places[-2:]
        (document,) = ends - {ids[last]}
        return cls(
            begin=ids[:last],
            answer=ids[last + 1 :],
            again=ids[before + 1 : last],
            end=ids[last],
            document=document,
        )


@torch.inference_mode()
def sample_texts(
    model: Llama, scaffold: Scaffold, *, num_texts: int, length: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Let the model write: [S, T] token ids, and [S] the temperature of each text.

    In chats it writes the user's messages too, always at temperature 1; then it answers. An answer
    is followed by another question, a document by another. A text's first token is one that begins
    a document, without the token that lies between documents, which prompts do not have either.
    """
    device = model.embed.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    S = num_texts
    chat_S = torch.rand(S, generator=generator, device=device) < CHAT_SHARE
    values, shares = (torch.tensor(x, device=device) for x in zip(*TEMPERATURES, strict=True))
    drawn_S = torch.rand(S, generator=generator, device=device)
    own_S = values[torch.searchsorted(shares.cumsum(0)[:-1].contiguous(), drawn_S)]
    script, begins = forced_tokens(scaffold, device)
    line_S = torch.where(chat_S, begins["begin"], begins["none"])
    """Where each text is in the script; at its ends (-1) the model writes."""
    asking_S = chat_S.clone()
    free_S = torch.where(chat_S, 0, FREE_TOKENS)
    opening_SV = Decoder(model, num_texts=1, length=1)(script[-1:], 0).expand(S, -1)
    step = Decoder(model, num_texts=S, length=length)
    logits_SV, texts_ST = opening_SV, torch.empty(S, length, dtype=torch.int32, device=device)
    for t in range(length):
        temperature_S = torch.where(asking_S | (free_S > 0), 1.0, own_S)
        drawn_S = draw_tokens(logits_SV, temperature_S, generator)
        wrote_S = script[line_S] < 0
        token_S = torch.where(wrote_S, drawn_S, script[line_S])
        free_S -= wrote_S.to(free_S.dtype)
        line_S = torch.where(wrote_S, line_S, line_S + 1)
        ended_S = wrote_S & chat_S & ((token_S == scaffold.end) | (token_S == scaffold.document))
        turn_S = torch.where(asking_S, begins["answer"], begins["again"])
        line_S = torch.where(ended_S, turn_S, line_S)
        asking_S = asking_S ^ ended_S
        texts_ST[:, t] = token_S
        logits_SV = step(token_S, t)
    return texts_ST, own_S


def forced_tokens(scaffold: Scaffold, device: torch.device) -> tuple[Tensor, dict[str, int]]:
    """All forced passages behind one another, each ended by -1, and where they begin.

    The last token is that between documents.
    """
    script: list[int] = []
    begins = {}
    for name in ("begin", "answer", "again"):
        begins[name] = len(script)
        script += [*getattr(scaffold, name), -1]
    begins["none"] = len(script) - 1
    return torch.tensor([*script, scaffold.document], device=device), begins


def draw_tokens(logits_SV: Tensor, temperature_S: Tensor, generator: torch.Generator) -> Tensor:
    """One token of each row; the likeliest one at temperature 0."""
    noise_SV = torch.empty_like(logits_SV, dtype=torch.float32)
    noise_SV.exponential_(generator=generator).clamp_(min=1e-20).log_()
    noise_SV.mul_(-temperature_S[:, None]).add_(logits_SV)
    return noise_SV.argmax(-1)


class Decoder:
    """A decode step of texts that are all equally long, so that nothing need be masked."""

    def __init__(self, model: Llama, *, num_texts: int, length: int) -> None:
        self._model = model
        self._caches = []
        for layer in model.layers:
            layer.attention.allocate_cache(num_texts, length)
            self._caches.append(layer.attention.cache_SLG2D)
            del layer.attention.cache_SLG2D

    def __call__(self, token_ids_S: Tensor, position: int) -> Tensor:
        """Logits [S, V] of what follows the tokens at `position`."""
        model, config = self._model, self._model.config
        R, D = config.heads_per_group, config.head_dim
        x_SH = model.embed(token_ids_S)
        rotary = rotary_pair(torch.tensor(position, device=x_SH.device), config)
        for layer, cache_SLG2D in zip(model.layers, self._caches, strict=True):
            qkv_SGXD = layer.attention.qkv(layer.attention_norm(x_SH)).unflatten(-1, (-1, R + 2, D))
            cache_SLG2D[:, position, :, 0] = rotate(qkv_SGXD[:, :, R], rotary)
            cache_SLG2D[:, position, :, 1] = qkv_SGXD[:, :, R + 1]
            q_SGRD = rotate(qkv_SGXD[:, :, :R], rotary)
            k_SGLD, v_SGLD = cache_SLG2D[:, : position + 1].transpose(1, 2).unbind(3)
            y_SGRD = F.scaled_dot_product_attention(q_SGRD, k_SGLD, v_SGLD)
            x_SH = x_SH + layer.attention.out(y_SGRD.flatten(1))
            x_SH = x_SH + layer.mlp(layer.mlp_norm(x_SH))
        return F.linear(model.norm(x_SH), model.lm_head.weight)


class Teacher:
    """The target's hidden states of whole texts, those of some layers too."""

    def __init__(self, model: Llama, features: Sequence[int] = ()) -> None:
        self.model, self._features = model, features
        self._outputs: list[Tensor] = []
        layers = list(model.layers)
        for index in features:
            layers[index].register_forward_hook(self._keep)

    @torch.no_grad()
    def __call__(self, token_ids_ST: Tensor) -> tuple[Tensor, Tensor | None]:
        """[S, T, H] what the lm_head takes, and [S, T, F] features, if any."""
        S, T = token_ids_ST.shape
        device = token_ids_ST.device
        rows_ST = torch.arange(S * T, device=device).unflatten(0, (S, T))
        batch = Batch(
            token_ids_N=token_ids_ST.flatten(),
            positions_N=torch.arange(T, device=device).repeat(S),
            slots_N=torch.arange(S, device=device).repeat_interleave(T),
            query_start_loc=list(range(0, S * T + 1, T)),
            rows_ST=rows_ST,
            cells_N=rows_ST.flatten(),
            context_length=T,
        )
        for layer in self.model.layers:
            cache = getattr(layer.attention, "cache_SLG2D", None)
            if cache is None or cache.shape[0] < S or cache.shape[1] < T:
                layer.attention.allocate_cache(S, T)
        self._outputs.clear()
        hidden_STH = self.model(batch).unflatten(0, (S, T))
        features = torch.cat(self._outputs, -1).unflatten(0, (S, T)) if self._features else None
        self._outputs.clear()
        return hidden_STH, features

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._outputs.append(output)


class Agreement(torch.autograd.Function):
    """The loss of rows of hidden states against the target's, in pieces of rows.

    Neither logits nor probabilities outlive their piece: what is kept is the gradient of the hidden
    states. The lm_head is the target's, and is not trained.

    Returns the loss (the weighted mean of ce * KL(p, q) + tv * TV(p, q)), and of each row the
    overlap of p and q, and whether their likeliest tokens are the same.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        target_NH: Tensor,
        head_VH: Tensor,
        weight_N: Tensor,
        ce: float,
        tv: float,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the class."""
        gradient_NH = torch.empty_like(hidden_NH)
        loss_N, overlap_N, same_N = (
            torch.empty_like(weight_N, dtype=torch.float32) for _ in range(3)
        )
        share_N = weight_N / weight_N.sum()
        mix = torch.tensor([ce, tv], device=hidden_NH.device)
        pieces = compiled_pieces() if head_VH.is_cuda else agreement_pieces
        with torch.autocast(hidden_NH.device.type, enabled=False):
            for begin in range(0, len(hidden_NH), rows):
                part = slice(begin, begin + rows)
                q_nV, p_nV = (x[part].to(head_VH.dtype) @ head_VH.T for x in (hidden_NH, target_NH))
                gradient_nV, *told = pieces(q_nV, p_nV, mix)
                loss_N[part], overlap_N[part], same_N[part] = told
                gradient_NH[part] = (gradient_nV @ head_VH) * share_N[part, None]
        ctx.save_for_backward(gradient_NH)
        ctx.mark_non_differentiable(overlap_N, same_N)
        return (loss_N * share_N).sum(), overlap_N, same_N

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the hidden states."""
        (gradient_NH,) = ctx.saved_tensors
        return gradient_NH * gradient, *[None] * 6


def agreement_pieces(q_nV: Tensor, p_nV: Tensor, mix: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the draft's logits [n, V], and [n] loss, overlap and same likeliest token."""
    dtype, same_n = q_nV.dtype, q_nV.argmax(-1) == p_nV.argmax(-1)
    logq_nV, logp_nV = q_nV.float().log_softmax(-1), p_nV.float().log_softmax(-1)
    q_nV, p_nV = logq_nV.exp(), logp_nV.exp()
    more_nV = (q_nV > p_nV).float()
    overlap_n = torch.minimum(p_nV, q_nV).sum(-1)
    kl_n = (p_nV * (logp_nV - logq_nV)).sum(-1)
    over_n1 = (q_nV * more_nV).sum(-1, keepdim=True)
    gradient_nV = mix[0] * (q_nV - p_nV) + mix[1] * q_nV * (more_nV - over_n1)
    loss_n = mix[0] * kl_n + mix[1] * (1 - overlap_n)
    return gradient_nV.to(dtype), loss_n, overlap_n, same_n.float()


@functools.cache
def compiled_pieces() -> Callable[..., tuple[Tensor, ...]]:
    """The same in one kernel or two, for GPUs."""
    return torch.compile(agreement_pieces, dynamic=False)


@dataclass(kw_only=True)
class Recipe:
    """How a drafter is trained."""

    minutes: float
    steps: int = 1_000_000
    """At most."""
    batch: int = 32
    """Texts of a step."""
    lr: float = 1.5e-3
    muon: bool = True
    """Whether matrices are trained with Muon, at the same learning rate."""
    warmup: float = 0.02
    """Share of the time in which the learning rate rises."""
    ce: float = 0.1
    """What becomes of the weight of cross-entropy; it begins as 1."""
    settle: float = 0.4
    """Share of the time after which it has become that."""
    decay: float = 0.8
    """How much less each further position of a block counts."""
    rows: int = 8192
    """Rows of logits at a time."""
    seed: int = 0


class Trainer:
    """Trains one drafter on texts of the target."""

    def __init__(
        self,
        model: DraftModel | BlockModel,
        target: Llama,
        recipe: Recipe,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        self.device = target.embed.weight.device
        self.model, self.target, self.recipe, self._say = model.to(self.device), target, recipe, say
        features = model.features if isinstance(model, BlockModel) else ()
        self.teacher = Teacher(target, features)
        self.embed_VH, self.head_VH = target.embed.weight, target.lm_head.weight
        matrices = [p for name, p in model.named_parameters() if _by_muon(name, p)]
        others = [p for name, p in model.named_parameters() if not _by_muon(name, p)]
        self.optimizers: list[torch.optim.Optimizer] = []
        if recipe.muon:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices, lr=recipe.lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
                )
            )
        else:
            others += matrices
        self.optimizers.append(
            torch.optim.AdamW(others, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01)
        )
        self._generator = torch.Generator().manual_seed(recipe.seed)

    def run(self, texts: np.ndarray, held_out: np.ndarray, path: Path) -> list[float]:
        """Train for the recipe's time; keep weights at `path`; return the loss of each step.

        The learning rate falls with the time spent, as steps to come are unknown.
        """
        recipe, losses = self.recipe, []
        started = logged = saved = perf_counter()
        batches = self._batches(texts)
        self.model.train()
        for step in range(recipe.steps):
            now = perf_counter()
            share = max((now - started) / (60 * recipe.minutes), step / recipe.steps)
            if share >= 1:
                break
            self._set_rate(share)
            ce = 1 + (recipe.ce - 1) * min(share / recipe.settle, 1)
            loss, overlap = self.step(next(batches), ce)
            losses.append(loss)
            if step == 0:
                # What was compiled and loaded on the way does not count.
                loss.item()
                started = perf_counter()
            if now - logged > 10:
                logged = now
                rate = (step + 1) * recipe.batch * texts.shape[1] / (now - started)
                self._say(
                    f"{self.model.kind} {100 * share:3.0f}% step {step:5d} "
                    f"loss {loss.item():.4f} overlap {overlap.mean().item():.4f} "
                    f"ce {ce:.2f} {rate / 1e3:.0f}k tokens/s"
                )
            if now - saved > 45:
                saved = now
                self._say(self.told(held_out[: recipe.batch]))
                save_weights(path, self.model)
        save_weights(path, self.model)
        self._say(f"{self.model.kind}: {len(losses)} steps, {path.stat().st_size / 1e6:.2f} MB")
        self._say(self.told(held_out))
        return [loss.item() for loss in losses]

    def step(self, token_ids_ST: Tensor, ce: float) -> tuple[Tensor, Tensor]:
        """Learn from some texts; return the loss, and the overlap by position of a block."""
        loss, overlap_K, _ = self._loss(token_ids_ST, ce, 1 - ce)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach(), overlap_K

    @torch.no_grad()
    def evaluate(self, texts: np.ndarray) -> tuple[Tensor, Tensor]:
        """By position of a block: the mean overlap, and how often likeliest tokens are the same."""
        self.model.eval()
        results = []
        for begin in range(0, len(texts), self.recipe.batch):
            token_ids_ST = self._tensor(texts[begin : begin + self.recipe.batch])
            _, overlap_K, same_K = self._loss(token_ids_ST, 1.0, 0.0)
            results.append(torch.stack([overlap_K, same_K]) * len(token_ids_ST))
        self.model.train()
        overlap_K, same_K = torch.stack(results).sum(0).cpu() / len(texts)
        return overlap_K, same_K

    def told(self, texts: np.ndarray) -> str:
        """`evaluate` in words."""
        lines = []
        for name, share_K in zip(("overlap", "same top"), self.evaluate(texts), strict=True):
            shares = share_K.tolist() if len(share_K) > 1 else share_K.tolist() * 4
            step = 1 + sum(math.prod(shares[: i + 1]) for i in range(len(shares)))
            told = " ".join(f"{share:.3f}" for share in share_K.tolist())
            lines.append(f"{self.model.kind} held out, {name}: {told}; {step:.2f} tokens a step")
        return "\n".join(lines)

    def _loss(self, token_ids_ST: Tensor, ce: float, tv: float) -> tuple[Tensor, Tensor, Tensor]:
        hidden_STH, features_STF = self.teacher(token_ids_ST)
        embedded_STH = F.embedding(token_ids_ST, self.embed_VH).float()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            if isinstance(self.model, DraftModel):
                own_NH, target_NH = self.model(embedded_STH).flatten(0, 1), hidden_STH.flatten(0, 1)
                weight_N = own_NH.new_ones(len(own_NH), dtype=torch.float32)
                loss, overlap_N, same_N = self._agree(own_NH, target_NH, weight_N, ce, tv)
                return loss, overlap_N.mean(0, keepdim=True), same_N.mean(0, keepdim=True)
            return self._block_loss(embedded_STH, hidden_STH, features_STF, ce, tv)

    def _block_loss(
        self,
        embedded_STH: Tensor,
        hidden_STH: Tensor,
        features_STF: Tensor | None,
        ce: float,
        tv: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Blocks behind one another, beginning anywhere: each row of the target serves once."""
        model = self.model
        assert isinstance(model, BlockModel)
        assert features_STF is not None
        K, T = model.K, hidden_STH.shape[1]
        first = 1 + int(torch.randint(K, (), generator=self._generator))
        anchors_A = torch.arange(first, T - K + 1, K, device=self.device)
        rows_AK = anchors_A[:, None] + torch.arange(K, device=self.device)
        own_SAKH = model(embedded_STH, features_STF.float(), anchors_A)
        markov_SAKr = model.markov(embedded_STH[:, rows_AK])
        biased_SAKH = own_SAKH + model.markov_up(markov_SAKr)
        target_SAKH = hidden_STH[:, rows_AK]
        weight_SAK = (self.recipe.decay ** torch.arange(K, device=self.device)).expand(
            own_SAKH.shape[:3]
        )
        weight_N = weight_SAK.flatten().float()
        loss, overlap_N, same_N = self._agree(
            biased_SAKH.flatten(0, 2), target_SAKH.flatten(0, 2), weight_N, ce, tv
        )
        sure_N = model.confidence_logits(own_SAKH.detach(), markov_SAKr.detach()).flatten().float()
        loss = loss + F.binary_cross_entropy_with_logits(sure_N, overlap_N)
        shape = weight_SAK.shape
        return loss, overlap_N.view(shape).mean((0, 1)), same_N.view(shape).mean((0, 1))

    def _agree(
        self, own_NH: Tensor, target_NH: Tensor, weight_N: Tensor, ce: float, tv: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.recipe.rows
        # Whole pieces, as one that is cut short would be compiled once more.
        short = -len(own_NH) % rows if own_NH.is_cuda else 0
        own_NH, target_NH = (F.pad(x, (0, 0, 0, short)) for x in (own_NH, target_NH))
        loss, overlap_N, same_N = Agreement.apply(  # type: ignore[no-untyped-call]
            own_NH, target_NH, self.head_VH, F.pad(weight_N, (0, short)), ce, tv, rows
        )
        count = len(weight_N)
        return loss, overlap_N[:count], same_N[:count]

    def _set_rate(self, share: float) -> None:
        recipe = self.recipe
        if share < recipe.warmup:
            factor = 0.02 + share / recipe.warmup
        else:
            factor = 0.02 + 0.49 * (1 + math.cos(math.pi * (share - recipe.warmup)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr * min(factor, 1)

    def _batches(self, texts: np.ndarray) -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(texts), generator=self._generator).numpy()
            for begin in range(0, len(order) - self.recipe.batch + 1, self.recipe.batch):
                yield self._tensor(texts[np.sort(order[begin : begin + self.recipe.batch])])

    def _tensor(self, texts: np.ndarray) -> Tensor:
        return torch.from_numpy(texts.astype(np.int64)).to(self.device)


def _by_muon(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and not name.startswith(("placeholders", "confidence"))
