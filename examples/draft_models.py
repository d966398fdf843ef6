"""Small models that draft for a large one: what they compute, and how they lie on disk.

Both end in the target's own embedding and lm_head, which are most of a small model; so a file has
the layers in between only. `DraftModel` is a Llama of few layers. `BlockModel` sees what the target
computed: hidden states of some of its layers, at all positions but the last token's, are the
context of a block of K queries, the last token and K - 1 placeholders, which come out as the hidden
states of K positions in one pass (DSpark, arXiv 2607.05147). Tokens are then drawn left to right,
each with a bias that the one before it sets: the Markov head. It is of low rank, W1 [V, r] and
W2 [r, V], and lies on disk as what makes it from the target's embedding E: W1 = mlp(E), W2 = U E^T.

Shapes: B sequences, T tokens, Q queries, C positions of context; H hidden size, F features of a
position, D head size, G key-value heads, V vocabulary, r rank.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from llama import LlamaConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from weights import Checkpoint, tensor_names

Pair = tuple[Tensor, Tensor]


class DecoderLayer(nn.Module):
    """Attention and MLP, under the names that Hugging Face gives them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        H, D, units = config.hidden_size, config.head_dim, config.intermediate_size
        queries, keys = config.num_heads * D, config.num_kv_heads * D
        self.head_dim, self.heads_per_group, self.num_units = D, config.heads_per_group, units
        self.input_layernorm = nn.RMSNorm(H, eps=config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(H, eps=config.norm_eps)
        attention = {"q_proj": (H, queries), "k_proj": (H, keys), "v_proj": (H, keys)}
        attention["o_proj"] = (queries, H)
        mlp = {"gate_proj": (H, units), "up_proj": (H, units), "down_proj": (units, H)}

        def linears(sizes: dict[str, tuple[int, int]]) -> nn.ModuleDict:
            return nn.ModuleDict({k: nn.Linear(*size, bias=False) for k, size in sizes.items()})

        self.self_attn, self.mlp = linears(attention), linears(mlp)

    def keys(self, x_BTH: Tensor, rotary: Pair) -> Pair:
        """Keys and values [B, T, G, D] of rows that are normalised already."""
        k_BTGD = self.self_attn["k_proj"](x_BTH).unflatten(-1, (-1, self.head_dim))
        v_BTGD = self.self_attn["v_proj"](x_BTH).unflatten(-1, (-1, self.head_dim))
        return rotate(k_BTGD, rotary), v_BTGD

    def forward(
        self,
        x_BQH: Tensor,
        rotary: Pair,
        *,
        context: Pair | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Rows [B, Q, H] that see the context's keys and values, then their own.

        Without `mask`, of shape [Q, C + Q] or [B, 1, Q, C + Q], each sees itself and those before.
        """
        y_BQH = self.input_layernorm(x_BQH)
        q_BQHD = self.self_attn["q_proj"](y_BQH).unflatten(-1, (-1, self.head_dim))
        kv = self.keys(y_BQH, rotary)
        if context is not None:
            kv = torch.cat([context[0], kv[0]], 1), torch.cat([context[1], kv[1]], 1)
        k, v = (x.transpose(1, 2).repeat_interleave(self.heads_per_group, 1) for x in kv)
        y_BHQD = F.scaled_dot_product_attention(
            rotate(q_BQHD, rotary).transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None
        )
        x_BQH = x_BQH + self.self_attn["o_proj"](y_BHQD.transpose(1, 2).flatten(2))
        y_BQH = self.post_attention_layernorm(x_BQH)
        y_BQH = F.silu(self.mlp["gate_proj"](y_BQH)) * self.mlp["up_proj"](y_BQH)
        out_BQH: Tensor = x_BQH + self.mlp["down_proj"](y_BQH)
        return out_BQH

    @torch.no_grad()
    def copy(self, target: Checkpoint, index: int) -> None:
        """Begin as a layer of the target: with its heads, and as many MLP units as there is room.

        Heads beyond the target's add nothing at first. Units are kept by the size of what they
        read and write.
        """

        def read(name: str) -> Tensor:
            return target.read(f"model.layers.{index}.{name}.weight").float()

        def fill(module: nn.Module, part: Tensor) -> None:
            module.get_parameter("weight")[tuple(map(slice, part.shape))] = part

        fill(self.input_layernorm, read("input_layernorm"))
        fill(self.post_attention_layernorm, read("post_attention_layernorm"))
        nn.init.zeros_(self.self_attn["o_proj"].get_parameter("weight"))
        for name, linear in self.self_attn.items():
            fill(linear, read(f"self_attn.{name}"))
        gate_IH, up_IH = read("mlp.gate_proj"), read("mlp.up_proj")
        down_HI = read("mlp.down_proj")
        size_I = gate_IH.norm(dim=1) * up_IH.norm(dim=1) * down_HI.norm(dim=0)
        kept = size_I.topk(self.num_units).indices.sort().values
        fill(self.mlp["gate_proj"], gate_IH[kept])
        fill(self.mlp["up_proj"], up_IH[kept])
        fill(self.mlp["down_proj"], down_HI[:, kept])


class DraftModel(nn.Module):
    """A Llama without embedding and lm_head, for training; `Llama` runs what it has learnt."""

    kind = "draft"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)

    @classmethod
    def beside(cls, target: Checkpoint, *, layers: Sequence[int], units: int) -> Self:
        """Begin with some layers of the target; key-value heads are rounded up to fours."""
        config = replace(
            target.config.padded(4),
            num_layers=len(layers),
            intermediate_size=units,
            tied_embeddings=True,
        )
        model = cls(config)
        for layer, index in zip(decoder_layers(model), layers, strict=True):
            layer.copy(target, index)
        model.norm.weight.data.copy_(target.read("model.norm.weight"))
        return model

    def forward(self, embedded_BTH: Tensor) -> Tensor:
        """Hidden states [B, T, H] that the lm_head takes, of embedded tokens."""
        x_BTH = embedded_BTH
        positions = torch.arange(x_BTH.shape[1], device=x_BTH.device)
        rotary = rotary_pair(positions, self.config)
        for layer in self.layers:
            x_BTH = layer(x_BTH, rotary)
        hidden_BTH: Tensor = self.norm(x_BTH)
        return hidden_BTH

    def tensors(self) -> dict[str, Tensor]:
        """What is kept of it, by Hugging Face names."""
        return {f"model.{name}": weight for name, weight in self.state_dict().items()}

    def settings(self) -> dict[str, Any]:
        """What builds it again."""
        return {"config": asdict(self.config)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take what `tensors` gave."""
        self.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items()})


class BlockModel(nn.Module):
    """The block drafter's own weights.

    Args:
        config: of its layers; head sizes, hidden size and vocabulary are the target's.
        features: the layers of the target whose outputs it sees.
        K: queries of a block.
        window: positions of context that a block sees, those nearest to it.
        rank: of the Markov head.
    """

    kind = "block"

    def __init__(
        self, config: LlamaConfig, *, features: Sequence[int], K: int, window: int, rank: int
    ) -> None:
        super().__init__()
        H, self.config = config.hidden_size, config
        self.features, self.K, self.window, self.rank = tuple(features), K, window, rank
        self.project = nn.Linear(len(self.features) * H, H, bias=False)
        self.context_norm = nn.RMSNorm(H, eps=config.norm_eps)
        self.token_norm = nn.RMSNorm(H, eps=config.norm_eps)
        self.placeholders = nn.Parameter(torch.randn(K - 1, H))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(H, eps=config.norm_eps)
        self.markov_in = nn.Linear(H, H, bias=False)
        self.markov_out = nn.Linear(H, rank, bias=False)
        self.markov_up = nn.Linear(rank, H, bias=False)
        self.confidence = nn.Linear(H + rank, 1)
        nn.init.zeros_(self.markov_up.weight)
        nn.init.zeros_(self.confidence.weight)

    @classmethod
    def beside(
        cls,
        target: Checkpoint,
        *,
        layers: Sequence[int],
        units: int,
        features: Sequence[int],
        K: int,
        window: int,
        rank: int,
    ) -> Self:
        """Begin with some layers of the target; key-value heads are rounded up to fours."""
        config = replace(target.config.padded(4), num_layers=len(layers), intermediate_size=units)
        model = cls(config, features=features, K=K, window=window, rank=rank)
        for layer, index in zip(decoder_layers(model), layers, strict=True):
            layer.copy(target, index)
        model.norm.weight.data.copy_(target.read("model.norm.weight"))
        return model

    def context(self, features_F: Tensor) -> Tensor:
        """Features [..., F] of positions, as the layers see them: [..., H]."""
        parts = features_F.unflatten(-1, (len(self.features), -1))
        parts = F.rms_norm(parts.float(), parts.shape[-1:]).flatten(-2)
        context_H: Tensor = self.context_norm(self.project(parts.to(features_F.dtype)))
        return context_H

    def queries(self, embedded_H: Tensor, context_H: Tensor) -> Tensor:
        """Blocks of queries [..., K, H]: of the last token, embedded, and what is before it."""
        last_1H = self.token_norm(embedded_H).unsqueeze(-2)
        rest_KH = self.placeholders.to(last_1H.dtype).expand(*last_1H.shape[:-2], -1, -1)
        return torch.cat([last_1H, rest_KH], -2) + context_H.unsqueeze(-2)

    def visible(self, anchors_A: Tensor, C: int) -> Tensor:
        """Mask [A * K, C + A * K]: a query sees what is before its block, and its block so far."""
        K, device = self.K, anchors_A.device
        gap_AC = anchors_A[:, None] - torch.arange(C, device=device)
        context_QC = ((gap_AC > 0) & (gap_AC <= self.window)).repeat_interleave(K, 0)
        place_Q = torch.arange(len(anchors_A) * K, device=device)
        own_QQ = place_Q[:, None] // K == place_Q // K
        return torch.cat([context_QC, own_QQ & (place_Q <= place_Q[:, None])], 1)

    def forward(self, embedded_BTH: Tensor, features_BTF: Tensor, anchors_A: Tensor) -> Tensor:
        """Hidden states [B, A, K, H] of the blocks that begin with the tokens at `anchors_A`.

        Row i of a block at t is what the lm_head makes the token at t + 1 + i from, without the
        Markov head. Anchors are at least 1.
        """
        context_BTH = self.context(features_BTF)
        x_BAKH = self.queries(embedded_BTH[:, anchors_A], context_BTH[:, anchors_A - 1])
        positions_T = torch.arange(context_BTH.shape[1], device=anchors_A.device)
        positions_Q = anchors_A[:, None] + torch.arange(self.K, device=anchors_A.device)
        rotary_T = rotary_pair(positions_T, self.config)
        rotary_Q = rotary_pair(positions_Q.flatten(), self.config)
        mask = self.visible(anchors_A, len(positions_T))
        x_BQH = x_BAKH.flatten(1, 2)
        for layer in decoder_layers(self):
            context = layer.keys(context_BTH, rotary_T)
            x_BQH = layer(x_BQH, rotary_Q, context=context, mask=mask)
        hidden_BAKH: Tensor = self.norm(x_BQH).unflatten(1, (-1, self.K))
        return hidden_BAKH

    def markov(self, embedded_H: Tensor) -> Tensor:
        """Rows [..., r] of W1, of embedded tokens."""
        rows: Tensor = self.markov_out(F.silu(self.markov_in(self.token_norm(embedded_H))))
        return rows

    def confidence_logits(self, hidden_H: Tensor, markov_r: Tensor) -> Tensor:
        """How sure a draft is to be accepted [...], before the sigmoid."""
        logits: Tensor = self.confidence(torch.cat([hidden_H, markov_r], -1)).squeeze(-1)
        return logits

    def tensors(self) -> dict[str, Tensor]:
        """What is kept of it."""
        return self.state_dict()

    def settings(self) -> dict[str, Any]:
        """What builds it again."""
        names = ("features", "K", "window", "rank")
        return {"config": asdict(self.config)} | {name: getattr(self, name) for name in names}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take what `tensors` gave."""
        self.load_state_dict(tensors)


def decoder_layers(model: "DraftModel | BlockModel") -> list[DecoderLayer]:
    """The layers of a drafter, as what they are."""
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


def rotate(x_BTGD: Tensor, rotary: Pair) -> Tensor:
    """Turn heads by their positions."""
    cos, sin = (factor.to(x_BTGD.dtype) for factor in rotary)
    turned_BTGD: Tensor = x_BTGD * cos + x_BTGD.roll(x_BTGD.shape[-1] // 2, -1) * sin
    return turned_BTGD


def rotary_pair(positions_T: Tensor, config: LlamaConfig) -> Pair:
    """Cosines and signed sines [..., 1, D] of positions."""
    exponent = torch.arange(0, config.head_dim, 2, device=positions_T.device) / config.head_dim
    angle = positions_T[..., None] * config.rope_theta**-exponent
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1).unsqueeze(-2), torch.cat([-sin, sin], -1).unsqueeze(-2)


class DraftWeights:
    """A file of a drafter's weights beside the target's: a `Checkpoint` if it is a Llama.

    Matrices lie as int8 with one factor a row, so that they are within 0.4 % of the largest weight
    of their row. What the file has not, embedding and tokenizer, is the target's.

    Raises:
        ValueError: the file cannot be read, or is for a target of other sizes.
    """

    def __init__(self, path: Path, target: Checkpoint) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            self.settings = json.loads(file.metadata()["settings"])
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file of drafter weights: {error}") from error
        self._file = file
        self.name, self.config = path.stem, LlamaConfig(**self.settings.pop("config"))
        self.kind = self.settings.pop("kind")
        self._target = target
        for name in ("vocab_size", "hidden_size"):
            own, wanted = getattr(self.config, name), getattr(target.config, name)
            if own != wanted:
                raise ValueError(f"{path} drafts for a target of {name} {own}, got {wanted}")
        if self.kind == DraftModel.kind:
            inherited = "model.embed_tokens.weight"
            lacking = set(tensor_names(self.config)) - {inherited} - set(self._file.keys())
            if lacking:
                raise ValueError(f"{path} lacks tensors: {', '.join(sorted(lacking)[:3])}")

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self._target.tokenizer

    def read(self, name: str, rows: slice = slice(None), cols: slice = slice(None)) -> Tensor:
        """Part of one tensor: of a vector its `rows`, of a matrix its `rows` and `cols`."""
        if name == "model.embed_tokens.weight":
            return self._target.read(name, rows, cols)
        tensor = self._file.get_slice(name)
        if len(tensor.get_shape()) == 1:
            part: Tensor = tensor[rows]
            return part
        scale = self._file.get_slice(f"{name}.scale")[rows]
        whole: Tensor = tensor[rows, cols].float() * scale[:, None]
        return whole

    def tensors(self) -> dict[str, Tensor]:
        """All of the drafter's own."""
        names = (name for name in list(self._file.keys()) if not name.endswith(".scale"))
        return {name: self.read(name).float() for name in names}


def save_weights(path: Path, model: DraftModel | BlockModel) -> None:
    """Write a drafter's weights as `DraftWeights` reads them; whole or not at all."""
    tensors = {}
    for name, weight in model.tensors().items():
        weight = weight.detach().float().cpu()
        if weight.ndim == 1:
            tensors[name] = weight.contiguous()
            continue
        scale = (weight.abs().amax(1) / 127).clamp(min=1e-12)
        tensors[name] = (weight / scale[:, None]).round().to(torch.int8)
        tensors[f"{name}.scale"] = scale
    settings = {"kind": model.kind, **model.settings()}
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"settings": json.dumps(settings)})
    part.replace(path)


def build(weights: DraftWeights) -> DraftModel | BlockModel:
    """The drafter in a file, for training or, a block drafter, for use."""
    model: DraftModel | BlockModel
    if weights.kind == DraftModel.kind:
        model = DraftModel(weights.config)
    else:
        model = BlockModel(weights.config, **weights.settings)
    model.load(weights.tensors())
    return model
