"""Steps of more ranks than there are, simulated: plans, collectives and memory of one rank.

A fake process group gives each rank its place and moves nothing, and fake tensors have shapes and
no values, so that steps of real sizes take no memory: what a rank allocates is counted.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_sample import (
    BatchSharder,
    DraftSampler,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    ShardPlan,
    vocab_sharded,
)
from dtensor_sample.cost import SCAN_BYTES, SCANS, draft_cache_bytes
from dtensor_sample.exchange import EXCHANGES
from tests.test_collectives import KINDS, CollectiveTrace
from tests.test_draft_collectives import sent_bytes

V = 129_280
MESHES = {"8": (8,), "64": (64,), "2 x 8": (2, 8)}


@contextmanager
def fake_mesh(shape: tuple[int, ...], rank: int) -> Iterator[DeviceMesh]:
    """The sampling axis of a mesh whose other ranks do not exist."""
    ranks = int(torch.Size(shape).numel())
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])["tp"]
    finally:
        dist.destroy_process_group()


class Allocations(TorchDispatchMode):
    """Counts the bytes that live tensors made under it hold, and the most at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func._schema.name == "_c10d_functional::wait_tensor":
            return args[0]  # as on devices; fake tensors would count another one
        out = func(*args, **(kwargs or {}))
        given, made = (
            [x.untyped_storage() for x in tree_leaves(tree) if torch.is_tensor(x)]
            for tree in ((args, kwargs), out)
        )
        old = self._seen | set(map(id, given))
        for storage in made:
            if id(storage) in old:
                continue
            self._seen.add(id(storage))
            self.live += storage.nbytes()
            self.most = max(self.most, self.live)
            weakref.finalize(storage, self._free, id(storage), storage.nbytes())
        return out

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def state_of(mesh: DeviceMesh, requests: int, K: int, *params: SamplingParams) -> SamplingState:
    state = SamplingState(
        mesh, vocab_size=V, max_num_reqs=requests, num_speculative_tokens=K, seed=1
    )
    for slot in range(requests):
        state.add(slot, params[slot % len(params)])
    return state


def shard(plan: ShardPlan, mesh: DeviceMesh) -> DTensor:
    width = -(-V // mesh.size())
    columns = max(0, min(width, V - mesh.get_local_rank() * width))
    local = torch.empty(plan.num_rows, columns, dtype=torch.bfloat16)
    return vocab_sharded(local, mesh, vocab_size=V)


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_plans_of_all_ranks_agree(shape):
    """Catches splits or owners that depend on the rank, and rows that nobody or two ranks own."""
    ranks = shape[-1]
    plans = []
    for rank in range(0, ranks, ranks // 8):
        with fake_mesh(shape, rank) as mesh:
            state = state_of(mesh, 3 * ranks + 1, 0, SamplingParams())
            for exchange in ("auto", *EXCHANGES):
                plan = BatchSharder(state).plan(range(3 * ranks + 1), exchange=exchange)
                own = plan.local_rows
                plans.append((rank, exchange, plan.exchange.name, plan.owners, plan.num_rows))
                assert plan.rows_per_rank == (4, *[3] * (ranks - 1))
                whole = plan.exchange.name != "batch"
                assert own == (sum(plan.rows_per_rank) if whole else plan.rows_per_rank[rank])
    for exchange in ("auto", *EXCHANGES):
        assert len({plan[2:] for plan in plans if plan[1] == exchange}) == 1


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    "params",
    [
        [SamplingParams()],
        [SamplingParams(top_p=0.9)],
        [SamplingParams(top_k=50, top_p=0.9)],
        [SamplingParams(top_k=50, top_p=0.9), SamplingParams()],
    ],
)
def test_a_step(shape, exchange, params):
    """Catches bytes, collectives or memory that are counted right for few ranks only."""
    rows = 512
    with fake_mesh(shape, shape[-1] - 1) as mesh:
        state = state_of(mesh, rows, 0, *params)
        plan, sampler = BatchSharder(state).plan(range(rows), exchange=exchange), Sampler(state)
        cost = plan.cost(torch.bfloat16)
        with FakeTensorMode(allow_non_fake_inputs=True):
            logits = shard(plan, mesh)
            with CollectiveTrace() as trace:
                sampler(logits, plan)
            with Allocations() as memory:
                sampler(logits, plan)
    assert tuple(KINDS[name] for name, *_ in trace.calls) == cost.collectives
    assert cost.wire_bytes == round(sum(sent_bytes(call, mesh.size()) for call in trace.calls))
    peak = cost.peak_bytes
    if exchange == "vocab" and plan.filters.candidates:  # kernels' own, which no trace shows
        peak -= SCANS * SCAN_BYTES
    assert 0.75 * peak <= memory.most <= 1.05 * peak


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_drafts(shape, exchange):
    """The same of steps that draw drafts and verify them, and of the cache that keeps their logits.

    Catches a cache that each rank allocates whole.
    """
    requests, K, params = 128, 7, SamplingParams(top_p=0.9)
    with fake_mesh(shape, 0) as mesh:
        state = state_of(mesh, requests, K, params)
        sharder, drafter = BatchSharder(state), DraftSampler(state)
        verifier = RejectionSampler(state, method="standard")
        with FakeTensorMode(allow_non_fake_inputs=True):
            for step in range(K):
                plan = sharder.plan(range(requests), exchange=exchange)
                drafter(shard(plan, mesh), plan, step=step)
            kept = draft_cache_bytes(plan.exchange, requests, K, V, torch.bfloat16)
            assert state.drafts.bytes == kept
            plan = sharder.plan(range(requests), [K + 1] * requests, exchange=exchange)
            logits, ids = shard(plan, mesh), torch.zeros(requests, K, dtype=torch.int64)
            with CollectiveTrace() as trace:
                verifier(logits, plan, ids)
        cost = plan.cost(torch.bfloat16, method="standard", draft_dtype=torch.bfloat16)
    assert tuple(KINDS[name] for name, *_ in trace.calls) == cost.collectives
    assert cost.wire_bytes == round(sum(sent_bytes(call, mesh.size()) for call in trace.calls))
    whole = requests * K * V * 2
    assert kept == (whole if exchange == "replicate" else whole // shape[-1])
