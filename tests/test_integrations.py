"""The library inside other people's scripts, their real packages, and README.md on them."""

import ast
import importlib
import json
import re
import socket
import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import decode as decode_script
import pytest
import torch
import transformers_generate as transformers_script
from torch.distributed.device_mesh import DeviceMesh

import dtensor_sample
from dtensor_sample import SamplingParams
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


@worlds("cpu:2")
@pytest.mark.parametrize("tp_plan", [pytest.param("colwise", marks=pytest.mark.slow), "auto"])
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


@worlds("cpu:2")
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


def torchtitan_script() -> Any:
    """The script; a test that asks for it is skipped where torchtitan is not installed."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: see the script")
    return importlib.import_module("torchtitan_generate")


TITAN_PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10]]


def torchtitan_texts(mesh: DeviceMesh, name: str, backend: str) -> tuple[Any, Any, Any]:
    """What torchtitan_generate.py does; what the whole model finds likeliest; sampled texts."""
    script = torchtitan_script()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torchtitan's code brings is not ours
        model, dims = script.build_model(name, backend, mesh.size())
        generate = partial(script.generate, model, dims, TITAN_PROMPTS, max_new_tokens=4)
        texts = generate(greedy(len(TITAN_PROMPTS)))
        sampled = generate(SamplingParams(seed=3).spawn(len(TITAN_PROMPTS)))
        whole = script.random_model(name, mesh.device_type).eval()
        likeliest = []
        with torch.no_grad(), script.eager_attention(mesh.device_type):
            for prompt, text in zip(TITAN_PROMPTS, texts, strict=True):
                tokens, positions = script.pack([prompt + text], mesh.device_type)
                masks = whole.get_attention_masks(positions)
                logits = whole(tokens, positions=positions, attention_masks=masks)[0]
                likeliest.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist())
    return texts, likeliest, sampled


@pytest.mark.slow
@worlds("cpu:2")
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_torchtitan(ranks: Ranks, name: str) -> None:
    """Both backends draw one text: greedily, the one that the whole model finds likeliest."""
    torchtitan_script()
    shards = ranks.run(torchtitan_texts, name, "spmd_types", timeout=100)
    dtensors = ranks.run(torchtitan_texts, name, "partial_dtensor", timeout=100)
    texts, likeliest, sampled = shards[0]
    assert texts == likeliest
    assert sampled != texts
    assert shards == dtensors == [shards[0]] * ranks.size


@pytest.mark.slow
def test_torchtitan_script(tmp_path: Path) -> None:
    """The script as users start it."""
    script = Path(torchtitan_script().__file__)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    stdout, _ = run(*torchrun, script, "--max-new-tokens", 2, folder=tmp_path)
    assert [line.split(" -> ")[0] for line in stdout.splitlines()] == ["1 2 3", "4 5", "6 7 8 9"]


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


def marked(path: Path) -> list[str]:
    """The lines between marks in a file, without their indentation."""
    blocks = re.findall(r"^( *)# \[sample\]\n(.*?)^ *# \[/sample\]$", path.read_text(), re.M | re.S)
    return [
        line.removeprefix(indent) for indent, block in blocks for line in block.split("\n") if line
    ]


README = Path(__file__).parent.parent / "README.md"


def test_readme_has_the_lines_of_the_examples() -> None:
    """What README.md adds to other people's scripts is what the tested examples do."""
    section = (
        README.read_text().split("## In the scripts people already have\n")[1].split("\n## ")[0]
    )
    changes = re.findall(r"\(examples/(\w+\.py)\).*?```diff\n(.*?)```", section, re.S)
    assert len(changes) == section.count("```diff") == 3
    for name, change in changes:
        lines = [line for line in change.splitlines() if line]
        assert all(line[0] in "+- " for line in lines), name
        imported, *added = [line[1:] for line in lines if line[0] == "+"]
        path = README.parent / "examples" / name
        assert added == marked(path), name
        names = imported.removeprefix("from dtensor_sample import ").split(", ")
        used = {
            node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
        }
        assert set(names) <= used & set(dtensor_sample.__all__), name
