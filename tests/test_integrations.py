"""The library inside other people's scripts: their models, their loops, their compiled steps."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_generate as transformers_script
from torch.distributed.device_mesh import DeviceMesh

from dtensor_sample import SamplingParams
from tests.pool import Ranks, worlds
from tests.test_distribution import p_value, softmax
from tests.test_examples import SMALL_PROMPTS, greedy, run, save_small

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
