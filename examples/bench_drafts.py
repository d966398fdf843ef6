"""The ways to draft K tokens left to right that `bench.py --draft-loop` compares.

Base logits [B, K, V] of all positions are there at once, sharded over the vocabulary; each token
adds a bias of rank r to the logits after it. B requests, K drafts each.
"""

import functools
import itertools
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from bench_timing import timings
from bench_ways import Way, gather, pick, probabilities, state_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_sample import (
    BatchSharder,
    SamplingParams,
    ShardPlan,
    vocab_sharded,
)
from dtensor_sample.draft.sequential import MarkovHead, SequentialDraftSampler

LOOPS = {
    "batch": ("batch", "sharded"),
    "batch, every rank loops": ("batch", "replicated"),
    "vocab": ("vocab", "auto"),
    "replicate": ("replicate", "auto"),
}
"""Ways of this library: an exchange, and where the loop runs."""
COLUMNS = {
    "requests": "requests",
    "k": "K",
    "filters": "filters",
    "way": "way",
    "us": "us, median",
    "us_20": "20%",
    "us_80": "80%",
    "us_99": "99%",
    "host_us": "host us, eager",
    "extra_mib": "extra MiB",
    "ranks": "ranks",
    "vocab": "ids",
    "factors": "r",
    "dtype": "dtype",
}
"""Fields of the CSV, and what the table calls them."""


def loops(
    mesh: DeviceMesh, base_BKV: DTensor, w1_Vr: Tensor, w2_rV: Tensor, params: SamplingParams
) -> Iterator[tuple[str, Way]]:
    """Every way to draft from these logits, with its name."""
    for name, (exchange, loop) in LOOPS.items():
        yield name, own_loop(mesh, exchange, loop, base_BKV, w1_Vr, w2_rV, params)
    yield "gather + loop", Way(functools.partial(gathered, base_BKV, w1_Vr, w2_rV, params))


def own_loop(
    mesh: DeviceMesh,
    exchange: str,
    loop: str,
    base_BKV: DTensor,
    w1_Vr: Tensor,
    w2_rV: Tensor,
    params: SamplingParams,
) -> Way:
    """What this library does under one exchange."""
    B, K, V = base_BKV.shape
    state = state_of(mesh, exchange, V, B, K, params)
    drafter = SequentialDraftSampler(state, MarkovHead(w1_Vr, w2_rV), loop=loop)
    # With owners by position, rows in batch order are rows in the plan's order but for padding.
    plan = BatchSharder(state, owners="position").plan(range(B))
    rows = vocab_sharded(plan.select(base_BKV.to_local()), mesh, vocab_size=V)
    last_B = torch.arange(B, device=mesh.device_type) % V
    step = functools.partial(drafted, drafter, rows, plan, last_B)
    step()
    return Way(step, state.drafts.bytes)


def drafted(
    drafter: SequentialDraftSampler, rows: DTensor, plan: ShardPlan, last_B: Tensor
) -> Tensor:
    """Draft tokens [B, K]."""
    return drafter(rows, plan, last_B).token_ids


def gathered(base_BKV: DTensor, w1_Vr: Tensor, w2_rV: Tensor, params: SamplingParams) -> Tensor:
    """All logits to all ranks, and the whole loop on each in PyTorch, keeping what it drew from."""
    x_BKV, tokens = gather(base_BKV), []
    kept_BKV = torch.empty_like(x_BKV)
    token_B = torch.arange(len(x_BKV), device=x_BKV.device) % x_BKV.shape[2]
    for k in range(x_BKV.shape[1]):
        kept_BKV[:, k] = x_BKV[:, k] + w1_Vr[token_B] @ w2_rV
        token_B = pick(probabilities(kept_BKV[:, k], params))
        tokens.append(token_B)
    return torch.stack(tokens, 1)


def check(
    mesh: DeviceMesh, base_BKV: DTensor, w1_Vr: Tensor, w2_rV: Tensor, params: SamplingParams
) -> None:
    """End the program unless this library's ways give equal tokens, and all of them ids."""
    found = {name: way.step() for name, way in loops(mesh, base_BKV, w1_Vr, w2_rV, params)}
    for name, token_BK in found.items():
        if not ((token_BK >= 0) & (token_BK < base_BKV.shape[2])).all():
            raise SystemExit(f"{name} gives ids beyond the vocabulary")
        if name in LOOPS and not torch.equal(token_BK, found["batch"]):
            raise SystemExit(f"{name} differs from batch")


def measure(
    mesh: DeviceMesh, args: Namespace, filters: dict[str, SamplingParams]
) -> Iterator[dict[str, Any]]:
    """One record for each vocabulary, number of drafts and of requests, filters and way."""
    device, dtype, r = mesh.device_type, getattr(torch, args.dtype), args.factors
    for V, K, B in itertools.product(args.vocab, args.num_speculative_tokens, args.rows):
        base_BKV, w1_Vr, w2_rV = make(mesh, B, K, V, r, dtype)
        for kind in args.filters:
            if mesh.get_rank() == 0:
                print(f"V={V} K={K} requests={B} filters={kind}", file=sys.stderr, flush=True)
            given = (mesh, base_BKV, w1_Vr, w2_rV, filters[kind])
            check(*given)
            found = dict(loops(*given))
            for name, timed in timings(found, args.rounds, device):
                yield {
                    "requests": B,
                    "k": K,
                    "filters": kind,
                    "way": name,
                    **timed,
                    "ranks": mesh.size(),
                    "vocab": V,
                    "factors": r,
                    "dtype": args.dtype,
                }


def make(
    mesh: DeviceMesh, B: int, K: int, V: int, r: int, dtype: torch.dtype
) -> tuple[DTensor, Tensor, Tensor]:
    """Base logits [B, K, V] of a standard deviation of 2, and factors of a bias of 1."""
    rank, width, device = mesh.get_local_rank(), -(-V // mesh.size()), mesh.device_type
    columns = max(min(width, V - rank * width), 0)
    own = torch.Generator(device).manual_seed(rank)
    same = torch.Generator(device).manual_seed(99)
    local_BKv = torch.randn(B, K, columns, generator=own, device=device).mul_(2).to(dtype)
    w1_Vr = torch.randn(V, r, generator=same, device=device).to(dtype)
    w2_rV = torch.randn(r, V, generator=same, device=device).div_(r**0.5).to(dtype)
    return vocab_sharded(local_BKv, mesh, vocab_size=V), w1_Vr, w2_rV
