"""Constants of the cost model from measured steps: of reports, or of the machine at hand."""

import csv
import functools
import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_sample.choose import BY_DEVICE
from dtensor_sample.cost import Cost
from dtensor_sample.exchange import EXCHANGES
from dtensor_sample.layout import vocab_sharded
from dtensor_sample.params import SamplingParams, filters_of
from dtensor_sample.plan import ShardPlan
from dtensor_sample.predict import Hardware, fit, hardware, write
from dtensor_sample.rejection import RejectionSampler
from dtensor_sample.sampler import Sampler
from dtensor_sample.sharder import BatchSharder
from dtensor_sample.state import SamplingState
from dtensor_sample.workload import Workload

FILTERS = {
    "off": SamplingParams(),
    "on": SamplingParams(top_k=50, top_p=0.95),
    "top-p": SamplingParams(top_p=0.95),
}
GRID = {"cuda": (129_280, (4, 64, 512, 2048), 20), "cpu": (4096, (2, 8, 32), 3)}
"""Vocabulary, numbers of rows and rounds, by the type of device."""
K = 7
"""Drafts of a request, of the steps that verify some."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A step that was measured, and what it took."""

    exchange: str
    rows: int
    ranks: int
    vocab_size: int
    dtype: torch.dtype
    filters: str
    """Of FILTERS."""
    us: float
    listed: bool = True
    """Whether ranks that shard rows exchanged lists of candidates, and no histograms, for top-k."""
    K: int = 0
    method: str | None = None
    """How drafts were verified, if any were."""
    drawn: bool = False
    """Whether drafts were drawn from draft logits."""

    @property
    def step(self) -> Workload:
        """What was done; requests take turns with their owners."""
        requests = -(-self.rows // (self.K + 1))
        filters = filters_of([FILTERS[self.filters]])
        if self.exchange == "vocab" and not self.listed:
            filters = filters._replace(candidates=0, bounded=False)
        return Workload(
            ranks=self.ranks,
            rows_B=[self.K + 1] * requests,
            owners_B=[request % self.ranks for request in range(requests)],
            vocab_size=self.vocab_size,
            filters=filters,
            dtype=self.dtype,
            K=self.K,
            method=self.method,
            draft_dtype=self.dtype if self.drawn else None,
        )

    @functools.cached_property
    def cost(self) -> Cost:
        """What it took of a rank."""
        return self.step.cost(self.exchange)


def read(path: Path) -> list[Measurement]:
    """What a CSV says about exchanges.

    Its columns are rows, filters (off, on or top-p), way (an exchange; others are left out) and us;
    and if they are there ranks (2), vocab (129280), dtype (bfloat16), candidates (none were
    listed), k (0), method (block) and drafts (one-hot or drawn).
    """
    with path.open(newline="") as file:
        records = [record for record in csv.DictReader(file) if record["way"] in EXCHANGES]
    # Steps that draw their drafts too are several in one.
    return [_measurement(record) for record in records if record.get("drafts") != "drafted"]


def _measurement(record: Mapping[str, str]) -> Measurement:
    K = int(record.get("k") or 0)
    return Measurement(
        exchange=record["way"],
        rows=int(record["rows"]),
        ranks=int(record.get("ranks") or 2),
        vocab_size=int(record.get("vocab") or 129_280),
        dtype=getattr(torch, record.get("dtype") or "bfloat16"),
        filters=record["filters"],
        us=float(record["us"]),
        listed="candidates" in record,
        K=K,
        method=(record.get("method") or "block") if K else None,
        drawn=record.get("drafts") == "drawn",
    )


def fit_to(measured: Sequence[Measurement], base: Hardware) -> Hardware:
    """`base` with constants that suit what was measured; those that were not stay."""
    hops = [
        base.hop_us * len(m.cost.collectives) * math.log2(max(m.ranks, 2) / 2) for m in measured
    ]
    us = [max(m.us - hop, 0.1 * m.us) for m, hop in zip(measured, hops, strict=True)]
    return replace(base, constants=fit([m.cost for m in measured], us, base.constants))


# --- measuring this machine


def calibrate(path: Path) -> Hardware | None:
    """Measure this machine, and write its constants into a file that `predict.hardware` reads.

    Under torchrun every rank must call this, and collectives are measured too; a single process
    keeps those of its type of device. Takes less than a minute.

    Returns:
        The constants on the first rank, which writes the file, and None on others.

    Raises:
        ValueError: a path that cannot be written, or ranks that lie on several nodes.
    """
    if path.suffix != ".json" or not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"--calibrate must be a .json file in a folder that exists, got {path}")
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if "RANK" not in os.environ:
        os.environ |= own | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise ValueError(f"ranks must be of one node to be calibrated, got {ranks} on several")
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("tp",))
    try:
        with torch.inference_mode():
            measured = measure(mesh)
        if mesh.get_rank() != 0:
            return None
    finally:
        dist.destroy_process_group()
    machine = torch.cuda.get_device_name() if device_type == "cuda" else platform.processor()
    about = (
        f"{ranks} x {machine or platform.machine()}, torch {torch.__version__}, "
        f"{date.today().isoformat()}"
    )
    if ranks == 1:
        about += f"; collectives: {hardware(BY_DEVICE[device_type]).about}"
    base = replace(hardware(BY_DEVICE[device_type]), name=path.stem, about=about)
    found = fit_to(measured, base)
    write(path, [found])
    return found


def measure(mesh: DeviceMesh) -> list[Measurement]:
    """Steps of few and many rows, without and with filters and drafts, under each exchange."""
    vocab_size, every, rounds = GRID[mesh.device_type]
    exchanges = EXCHANGES if mesh.size() > 1 else EXCHANGES[:1]
    kinds = [("off", 0), ("on", 0), ("top-p", 0), ("off", K)]
    measured = []
    for rows, (filters, drafts), exchange in itertools.product(every, kinds, exchanges):
        if rows % (drafts + 1) != 0:
            continue
        case = Measurement(
            exchange=exchange,
            rows=rows,
            ranks=mesh.size(),
            vocab_size=vocab_size,
            dtype=torch.bfloat16 if mesh.device_type == "cuda" else torch.float32,
            filters=filters,
            us=0.0,
            K=drafts,
            method="block" if drafts else None,
        )
        run = timer(step_of(mesh, case), mesh.device_type)
        us = [slowest(run(), mesh.device_type) for _ in range(rounds)]
        del run  # a graph holds collectives: it must go before the group does
        measured.append(replace(case, us=statistics.median(us)))
    return measured


def step_of(mesh: DeviceMesh, case: Measurement) -> Callable[[], Tensor]:
    """A step that can be captured in a graph, over random logits and one-hot drafts."""
    drafts, V = case.K, case.vocab_size
    slots = range(case.rows // (drafts + 1))
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=len(slots),
        num_speculative_tokens=drafts,
        exchange=case.exchange,
        seed=1,
    )
    for slot in slots:
        state.add(slot, FILTERS[case.filters])
    positions = [0] * len(slots)
    plan = BatchSharder(state).plan(slots, [drafts + 1] * len(slots), positions=positions)
    width = -(-V // mesh.size())
    columns = max(0, min(width, V - mesh.get_local_rank() * width))
    generator = torch.Generator(mesh.device_type).manual_seed(mesh.get_local_rank())
    local = torch.randn(
        plan.num_rows, columns, generator=generator, device=mesh.device_type, dtype=case.dtype
    )
    logits = vocab_sharded(local * 2, mesh, vocab_size=V)
    if case.method is None:
        sampler = Sampler(state)
        return lambda: sampler(logits, plan).token_ids
    verifier = RejectionSampler(state, method=case.method)
    return functools.partial(verified, verifier, logits, plan, chosen_drafts(plan))


def chosen_drafts(plan: ShardPlan) -> Tensor:
    """[B, K] some one-hot drafts, on the device."""
    state = plan.state
    drafts = torch.arange(state.num_speculative_tokens, device=state.device) % state.vocab_size
    return drafts.expand(len(plan.slots), -1).contiguous()


def verified(verifier: RejectionSampler, logits: Tensor, plan: ShardPlan, drafts: Tensor) -> Tensor:
    """A step of verification: [B, K + 1] tokens."""
    return verifier(logits, plan, drafts).token_ids


def timer(step: Callable[[], Tensor], device_type: str) -> Callable[[], float]:
    """What runs a step once, on a GPU as one CUDA graph, and returns its microseconds."""
    if device_type == "cpu":
        step()

        def run() -> float:
            begin = time.perf_counter()
            step()
            return (time.perf_counter() - begin) * 1e6

        return run
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    return replay


def slowest(us: float, device_type: str) -> float:
    """The largest of any rank."""
    largest = torch.tensor([us], dtype=torch.float64, device=device_type)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest.item())
