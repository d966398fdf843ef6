"""A Llama of random weights, tensor-parallel in plain torch: one decode step of fixed shapes.

Weights are made where they are used, each rank its own part: columns of the projections into heads
and MLP units, rows of those out of them, ids of the embedding and of `lm_head`. After the
embedding, each attention and each MLP one all-reduce adds up what the ranks have.

Shapes: B requests with J new tokens each; L positions of context; H hidden size, D head size; G
key-value heads of this rank, R query heads for each; v ids of this rank.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Sizes of a model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocab: int


SIZES = {
    "8b": Size(
        hidden=4096, layers=32, heads=32, kv_heads=8, head_size=128, mlp=14336, vocab=128256
    ),
    "tiny": Size(hidden=64, layers=2, heads=8, kv_heads=4, head_size=16, mlp=128, vocab=1003),
}
LOGIT_STD = 2.0
"""Standard deviation of logits."""


class Layer(NamedTuple):
    """This rank's weights of one layer, [out, in] each; those of norms are all one."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """The decoder; every rank of the mesh must call it with the same tokens.

    Args:
        size: its sizes.
        mesh: of one dimension.
        dtype: of weights and caches.

    Raises:
        ValueError: more ranks than parts of equal size.
    """

    def __init__(self, size: Size, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        P, rank = mesh.size(), mesh.get_rank()
        if size.kv_heads % P or size.mlp % P:
            raise ValueError(f"{P} ranks must divide {size.kv_heads} heads and {size.mlp} units")
        self.size, self.group, self.ranks = size, mesh.get_group(), P
        self.device, self.dtype = torch.empty(0, device=mesh.device_type).device, dtype
        self.groups, self.repeats = size.kv_heads // P, size.heads // size.kv_heads
        generator = torch.Generator(self.device).manual_seed(rank)

        def weight(rows: int, columns: int, std: float) -> Tensor:
            made = torch.empty(rows, columns, dtype=dtype, device=self.device)
            return made.normal_(0, std, generator=generator)

        H, D, units = size.hidden, size.head_size, size.mlp // P
        heads, width = self.groups * self.repeats, -(-size.vocab // P)
        self.first_id = rank * width
        own_ids = max(min(width, size.vocab - self.first_id), 0)
        self.embedding = weight(own_ids, H, 1.0)
        self.layers = [
            Layer(
                qkv=weight((heads + 2 * self.groups) * D, H, H**-0.5),
                out=weight(H, heads * D, (size.heads * D) ** -0.5),
                gate_up=weight(2 * units, H, H**-0.5),
                down=weight(H, units, size.mlp**-0.5),
            )
            for _ in range(size.layers)
        ]
        self.head = weight(own_ids, H, LOGIT_STD * H**-0.5)
        self.frequency = 500_000.0 ** -(torch.arange(0, D, 2, device=self.device) / D)

    def make_cache(self, requests: int, context: int) -> Tensor:
        """[layers, 2, B * L, G, D]: keys and values of the last L positions of each request."""
        shape = (self.size.layers, 2, requests * context, self.groups, self.size.head_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_()

    def hidden(self, token_BJ: Tensor, position_B: Tensor, cache: Tensor) -> Tensor:
        """[B * J, H]: what `logits` takes, after the new tokens.

        Each token sees itself and the L - 1 positions before it, or fewer of them than that by the
        tokens of its request that come after it: a position's place in the cache is its remainder
        modulo L.

        Args:
            token_BJ: the new tokens.
            position_B: of the first of each request.
            cache: is written.
        """
        B, J = token_BJ.shape
        L, size, dtype = cache.shape[2] // B, self.size, self.dtype
        step_J, cell_L = (torch.arange(n, device=self.device) for n in (J, L))
        position_BJ = position_B[:, None] + step_J
        place_BJ = torch.arange(B, device=self.device)[:, None] * L + position_BJ % L
        angle_BJ1D = (position_BJ[..., None] * self.frequency)[:, :, None]
        cos, sin = angle_BJ1D.cos().to(dtype), angle_BJ1D.sin().to(dtype)
        mask = None
        if J > 1:
            age_BL = (cell_L - position_B[:, None]) % L  # 0 to J - 1: the new tokens
            seen_BJL = (age_BL[:, None] <= step_J[:, None]) | (age_BL[:, None] >= J)
            mask = torch.zeros(seen_BJL.shape, dtype=dtype, device=self.device)
            mask = mask.masked_fill(~seen_BJL, -torch.inf).repeat(1, self.repeats, 1)[:, None]

        x_NH = self._embed(token_BJ.flatten())
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            qkv = F.linear(F.rms_norm(x_NH, (size.hidden,)), layer.qkv)
            q, k, v = qkv.view(B, J, -1, size.head_size).split(
                [self.groups * self.repeats, self.groups, self.groups], 2
            )
            keys.index_copy_(0, place_BJ.flatten(), _rotated(k, cos, sin).flatten(0, 1))
            values.index_copy_(0, place_BJ.flatten(), v.flatten(0, 1))
            q = _rotated(q, cos, sin).unflatten(2, (self.groups, self.repeats))
            y = F.scaled_dot_product_attention(
                q.permute(0, 2, 3, 1, 4).flatten(2, 3),  # [B, G, R * J, D]
                keys.unflatten(0, (B, L)).transpose(1, 2),
                values.unflatten(0, (B, L)).transpose(1, 2),
                attn_mask=mask,
            )
            y = y.unflatten(2, (self.repeats, J)).permute(0, 3, 1, 2, 4).reshape(B * J, -1)
            x_NH = x_NH + self._summed(F.linear(y, layer.out))
            gate, up = F.linear(F.rms_norm(x_NH, (size.hidden,)), layer.gate_up).chunk(2, -1)
            x_NH = x_NH + self._summed(F.linear(F.silu(gate) * up, layer.down))
        return F.rms_norm(x_NH, (size.hidden,))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """[T, v]: this rank's columns."""
        return F.linear(hidden_TH, self.head)

    def make_likely(self, logits_Tv: Tensor, id_T: Tensor, probability: float) -> None:
        """Give one id of each row about so much probability, in place and without another pass.

        Rows of `hidden` are of norm sqrt(H), so that over the random rows of `head` logits are
        normal, and log-sum-exp of V of them is close to log V + variance / 2.
        """
        odds = math.log(probability / (1 - probability))
        value = math.log(self.size.vocab) + LOGIT_STD**2 / 2 + odds
        column_T1 = (id_T - self.first_id)[:, None]
        mine_T1 = (column_T1 >= 0) & (column_T1 < logits_Tv.shape[1])
        column_T1 = column_T1.masked_fill(~mine_T1, 0)
        old_T1 = logits_Tv.gather(1, column_T1)
        logits_Tv.scatter_(1, column_T1, old_T1.masked_fill(mine_T1, value))

    def _embed(self, id_N: Tensor) -> Tensor:
        row_N = id_N - self.first_id
        mine_N = (row_N >= 0) & (row_N < len(self.embedding))
        own_NH = F.embedding(row_N.masked_fill(~mine_N, 0), self.embedding)
        return self._summed(own_NH * mine_N[:, None])

    def _summed(self, x: Tensor) -> Tensor:
        if self.ranks > 1:
            dist.all_reduce(x, group=self.group)
        return x


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [B, J, heads, D]."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
