"""`sample` inside other people's compiled steps, in local_map, and on meshes of two axes."""

import warnings
from functools import partial
from unittest import mock

import gpt_fast_step
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtensor_sample import SamplingParams, sample, vocab_sharded
from dtensor_sample.params import BatchedParams
from tests.batches import shard_vocab
from tests.pool import Ranks, worlds


def gpt_fast_tokens(
    mesh: DeviceMesh, shard_head: bool, own: SamplingParams, backend: str
) -> list[list[list[int]]]:
    """Tokens of the compiled step of gpt_fast_step.py, and of the eager one."""
    torch._dynamo.reset()
    model = gpt_fast_step.Model(mesh, shard_head=shard_head, num_layers=1).to(mesh.device_type)
    params = SamplingParams.batch(own.spawn(3), mesh.device_type)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        compiled = gpt_fast_step.compile_step(model)
    steps = (compiled, model.step)
    with warnings.catch_warnings():
        # The compiler splits a step where it cannot record, and warns of parts that launched
        # nothing. Whether anything is missing, the tokens show.
        warnings.filterwarnings("ignore", "The CUDA Graph is empty", UserWarning)
        return [gpt_fast_step.generate(model, step, params, 6).tolist() for step in steps]


def check_compiled_step(
    ranks: Ranks, shard_head: bool, params: SamplingParams, backend: str
) -> None:
    results = ranks.run(gpt_fast_tokens, shard_head, params, backend, timeout=250)
    compiled, eager = results[0]
    assert compiled == eager
    assert results == [results[0]] * ranks.size
    assert len({token for row in eager for token in row}) > 6


FILTERS = SamplingParams(top_k=50, top_p=0.9, seed=5)


@worlds("cpu:2")
@pytest.mark.parametrize("shard_head", [True, False])
def test_traced_step(ranks: Ranks, shard_head: bool) -> None:
    """Catches a graph break in `sample`, and a draw that the graph has frozen."""
    check_compiled_step(ranks, shard_head, FILTERS, "aot_eager")


@pytest.mark.slow  # compiling takes most of a minute
@worlds("cpu:2", "cuda:2")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard_head", [True, False])
def test_compiled_step(ranks: Ranks, shard_head: bool) -> None:
    """The same in generated code; a CUDA graph where there are devices."""
    check_compiled_step(ranks, shard_head, FILTERS, "inductor")


V, ROWS = 1003, 5
POSITIONS = torch.arange(ROWS) + 40
PARAMS = SamplingParams(temperature=0.9, top_k=40, seed=3)


def logits_of(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, V, generator=torch.Generator().manual_seed(seed)) * 3


def sample_in_compiled_head(
    mesh: DeviceMesh, params: SamplingParams | list[SamplingParams], batched: bool
) -> list[list[int]]:
    """A head under parallelize_module and `sample`, in one compiled function; then both eager."""
    torch._dynamo.reset()
    head = nn.Linear(16, V, bias=False, device=mesh.device_type)
    parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    listed = params if isinstance(params, list) else [params] * ROWS
    given = SamplingParams.batch(listed, mesh.device_type) if batched else params

    def step(hidden: Tensor, position: Tensor) -> Tensor:
        return sample(head(hidden) * 8, given, position=position) + 1

    hidden = torch.randn(ROWS, 16).to(mesh.device_type)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    return [
        run(hidden, positions).tolist()
        for run in (compiled, step)
        for positions in (POSITIONS.to(mesh.device_type), POSITIONS.to(mesh.device_type) + 1)
    ]


OF_MANY_KINDS = [
    PARAMS,
    SamplingParams(temperature=0),
    SamplingParams(top_p=0.8),  # without a seed
    SamplingParams(min_p=0.1, seed=(1 << 64) - 1),
    SamplingParams(temperature=1e-4, seed=0),
]


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("params", [PARAMS, OF_MANY_KINDS], ids=["one for all", "of many kinds"])
@pytest.mark.parametrize("batched", [False, True])
def test_in_a_compiled_region(
    ranks: Ranks, params: SamplingParams | list[SamplingParams], batched: bool
) -> None:
    """Catches host arithmetic that cannot be traced, or that traces to something else."""
    for first, second, *eager in ranks.run(sample_in_compiled_head, params, batched):
        assert [first, second] == eager
        assert first != second


def sample_at_integers(mesh: DeviceMesh) -> list[int]:
    """Compiles graphs for calls whose position, base seed or packed parameters are others each."""
    logits = shard_vocab(logits_of().to(mesh.device_type), mesh)
    unseeded = SamplingParams(top_k=40)

    def step(position: int, base_seed: int) -> Tensor:
        return sample(logits, unseeded, position=position, base_seed=base_seed)

    def packed_step(packed: BatchedParams) -> Tensor:
        return sample(logits, packed, position=3)

    positions = [(number, 7) for number in (*range(11), (1 << 63) - 1)]
    seeds = [(5, number) for number in (*range(11), (1 << 63) - 1)]
    many = [[SamplingParams(temperature=1 + i / 9, top_k=40, seed=i)] * ROWS for i in range(12)]
    packed = [(SamplingParams.batch(params, mesh.device_type),) for params in many]
    graphs = []
    for run, calls in ((step, positions), (step, seeds), (packed_step, packed)):
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="eager")
        before = counters["stats"]["unique_graphs"]
        drawn = [compiled(*call).tolist() for call in calls]
        assert drawn == [run(*call).tolist() for call in calls]
        assert len(set(map(tuple, drawn))) > 9
        graphs.append(counters["stats"]["unique_graphs"] - before)
    return graphs


@worlds("cpu:2", "cuda:2")
def test_integers_are_no_constants(ranks: Ranks) -> None:
    """Catches a graph for each position of a loop: the compiler gives up at the ninth.

    The first integer is taken to be a constant, 0 and 1 always are, and the others share a graph.
    """
    for graphs in ranks.run(sample_at_integers):
        assert all(count <= 3 for count in graphs[:2])
        assert graphs[2] == 1


def sample_in_local_map(mesh: DeviceMesh) -> tuple[list[int], list[int]]:
    """`sample` where the script sees plain shards of its DTensors; then on the DTensor."""
    logits = shard_vocab(logits_of().to(mesh.device_type), mesh)

    def step(local: Tensor) -> Tensor:
        whole = vocab_sharded(local, mesh, vocab_size=V)
        return sample(whole, PARAMS, position=POSITIONS)

    mapped = local_map(
        step,
        out_placements=[Replicate()],
        in_placements=([Shard(1)],),
        device_mesh=mesh,
    )
    drawn = mapped(logits)
    assert isinstance(drawn, DTensor)
    return drawn.to_local().tolist(), sample(logits, PARAMS, position=POSITIONS).tolist()


@worlds("cpu:2", "cuda:2")
def test_in_local_map(ranks: Ranks) -> None:
    for mapped, direct in ranks.run(sample_in_local_map):
        assert mapped == direct


def sample_on_two_axes(mesh: DeviceMesh) -> list[list[int]]:
    """Each row of ranks samples logits of its own, plain shards; eager and compiled."""
    torch._dynamo.reset()
    both = init_device_mesh(mesh.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
    logits = logits_of(both.get_local_rank("dp")).to(mesh.device_type)
    local = shard_vocab(logits, both["tp"]).to_local()
    params = SamplingParams.batch([PARAMS] * ROWS, mesh.device_type)

    def step(local: Tensor, position: Tensor) -> Tensor:
        whole = vocab_sharded(local, both["tp"], vocab_size=V)
        return sample(whole, params, position=position)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    position = POSITIONS.to(mesh.device_type)
    return [run(local, position).tolist() for run in (step, compiled)]


def sample_alone(mesh: DeviceMesh, seed: int) -> list[int]:
    logits = shard_vocab(logits_of(seed).to(mesh.device_type), mesh)
    return sample(logits, PARAMS, position=POSITIONS).tolist()


@worlds("cpu:4")
def test_on_two_axes(ranks: Ranks) -> None:
    results = ranks.run(sample_on_two_axes)
    wanted = [ranks.run(sample_alone, seed)[0] for seed in (0, 1)]
    for rank, drawn in enumerate(results):
        assert drawn == [wanted[rank // 2]] * 2
