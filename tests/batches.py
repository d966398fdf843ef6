"""Batches of requests, the oracle's answers to them, and what a rank does with them.

B requests, V true vocabulary, W >= V the width of the logits (padding included).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_sample import BatchSharder, Sampler, SamplingParams, SamplingState, sample
from dtensor_sample.ops import values as ops_values
from tests import oracle

EXCHANGES = ("batch", "vocab", "replicate")
OWNERS = ("balanced", "slot", "position")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """B requests of one step."""

    logits: torch.Tensor
    """[B, W], whole, on the CPU."""
    vocab_size: int
    params: list[SamplingParams]
    positions: list[int]
    base_seed: int = 0
    """What the seeds of requests without one derive from."""

    def __len__(self) -> int:
        return len(self.params)

    def take(self, rows: Sequence[int]) -> "Batch":
        """Some of the requests, in the order given."""
        return replace(
            self,
            logits=self.logits[list(rows)],
            params=[self.params[i] for i in rows],
            positions=[self.positions[i] for i in rows],
        )


def one_row(
    row: Sequence[float], count: int, params: SamplingParams, *, dtype=torch.float32, first: int = 0
) -> Batch:
    """`count` requests that share logits and params, at consecutive positions."""
    logits = torch.tensor(row, dtype=dtype).expand(count, -1)
    positions = list(range(first, first + count))
    return Batch(logits=logits, vocab_size=len(row), params=[params] * count, positions=positions)


# --- random batches


def _row(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    row = rng.normal(0, 3, size)
    match kind:
        case "wide":
            return np.clip(row * 1e4, -6e4, 6e4)
        case "tied":
            return rng.integers(-1, 2, size) * np.array(1.0)
        case "flat":
            return np.full(size, -5.0)
        case "masked":
            row[rng.random(size) < 0.7] = -np.inf
        case "nan":
            row[rng.random(size) < 0.4] = np.nan
        case "infinite":
            row[rng.integers(0, size, 2)] = np.inf
        case "dead":
            row[:] = rng.choice([np.nan, -np.inf], size)
    return row


ROW_KINDS = (*["normal"] * 4, "wide", "tied", "flat", "masked", "nan", "infinite", "dead")


GREEDY: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 9e-6},
    {"top_k": 1},
    {"top_p": 0.0},
)


def random_params(
    rng: np.random.Generator, vocab_size: int, *, seeded: bool = False
) -> SamplingParams:
    """Any mixture of temperature, filters and seed; one request of four is greedy."""
    params: dict[str, Any] = {
        "temperature": float(rng.choice([1e-4, 0.3, 0.7, 1.0, 1.5, 2.0, 50.0])),
        "top_k": int(rng.choice([0, 0, -1, 2, max(2, vocab_size // 2), vocab_size + 5])),
        "top_p": float(rng.choice([1.0, 1.0, 1.0, 0.999999, 0.9, 0.5, 0.1, 1e-9])),
        "min_p": float(rng.choice([0.0, 0.0, 0.0, 0.02, 0.5, 1.0])),
        "seed": int(rng.integers(2**63)) if seeded or rng.random() < 0.5 else None,
    }
    if rng.random() < 0.25:
        params |= GREEDY[rng.integers(len(GREEDY))]
    return SamplingParams(**params)


def random_batch(
    seed: int,
    size: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seeded: bool = False,
) -> Batch:
    """Rows and params of every kind; ids past the vocabulary hold the most tempting values."""
    rng = np.random.default_rng(seed)
    width = vocab_size + padding
    logits = np.empty((size, width))
    for row in logits:
        row[:vocab_size] = _row(rng, rng.choice(ROW_KINDS), vocab_size)
        row[vocab_size:] = rng.choice([0.0, 6e4, np.inf, np.nan], padding)
    return Batch(
        logits=torch.from_numpy(logits).to(dtype),
        vocab_size=vocab_size,
        params=[random_params(rng, vocab_size, seeded=seeded) for _ in range(size)],
        positions=[int(p) for p in rng.choice([0, 1, 7, 2**31, 2**40 + 3], size) + np.arange(size)],
        base_seed=int(rng.integers(2**63)),
    )


# --- the oracle's answers


def library_weights(values: np.ndarray, temperature: float) -> np.ndarray:
    """The library's integers for a row's tokens; test_weights.py compares them with float64."""
    row = torch.from_numpy(values)[None, None]
    peak, floor = row.amax((1, 2)), torch.tensor([-torch.inf])
    scale = torch.tensor([math.log2(math.e) / temperature], dtype=torch.float32)
    return ops_values.weights(row, peak, floor, scale, len(values))[0, 0].numpy()


def answers(
    batch: Batch, *, admitted: bool = False, weights=library_weights
) -> list[oracle.Answer]:
    """What each request of the batch must be given.

    The seed of a request without one depends on its row, or with `admitted` on how many such
    requests a state admitted before it.
    """
    largest = torch.finfo(batch.logits.dtype).max
    unseeded = [p.seed is None for p in batch.params]
    numbers = [sum(unseeded[:j]) for j in range(len(batch))] if admitted else range(len(batch))
    seeds = [
        oracle.unseeded_seed(batch.base_seed, j) if p.seed is None else p.seed
        for p, j in zip(batch.params, numbers, strict=True)
    ]
    return [
        oracle.sample(
            row,
            p,
            seed=s,
            position=t,
            vocab_size=batch.vocab_size,
            largest=largest,
            weights=weights,
        )
        for row, p, s, t in zip(
            batch.logits.float().numpy(), batch.params, seeds, batch.positions, strict=True
        )
    ]


def tokens(batch: Batch) -> list[int]:
    """The tokens of the stateless call."""
    return [answer.token for answer in answers(batch)]


# --- what a rank does


def shard_vocab(logits: torch.Tensor, mesh: DeviceMesh, dim: int = -1) -> DTensor:
    """Whole logits as the DTensor that a column-parallel lm_head would have made of them."""
    dim %= logits.ndim
    sizes = [len(part) for part in torch.arange(logits.shape[dim]).chunk(mesh.size())] + [
        0
    ] * mesh.size()
    rank = mesh.get_local_rank()
    local = logits.narrow(dim, sum(sizes[:rank]), sizes[rank]).to(mesh.device_type)
    stride = torch.empty(logits.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=logits.shape, stride=stride
    )


def sample_batches(
    mesh: DeviceMesh, batches: Sequence[Batch], exchange: str = "auto"
) -> list[list[int]]:
    """The stateless call on each batch."""
    return [
        sample(
            shard_vocab(batch.logits, mesh),
            batch.params,
            position=batch.positions,
            vocab_size=batch.vocab_size,
            exchange=exchange,
            base_seed=batch.base_seed,
        ).tolist()
        for batch in batches
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All that a step may choose and no token may depend on."""

    exchange: str = "batch"
    owners: str = "balanced"
    slots: Sequence[int] | None = None
    """The slot of each request; its place in the batch if not given."""
    order: Sequence[int] | None = None
    """The requests that take part, in batch order; all of them if not given."""
    spare: int = 0
    """Rows of capacity more than needed."""
    compile: bool = False


def engine_step(mesh: DeviceMesh, batch: Batch, layout: Layout) -> dict[str, list]:
    """One step of an engine that admitted the whole batch: outputs of those in `layout.order`."""
    slots = range(len(batch)) if layout.slots is None else layout.slots
    order = range(len(batch)) if layout.order is None else layout.order
    state = SamplingState(
        mesh,
        vocab_size=batch.vocab_size,
        max_num_reqs=max(slots, default=0) + 1,
        seed=batch.base_seed,
    )
    for slot, params, position in zip(slots, batch.params, batch.positions, strict=True):
        state.add(slot, params, position=position)
    sharder = BatchSharder(state, owners=layout.owners)
    chosen = [slots[i] for i in order]
    plan = sharder.plan(chosen, exchange=layout.exchange)
    if layout.spare:
        plan = sharder.plan(chosen, exchange=layout.exchange, capacity=plan.capacity + layout.spare)
    hidden = batch.logits[list(order)].to(mesh.device_type)
    output = Sampler(state, compile=layout.compile)(shard_vocab(plan.select(hidden), mesh), plan)
    names = ("token_ids", "num_sampled", "num_rejected", "num_nans", "failed")
    return {name: getattr(output, name).tolist() for name in names}


def expected_step(batch: Batch, order: Sequence[int] | None = None) -> dict[str, list]:
    """What `engine_step` must give."""
    wanted = answers(batch, admitted=True)
    wanted = wanted if order is None else [wanted[i] for i in order]
    return {
        "token_ids": [[a.token] for a in wanted],
        "num_sampled": [int(not a.failed) for a in wanted],
        "num_rejected": [0] * len(wanted),
        "num_nans": [a.num_nans for a in wanted],
        "failed": [a.failed for a in wanted],
    }
