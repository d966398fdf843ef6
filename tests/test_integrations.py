"""The library inside other people's scripts: their models, their loops, their compiled steps."""

import json
import socket
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import decode as decode_script
import gpt_fast_step
import pytest
import torch
import transformers_generate as transformers_script
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtensor_sample import SamplingParams, sample, vocab_sharded
from tests.batches import shard_vocab
from tests.pool import Ranks, worlds
from tests.test_distribution import p_value, softmax
from tests.test_examples import SMALL_PROMPTS, greedy, run, save_small, start

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random model on disk, and in transformers."""
    path = tmp_path_factory.mktemp("model")
    return path, save_small(path, tied=False, num_key_value_heads=2, intermediate_size=64)


@lru_cache(maxsize=2)
def transformers_model(path: Path, tp_plan: str, ranks: int) -> Any:
    return transformers_script.load_model(str(path), tp_plan, ranks)


def transformers_texts(
    mesh: DeviceMesh,
    path: Path,
    tp_plan: str,
    packed: bool,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    max_new_tokens: int = NEW_TOKENS,
) -> list[list[int]]:
    """What transformers_generate.py does on the ranks of a mesh."""
    model = transformers_model(path, tp_plan, mesh.size())
    script = transformers_script
    generate = script.generate_packed if packed else script.generate
    return generate(model, prompts, params, max_new_tokens=max_new_tokens)


@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("tp_plan", ["colwise", "auto"])
def test_transformers_text_equals_generate(
    ranks: Ranks, small: tuple[Path, Any], tp_plan: str
) -> None:
    """Catches columns in the wrong order, wrong rows or positions, and requests that mix.

    The vocabulary does not divide by the ranks.
    """
    path, model = small
    wanted = []
    for prompt in SMALL_PROMPTS:
        ids = torch.tensor([prompt])
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=0,
        )
        wanted.append(text[0, len(prompt) :].tolist())
    for packed in (False, True):
        params = greedy(len(SMALL_PROMPTS))
        for texts in ranks.run(transformers_texts, path, tp_plan, packed, SMALL_PROMPTS, params):
            assert texts == wanted, f"packed: {packed}"


@worlds("cpu:2", "cuda:2")
def test_transformers_distribution(ranks: Ranks, small: tuple[Path, Any]) -> None:
    """Next tokens of one prompt, sampled many times, follow the model's own probabilities.

    Catches a temperature applied twice, and rows or columns in a wrong order.
    """
    path, model = small
    prompt, count = SMALL_PROMPTS[0], 4096
    with torch.no_grad():
        row = model(torch.tensor([prompt])).logits[0, -1].tolist()
    params = SamplingParams(temperature=3.0, seed=11).spawn(count)
    prompts = [prompt] * count
    texts = ranks.run(transformers_texts, path, "colwise", False, prompts, params, 1)[0]
    counts = torch.tensor(texts).flatten().bincount(minlength=len(row)).numpy()
    assert p_value(counts, softmax(row, 3.0)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--packed", "--tp-plan", "auto"]])
def test_transformers_script(small: tuple[Path, Any], tmp_path: Path, options: list[str]) -> None:
    """The script as users start it."""
    path, _ = small
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    script = Path(transformers_script.__file__)
    stdout, _ = run(*torchrun, script, *options, path, "abc", "x", folder=tmp_path)
    assert [line[0] for line in stdout.splitlines() if line] == ["a", "x"]


def gpt_fast_tokens(
    mesh: DeviceMesh, shard_head: bool, own: SamplingParams, backend: str
) -> list[list[list[int]]]:
    """Tokens of the compiled step of gpt_fast_step.py, and of the eager one."""
    torch._dynamo.reset()
    model = gpt_fast_step.Model(mesh, shard_head=shard_head, num_layers=1).to(mesh.device_type)
    params = SamplingParams.batch(own.spawn(3), mesh.device_type)
    with mock.patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        compiled = gpt_fast_step.compile_step(model)
    return [
        gpt_fast_step.generate(model, step, params, 6).tolist() for step in (compiled, model.step)
    ]


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


def sample_in_compiled_head(mesh: DeviceMesh) -> list[list[int]]:
    """A head under parallelize_module and `sample`, in one compiled function; then both eager."""
    torch._dynamo.reset()
    head = nn.Linear(16, V, bias=False, device=mesh.device_type)
    head = parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
    params = SamplingParams.batch([PARAMS] * ROWS, mesh.device_type)

    def step(hidden: Tensor, position: Tensor) -> Tensor:
        return sample(head(hidden) * 8, params, position=position) + 1

    hidden = torch.randn(ROWS, 16).to(mesh.device_type)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    return [
        run(hidden, positions).tolist()
        for run in (compiled, step)
        for positions in (POSITIONS.to(mesh.device_type), POSITIONS.to(mesh.device_type) + 1)
    ]


@worlds("cpu:2", "cuda:2")
def test_in_a_compiled_region(ranks: Ranks) -> None:
    for first, second, *eager in ranks.run(sample_in_compiled_head):
        assert [first, second] == eager
        assert first != second


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


@pytest.mark.slow
def test_two_agents(small: tuple[Path, Any], tmp_path: Path) -> None:
    """Ranks of two launchers that meet at an endpoint draw the tokens of a single rank."""
    path, _ = small
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    script = Path(decode_script.__file__)
    arguments = ("--model", path, "--temperature", 1.5, "--seed", 9, "--json", "abc", "x")
    agents = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        agents.append(
            start(
                *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
                *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"),
                *("--rdzv-id=1", "--nproc-per-node=1", script, *arguments),
                stdout=tmp_path / str(node) / "stdout",
                stderr=tmp_path / str(node) / "stderr",
            )
        )
    try:
        for node, agent in enumerate(agents):
            agent.join(100)
            assert agent.exitcode == 0, (tmp_path / str(node) / "stderr").read_text()
    finally:
        for agent in agents:
            agent.kill()
            agent.join()
    reports = [
        json.loads(text)
        for node in range(2)
        if (text := (tmp_path / str(node) / "stdout").read_text())
    ]
    stdout, _ = run(script, *arguments, folder=tmp_path)
    texts = [[request["token_ids"] for request in report["requests"]] for report in reports]
    assert texts == [[request["token_ids"] for request in json.loads(stdout)["requests"]]]
    assert reports[0]["figures"]["ranks"] == 2
