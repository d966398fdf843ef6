"""The example: its model, its tokenizer, and decode.py as it is run.

The model is compared with transformers, the tokenizer with byte-pair encoding by the book.
"""

import io
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import decode as script
import numpy as np
import plot
import pytest
import regex  # type: ignore[import-untyped]
import torch
import weights
from display import Display, LineDisplay, LiveDisplay
from drafters import ModelDrafter
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize
from grammar import Grammar
from llama import Llama, load_llama
from meter import Meter
from prompts import Request
from rich.console import Console
from text import TextStream
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.device_mesh import DeviceMesh

from dtensor_sample import (
    BatchSharder,
    Drafter,
    NgramDrafter,
    RejectionSampler,
    Sampler,
    SamplerOutput,
    SamplingParams,
    SamplingState,
    ShardPlan,
)
from tests.pool import Ranks, worlds

DECODE = Path(script.__file__)
STARTUP = Path(__file__).parent / "startup"
PROMPTS = ["The capital of France is", "Once upon a time in 1984, a", "1, 2,"]
NEW_TOKENS = 8


def decode_prompts(
    mesh: DeviceMesh,
    path: Path | None,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    max_num_reqs: int,
    sampler_class: type[Sampler] = Sampler,
    compare: bool = False,
) -> list[list[int]]:
    """What decode.py does on the ranks of a mesh."""
    checkpoint = weights.open_checkpoint(path)
    tokenizer = checkpoint.tokenizer
    requests = [
        Request(
            index=i,
            prompt="",
            prompt_token_ids=prompt_token_ids,
            params=params[i],
            stream=tokenizer.stream(),
        )
        for i, prompt_token_ids in enumerate(prompts)
    ]
    model = load_llama(checkpoint, mesh, dtype=torch.float32)
    model.allocate_cache(max_num_reqs=max_num_reqs, max_length=128)
    V = checkpoint.config.vocab_size
    script.decode(
        model,
        requests,
        sampler_class(SamplingState(mesh, vocab_size=V, max_num_reqs=max_num_reqs)),
        mesh=mesh,
        max_new_tokens=NEW_TOKENS,
        eos_token_ids=tokenizer.eos_token_ids,
        compare=compare,
        meter=Meter(mesh.device_type),
        display=Display(),
    )
    return [request.token_ids for request in requests]


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0)] * count


def assert_greedy(
    model: Any, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], eos: set[int]
) -> None:
    """Every text is what `model`, of transformers, generates greedily, and ends where it should.

    Greedily: each of its tokens is the likeliest one after those before it. One pass shows that.
    """
    rows = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    width = max(map(len, rows))
    with torch.no_grad():
        # Padding on the right is seen by nobody.
        logits = model(torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])).logits
    for prompt, text, likeliest in zip(prompts, texts, logits.argmax(-1).tolist(), strict=True):
        assert text == likeliest[len(prompt) - 1 :][: len(text)]
        assert not eos & set(text[:-1])
        assert len(text) == NEW_TOKENS or text[-1] in eos


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The ranks need the other cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def default() -> weights.Checkpoint:
    """The default model."""
    return weights.open_checkpoint()


@pytest.fixture(scope="module")
def default_reference(default: weights.Checkpoint) -> Any:
    """The default model in transformers, with the weights that we read."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    tensors = {name: default.read(name) for name in weights.tensor_names(default.config)}
    return LlamaForCausalLM.from_pretrained(None, config=config, state_dict=tensors).eval()


@worlds("cpu:4")
@pytest.mark.slow
def test_default_model_equals_transformers(
    ranks: Ranks, default: weights.Checkpoint, default_reference: Any
) -> None:
    """Three prompts of different lengths take turns in two slots.

    Mistakes in padded heads (9 and 3 on 4 ranks), in rotary positions, in the mask, or in what a
    reused slot still holds change ids.
    """
    ids = [default.tokenizer.encode(prompt) for prompt in PROMPTS]
    results = ranks.run(decode_prompts, None, ids, greedy(len(ids)), max_num_reqs=2)
    assert all(texts == results[0] for texts in results)
    assert_greedy(default_reference, ids, results[0], set(default.tokenizer.eos_token_ids))
    assert default.tokenizer.decode(results[0][0]).startswith(" Paris")


# Neither groups of heads, MLP units nor the vocabulary divide by 4.
SMALL: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": [7, 8],
    "bos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
SMALL_EOS = {7, 8}
SMALL_PROMPTS = [[5, 900, 3], [1] * 20, [17], [4, 5, 6, 7, 8, 9, 10]]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def save_small(path: Path, *, tied: bool, noise: float = 0.0, **changes: object) -> Any:
    """Write a random model as a Hugging Face directory; return the same in transformers.

    The same but for `noise` added to its matrices.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = None if tied else dict(LLAMA3)
    torch.manual_seed(1)
    config = LlamaConfig(**SMALL | changes, tie_word_embeddings=tied, rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if noise and weight.ndim == 2:
                weight += noise * torch.randn_like(weight)
    model.save_pretrained(path, max_shard_size="5GB" if tied else "200KB")
    ids = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ids |= {f"<{i}>": i for i in range(len(ids), SMALL["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(ids, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return model


@pytest.fixture(scope="module", params=["tied", "untied, sharded files, llama3 rope"])
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """A random model on disk, and in transformers."""
    path = tmp_path_factory.mktemp("model")
    tied = request.param == "tied"
    model = save_small(path, tied=tied)
    assert (path / "model.safetensors.index.json").exists() != tied
    return path, model


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on disk."""
    path = tmp_path_factory.mktemp("model")
    save_small(path, tied=True)
    return path


@worlds("cpu:1", "cpu:2", "cpu:4", "cuda:2")
def test_small_model_equals_transformers(ranks: Ranks, small: tuple[Path, Any]) -> None:
    """Mistakes in the parts that ranks read, in uneven vocabularies and in padding change ids."""
    path, model = small
    params = greedy(len(SMALL_PROMPTS))
    results = ranks.run(decode_prompts, path, SMALL_PROMPTS, params, max_num_reqs=3)
    assert all(texts == results[0] for texts in results)
    assert_greedy(model, SMALL_PROMPTS, results[0], SMALL_EOS)


@worlds("cpu:2")
def test_batching_changes_no_text(ranks: Ranks, small_path: Path) -> None:
    """A request draws the same tokens alone as among others that come and go."""
    params = SamplingParams(temperature=1.5, top_p=0.9, seed=5).spawn(len(SMALL_PROMPTS))
    together = ranks.run(decode_prompts, small_path, SMALL_PROMPTS, params, max_num_reqs=2)[0]
    alone = [
        ranks.run(decode_prompts, small_path, [prompt], [own], max_num_reqs=1)[0][0]
        for prompt, own in zip(SMALL_PROMPTS, params, strict=True)
    ]
    assert together == alone


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model whose texts repeat themselves at times, and one that often agrees with it."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    save_small(target, tied=True, initializer_range=0.16)
    save_small(draft, tied=True, initializer_range=0.16, noise=0.008)
    return target, draft


SPECULATIVE_PROMPTS = [[3, 4, 5] * 5, [1] * 20, [17], [5, 900, 3]]
Texts = list[list[int]]


def speculate(
    mesh: DeviceMesh,
    path: Path,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    runs: Sequence[tuple[str, str, Path | None]],
    *,
    max_new_tokens: int = 12,
    eos_token_ids: frozenset[int] = frozenset(),
    drafter_class: type[ModelDrafter] = ModelDrafter,
) -> list[tuple[Texts, dict[str, Any]]]:
    """Texts and figures of some runs: exchange, method, and the draft model; without it n-grams.

    The method "" decodes plainly. Prompts take turns in two slots.
    """
    checkpoint = weights.open_checkpoint(path)

    def load(path: Path) -> Llama:
        model = load_llama(weights.open_checkpoint(path), mesh, dtype=torch.float32)
        model.allocate_cache(max_num_reqs=2, max_length=64)
        return model

    model, results = load(path), []
    for exchange, method, draft_path in runs:
        requests = [
            Request(
                index=i,
                prompt="",
                prompt_token_ids=prompt_token_ids,
                params=params[i],
                stream=checkpoint.tokenizer.stream(),
            )
            for i, prompt_token_ids in enumerate(prompts)
        ]
        state = SamplingState(
            mesh,
            vocab_size=checkpoint.config.vocab_size,
            max_num_reqs=2,
            num_speculative_tokens=4,
            exchange=exchange,
        )
        sampler: Sampler | RejectionSampler = Sampler(state)
        drafter: Drafter | None = None
        if method:
            sampler, drafter = RejectionSampler(state, method=method), NgramDrafter()
        if draft_path is not None:
            drafter = drafter_class(load(draft_path), state)
        meter = Meter(mesh.device_type)
        script.decode(
            model,
            requests,
            sampler,
            drafter=drafter,
            mesh=mesh,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            meter=meter,
        )
        assert meter.figures()["tokens"] == sum(len(request.token_ids) for request in requests)
        # What drafting sent is counted by steps too, not over the run.
        assert getattr(drafter, "wire_bytes", 0) <= meter.figures()["wire_bytes"]
        results.append(([request.token_ids for request in requests], meter.speculation()))
    return results


@worlds("cpu:1", "cpu:2", "cuda:2")
def test_speculation_changes_no_greedy_text(ranks: Ranks, pair: tuple[Path, Path]) -> None:
    """Whatever drafts; and drafts of the model itself are all accepted.

    Mistakes in what either cache holds after refused drafts, in positions, or in which rows of the
    packed batch are whose change texts or lose drafts.
    """
    target, draft = pair
    runs = [
        ("auto", "", None),
        ("batch", "block", None),
        ("vocab", "standard", draft),
        ("batch", "block", target),
    ]
    if ranks.size == 2:
        runs += [("replicate", "block", draft), ("vocab", "standard", None)]
    params = greedy(len(SPECULATIVE_PROMPTS))
    results = ranks.run(speculate, target, SPECULATIVE_PROMPTS, params, runs)
    assert all(result == results[0] for result in results)
    (texts, _), *speculated = results[0]
    assert all(len(text) == 12 for text in texts)
    for (own, figures), (_, _, path) in zip(speculated, runs[1:], strict=True):
        assert own == texts
        if path == target:
            # 1 token from the prompt, 5 from 4 drafts, 5 again, and 1 that needs no draft.
            assert figures["acceptance_per_position"] == [1.0] * 4
            assert figures["tokens_per_target_step"] == 12 / 4
        else:
            assert 0 < figures["accepted_tokens"] < figures["drafted_tokens"]


class Forgetful(ModelDrafter):
    """Shows its model the whole text again for every block."""

    def propose(self, *args: Any) -> tuple[list[list[int]], list[bool]]:
        self._num_cached.clear()
        return super().propose(*args)


@worlds("cpu:1")
def test_a_draft_model_remembers_texts_as_they_are(ranks: Ranks, pair: tuple[Path, Path]) -> None:
    """Refused drafts in its cache do not change what it drafts next."""
    target, draft = pair
    params = SamplingParams(temperature=0.8, seed=5).spawn(len(SPECULATIVE_PROMPTS))
    args = (target, SPECULATIVE_PROMPTS, params, [("auto", "block", draft)])
    remembered = ranks.run(speculate, *args)
    assert remembered == ranks.run(speculate, *args, drafter_class=Forgetful)


@worlds("cpu:2")
def test_speculative_texts_end_where_they_should(ranks: Ranks, pair: tuple[Path, Path]) -> None:
    """At the token that ends a text, in the middle of a block, and at the most tokens allowed."""
    target, draft = pair
    args = (SPECULATIVE_PROMPTS, greedy(len(SPECULATIVE_PROMPTS)))
    [(texts, _)] = ranks.run(speculate, target, *args, [("batch", "", None)])[0]
    end = texts[0][7]
    expected = [text[: text.index(end) + 1] if end in text else text[:10] for text in texts]
    limits: dict[str, Any] = {"max_new_tokens": 10, "eos_token_ids": frozenset([end])}
    runs = [("batch", "block", path) for path in (target, draft)]
    for own, _ in ranks.run(speculate, target, *args, runs, **limits)[0]:
        assert own == [text[:10] for text in expected]


@pytest.mark.slow
@worlds("cpu:2")
def test_random_speculative_texts(ranks: Ranks, pair: tuple[Path, Path]) -> None:
    """The same under every exchange; drafts drawn from the model itself are all accepted."""
    target, draft = pair
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=5).spawn(3)
    runs = [
        ("batch", "block", draft),
        ("vocab", "block", draft),
        ("replicate", "block", draft),
        ("vocab", "block", target),
        ("batch", "standard", target),
    ]
    results = ranks.run(speculate, target, SPECULATIVE_PROMPTS[:3], params, runs)
    assert results[0] == results[1]
    drafted, own = results[0][:3], results[0][3:]
    assert all(result == drafted[0] for result in drafted)
    assert 0 < drafted[0][1]["accepted_tokens"] < drafted[0][1]["drafted_tokens"]
    assert all(figures["acceptance_per_position"] == [1.0] * 4 for _, figures in own)


def test_compare_fails_if_speculation_changes_a_text() -> None:
    one, other = (
        Request(
            index=3,
            prompt="",
            prompt_token_ids=[1],
            params=own,
            stream=TextStream(Tokenizer(models.BPE())),
        )
        for own in greedy(2)
    )
    script.compare_texts([one], [other])
    one.token_ids, other.token_ids = [4, 5], [4, 6]
    with pytest.raises(SystemExit, match=r"prompt 3 differs without .*: \[4, 5\] and \[4, 6\]"):
        script.compare_texts([one], [other])


def test_parts_of_a_gguf_file_are_parts_of_the_whole(default: weights.Checkpoint) -> None:
    """Columns are quantised in blocks of 32, rows of queries are permuted within heads."""
    for name, rows, cols in [
        ("model.layers.3.mlp.down_proj.weight", slice(5, 9), slice(384, 768)),
        ("model.layers.3.mlp.down_proj.weight", slice(None), slice(10, 77)),
        ("model.layers.0.self_attn.q_proj.weight", slice(64, 192), slice(None)),
        ("model.embed_tokens.weight", slice(49000, 49152), slice(None)),
        ("model.norm.weight", slice(None), slice(None)),
    ]:
        whole, part = default.read(name), default.read(name, rows, cols)
        assert torch.equal(part, whole[rows, cols] if whole.ndim == 2 else whole)


def test_rotary_rows_of_a_gguf_file_are_put_back(default: weights.Checkpoint) -> None:
    """The inverse of what the converter does: it makes the halves of a head neighbours."""
    weight_KH = default.read("model.layers.7.self_attn.k_proj.weight")
    tensors = {t.name: t for t in weights._Reader(weights.find_default_model()).tensors}
    tensor = tensors["blk.7.attn_k.weight"]
    permuted_KH = weight_KH.view(3, 2, 32, 576).transpose(1, 2).reshape(192, 576)
    assert np.array_equal(permuted_KH.numpy(), dequantize(tensor.data, tensor.tensor_type))


def write_gguf(path: Path, **fields: object) -> Path:
    """A GGUF file of metadata alone."""
    writer = GGUFWriter(path, "llama")
    for key, value in fields.items():
        key = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_quick_reader_reads_what_the_library_reads(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "x.gguf",
        words=["a", "", "\u00e9\u4e16", " b c"],
        numbers=[3, -1, 7],
        floats=[0.5, 2.0],
        after="end",
        one=1,
    )
    ours, theirs = weights._Reader(path).fields, GGUFReader(path).fields
    assert list(ours) == list(theirs)
    for key, field in theirs.items():
        assert ours[key].contents() == field.contents(), key


# Byte-pair encoding by the book.
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [
    "The capital of France is",
    "  two  spaces, a tab\t and\n\nlines \n",
    "In 1984 pi was 3.14159, or 22/7; 1e-10",
    "don't I'll we've IT'S",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0661\u0662\u0663 \u00bd \u2167 x\u00b2",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7!",
    "\x00\x7f\u00a0\ufeff",
    "def f(x):\n    return x**2  # \u2264",
]


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Alan", "Grace"]},
        "born": {"type": "integer", "minimum": 1800, "maximum": 2000},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "born", "tags"],
    "additionalProperties": False,
}


def texts_by_grammar(
    mesh: DeviceMesh, path: Path, count: int, speculate: bool, exchange: str, **grammar: Any
) -> list[tuple[str, str]]:
    """Texts that a random model writes at temperature 1 by a grammar, and why each ended."""
    checkpoint = weights.open_checkpoint(path)
    V, tokenizer = checkpoint.config.vocab_size, checkpoint.tokenizer
    model = load_llama(checkpoint, mesh, dtype=torch.float32)
    model.allocate_cache(max_num_reqs=count // 2, max_length=128)
    requests = [
        Request(
            index=i,
            prompt="",
            prompt_token_ids=tokenizer.encode("JSON: " + "[true,true,false]" * (i % 2)),
            params=SamplingParams(presence_penalty=0.2 * (i % 3), seed=i),
            stream=tokenizer.stream(),
        )
        for i in range(count)
    ]
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=count // 2,
        num_speculative_tokens=4 * speculate,
        exchange=exchange,
    )
    script.decode(
        model,
        requests,
        RejectionSampler(state) if speculate else Sampler(state),
        drafter=NgramDrafter() if speculate else None,
        grammar=Grammar(tokenizer, V, **grammar),
        mesh=mesh,
        max_new_tokens=100,
        eos_token_ids=tokenizer.eos_token_ids,
        meter=Meter(mesh.device_type),
    )
    # What ends a text of this model is no special token, but a character.
    return [(tokenizer.decode(r.token_ids[:-1]), r.finish_reason) for r in requests]


@pytest.mark.slow
@worlds("cpu:2", "cuda:2")
@pytest.mark.parametrize("speculate", [False, True])
def test_a_hundred_texts_parse(
    ranks: Ranks, small_path: Path, tmp_path: Path, speculate: bool
) -> None:
    """Every text at temperature 1 is JSON by the schema, or what the expression matches."""
    pytest.importorskip("llguidance", reason="grammars need the extra `examples`")
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    args = (small_path, 100, speculate)
    results = ranks.run(texts_by_grammar, *args, "batch", json_schema=schema)
    assert results == [results[0]] * ranks.size
    names, born = set(), set()
    for text, reason in results[0]:
        person = json.loads(text)
        assert set(person) == {"name", "born", "tags"}
        assert 1800 <= person["born"] <= 2000
        assert len(person["tags"]) <= 3
        assert reason == "stop"
        names.add(person["name"])
        born.add(person["born"])
    assert names == {"Ada", "Alan", "Grace"}
    assert len(born) > 10
    for text, _ in ranks.run(texts_by_grammar, *args, "vocab", regex="[ab]{3}-[0-9]{2,4}")[0]:
        assert re.fullmatch("[ab]{3}-[0-9]{2,4}", text)


def test_grammars_that_are_refused(default: weights.Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="grammars need the extra `examples`")
    tokenizer, V = default.tokenizer, default.config.vocab_size
    bad, broken = tmp_path / "bad.json", tmp_path / "broken.json"
    bad.write_text('{"type": "no such type"}')
    broken.write_text("{type: object}")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("no JSON schema .*none", {"json_schema": tmp_path / "none"}),
        ("broken.json is no JSON schema: .* line 1", {"json_schema": broken}),
        ("llguidance refuses the grammar of .*bad.json: ", {"json_schema": bad}),
        (r"llguidance refuses the grammar of '\(': ", {"regex": "("}),
    ]
    for message, given in cases:
        with pytest.raises(ValueError, match=message):
            Grammar(tokenizer, V, **given)


@pytest.mark.parametrize(
    ("stops", "wanted"),
    [
        ([" mat"], "The cat sat on the"),
        (["at o", "zebra"], "The cat s"),
        (["mat. The", "sat"], "The cat "),
        (["mat!", "matter"], "The cat sat on the mat. Th\u00e9 end"),
        (["."], "The cat sat on the mat"),
        (["d"], "The cat sat on the mat. Th\u00e9 en"),
    ],
)
def test_texts_end_before_stops(default: weights.Checkpoint, stops: list[str], wanted: str) -> None:
    """Catches a stop that is cut by tokens or shown in part, and text that is held for good."""
    ids = default.tokenizer.encode("The cat sat on the mat. Th\u00e9 end")
    stream, shown = default.tokenizer.stream(stops), ""
    request = Request(
        index=0, prompt="", prompt_token_ids=[1], params=SamplingParams(), stream=stream
    )
    for start in range(0, len(ids), 2):
        _, pieces = request.take(
            ids[start : start + 2], max_new_tokens=99, eos_token_ids=frozenset()
        )
        shown += "".join(pieces)
        assert wanted.startswith(shown)
        if request.finish_reason:
            break
    assert (request.finish_reason == "stop") == (stops != ["mat!", "matter"])
    shown += stream.finish(request.token_ids)
    assert shown == stream.text == wanted
    assert request.token_ids == ids[: len(request.token_ids)]


def byte_characters() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def encode_by_the_book(text: str, ids: dict[str, int], ranks: dict[str, int]) -> list[int]:
    characters = byte_characters()
    encoded = []
    for part in regex.split(r"(\p{N})", text):
        for piece in regex.findall(SPLIT, part):
            symbols = [characters[byte] for byte in piece.encode()]
            while pairs := [
                (ranks[pair], i)
                for i, pair in enumerate(map(" ".join, pairwise(symbols)))
                if pair in ranks
            ]:
                _, i = min(pairs)
                symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
            encoded += [ids[symbol] for symbol in symbols]
    return encoded


@pytest.fixture(scope="module")
def vocabulary() -> tuple[dict[str, int], dict[str, int]]:
    """Ids of tokens and ranks of merges of the default model."""
    fields = weights._Reader(weights.find_default_model()).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    return {t: i for i, t in enumerate(tokens)}, {m: i for i, m in enumerate(merges)}


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_encodes_by_the_book(
    default: weights.Checkpoint, vocabulary: tuple[dict[str, int], dict[str, int]], text: str
) -> None:
    token_ids = default.tokenizer.encode(text)
    assert token_ids == encode_by_the_book(text, *vocabulary)
    assert default.tokenizer.decode(token_ids) == text


def test_special_tokens_are_single_ids(default: weights.Checkpoint) -> None:
    tokenizer = default.tokenizer
    token_ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert token_ids == [1, *tokenizer.encode("a"), 2]
    assert tokenizer.decode(token_ids) == "a"
    assert tokenizer.eos_token_ids == {0, 2}


def test_chat_template_is_the_models(default: weights.Checkpoint) -> None:
    tokenizer = default.tokenizer
    token_ids = tokenizer.encode("Hi", chat=True)
    message = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert token_ids[-len(message) :] == message
    assert tokenizer.decode(token_ids).startswith("system\nYou are a helpful AI assistant")


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(default: weights.Checkpoint, text: str) -> None:
    """No piece splits a character, though tokens do."""
    token_ids = default.tokenizer.encode(text)
    stream = default.tokenizer.stream()
    pieces = [stream.push(token_id) for token_id in token_ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish(token_ids) == text == stream.text


def test_a_character_cut_short_is_shown_at_the_end(default: weights.Checkpoint) -> None:
    token_ids = default.tokenizer.encode("a\U0001f469")[:-1]
    stream = default.tokenizer.stream()
    assert "".join(map(stream.push, token_ids)) == "a"
    assert stream.finish(token_ids) == "\ufffd"


def test_lines_are_whole_words_of_one_text() -> None:
    """Without a terminal, texts that grow together come as lines that say whose they are."""
    out = io.StringIO()
    display = LineDisplay("", Console(file=out, width=80))
    words = [f"word{i} " for i in range(20)]
    display.begin(0, "Once ")
    display.begin(1, "Twice ")
    for word in words:
        display.write(0, word)
        display.write(1, word[:3])
        display.write(1, word[3:])
    display.write(0, "\n\n[bold]end[/]")
    display.end(0)
    display.end(1)
    lines = out.getvalue().splitlines()
    own = [[line[4:] for line in lines if line.startswith(f"[{i}] ")] for i in (0, 1)]
    assert sum(map(len, own)) == len(lines)
    assert " ".join(own[0]).split() == ["Once", *map(str.strip, words), "[bold]end[/]"]
    assert " ".join(own[1]).split() == ["Twice", *map(str.strip, words)]
    assert max(map(len, lines)) < 80


def test_texts_are_coloured_by_probability() -> None:
    display = LiveDisplay("")
    display.begin(0, "Once ")
    for piece, logprob in [("a", -0.01), ("b", -0.5), ("c", -2.0), ("d", -math.inf), ("e", None)]:
        display.write(0, piece, logprob)
    spans = {span.start: span.style for span in display._texts[0].spans}
    assert spans == {0: "bold", 5: "green", 6: "yellow", 7: "dark_orange", 8: "red"}


def error_of(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """What decode.py says before any rank talks to another."""
    monkeypatch.setattr(sys, "argv", ["decode.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        script.main()
    return str(raised.value)


def test_bad_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, small_path: Path, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    other, short = (tmp_path / name for name in ("other", "short"))
    for path, change in ((other, {"vocab_size": 500}), (short, {"max_position_embeddings": 16})):
        path.mkdir()
        settings = json.loads((small_path / "config.json").read_text()) | change
        (path / "config.json").write_text(json.dumps(settings))
        (path / "model.safetensors").symlink_to(small_path / "model.safetensors")
    own_draft: list[object] = ["--speculate", "draft", "--draft-model", small_path]
    cases: list[tuple[list[object], str]] = [
        (["--top-p", 3], "top_p must be"),
        (["--temperature", -1], "temperature must be"),
        (["--seed", -1], "seed must be"),
        (["--logprobs", -1], "logprobs must be"),
        (["--repetition-penalty", 0], "repetition_penalty must be"),
        (["--min-tokens", -1], "min_tokens must be"),
        (["--stop-token-id", 999999], r"--stop-token-id must be an id in \[0, 1002\], got 999999"),
        (["--stop-token-id", -1], "--stop-token-id must be an id in .*, got -1"),
        (["--compare", "--presence-penalty", 1], "--compare needs texts without grammar"),
        (["a", " "], "prompt 1 is empty"),
        (["a" * 250], "prompt 0 has 250 tokens, and 24 new ones: more than the model's .* 256"),
        (["--prompt-file", tmp_path / "none"], "no prompt file"),
        (["--prompt-file", empty], "no prompt in"),
        (["--chat", "a"], "the model has no chat template"),
        (["--plot", tmp_path / "a.txt"], "--plot must end in .png, .pdf, .svg, got .*a.txt"),
        (["--plot", tmp_path / "none" / "a.png"], "--plot must lie in a folder that exists"),
        ([*own_draft, "--compare", "--temperature", 1], "--compare needs --temperature 0"),
        (["--speculate", "draft", "--draft-model", other], "model's vocabulary of 1003 ids, got 5"),
        (
            ["--speculate", "draft", "--draft-model", short, "Hello"],
            "a context of 29 tokens, .* got 16",
        ),
        (["--speculate", "draft", "--draft-model", empty], "empty is no GGUF file"),
    ]
    for arguments, message in cases:
        error = error_of("--model", small_path, *arguments, monkeypatch=monkeypatch)
        assert re.search(message, error), error
    assert "expected a GGUF file or a Hug" in error_of("--model", "none", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "arguments",
    [
        "--max-new-tokens 0",
        "--max-num-reqs 0",
        "--exchange ring",
        "--dtype int8",
        "--top-k x",
        "--speculate guess",
        "--num-speculative-tokens 0",
        "--method rows",
    ],
)
def test_bad_options_are_refused(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(*arguments.split(), monkeypatch=monkeypatch) == "2"
    assert f"argument {arguments.split()[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["--num-speculative-tokens 3", "--method standard"])
def test_options_of_speculation_need_it(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an option that is silently ignored."""
    assert error_of(*arguments.split(), monkeypatch=monkeypatch) == "2"
    assert f"{arguments.split()[0]} needs --speculate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--draft-model x --speculate ngram", "--draft-model needs --speculate draft or block"),
        ("--draft-model x", "--draft-model needs --speculate draft or block"),
        ("--model x --speculate draft", "--speculate draft needs --draft-model for another"),
        ("--model x --speculate block", "--speculate block needs --draft-model for another"),
    ],
)
def test_a_draft_model_and_its_use_need_each_other(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert error_of(*arguments.split(), monkeypatch=monkeypatch) == "2"
    assert message in capsys.readouterr().err


def test_models_of_other_kinds_are_refused(tmp_path: Path, small_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("GG")
    write_gguf(tmp_path / "other.gguf", llama__expert_count=8)
    settings = json.loads((small_path / "config.json").read_text())
    for name, changes in {
        "mixture": {"model_type": "mixtral"},
        "biased": {"attention_bias": True},
        "stretched": {"rope_parameters": {"rope_type": "yarn"}},
        "deeper": {"num_hidden_layers": 4},
        "shallower": {"num_hidden_layers": 1},
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(settings | changes))
        (tmp_path / name / "model.safetensors").symlink_to(small_path / "model.safetensors")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "text.gguf": "is no GGUF file",
        "other.gguf": "other.gguf ",
        "mixture": "must have model_type = 'llama', got 'mixtral'",
        "biased": "must have attention_bias = False, got True",
        "stretched": "must have rope_type = 'default' or 'llama3', got 'yarn'",
        "deeper": "lacks tensors: model.layers.3",
        "shallower": "has unsupported tensors: model.layers.1",
        "empty": "config.json cannot be read",
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            weights.open_checkpoint(tmp_path / name)


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    error = error_of("--plot", tmp_path / "a.png", monkeypatch=monkeypatch)
    assert "pip install matplotlib" in error


def test_a_meter_counts_drafts_by_position() -> None:
    meter = Meter("cpu")
    for tokens, drafted, accepted in ((1, 0, 0), (3, 2, 2), (2, 3, 1), (1, 1, 0)):
        meter.count(tokens, drafted=drafted, accepted=accepted)
    assert meter.speculation() == {
        "drafted_tokens": 6,
        "accepted_tokens": 3,
        "drafted_per_position": [3, 2, 1],
        "accepted_per_position": [2, 1, 0],
        "acceptance_per_position": [2 / 3, 1 / 2, 0.0],
        "acceptance_length": 2.0,
        "tokens_per_target_step": 7 / 4,
        "steps_by_tokens": [2, 1, 1],
    }


def meter_steps(mesh: DeviceMesh) -> tuple[dict[str, Any], Any, int]:
    """Figures of steps of one, two and one rows, and what the second costs."""
    state = SamplingState(mesh, vocab_size=50, max_num_reqs=2, exchange="batch")
    for slot in range(2):
        state.add(slot, SamplingParams())
    meter, sharder, costs = Meter(mesh.device_type), BatchSharder(state), []
    for slots, drafting_bytes in (([0], 1), ([0, 1], 5), ([1], 1)):
        meter.start()
        meter.lap("model")
        plan = sharder.plan(slots)
        meter.stop(plan, Sampler(state), torch.float32, one_hot=True, drafting_bytes=drafting_bytes)
        costs.append(plan.cost(torch.float32))
    meter.count(4)
    return meter.figures(), costs[1].buffer_bytes, costs[1].wire_bytes


@worlds("cpu:2")
def test_a_meter_tells_bytes_of_the_largest_step(ranks: Ranks) -> None:
    """Catches a sum over the run beside figures of a step, which cannot be compared."""
    for figures, buffer_bytes, wire_bytes in ranks.run(meter_steps):
        assert figures["wire_bytes"] == wire_bytes + 5
        assert figures["logits_bytes"] == buffer_bytes == 2 * 25 * 4
        assert figures["replicated_logits_bytes"] == 2 * 50 * 4


def test_too_many_ranks_are_refused(small_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "40")
    error = error_of("--model", small_path, monkeypatch=monkeypatch)
    assert "40 ranks are too many for a vocabulary of 1003" in error
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    error = error_of("--model", small_path, monkeypatch=monkeypatch)
    assert "4 ranks need a GPU each, found 2" in error


def be_python(
    arguments: Sequence[str], stdout: Path, stderr: Path, environment: dict[str, str]
) -> None:
    """Be `python script ...` or `python -m module ...`."""
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    folders = filter(None, (str(STARTUP), str(DECODE.parent), os.environ.get("PYTHONPATH")))
    os.environ.update(environment, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(folders))
    torch.set_num_threads(1)
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def start(
    *arguments: object, stdout: Path, stderr: Path, environment: dict[str, str] | None = None
) -> BaseProcess:
    """Start Python, but forked from a server process that has imported torch."""
    process = multiprocessing.get_context("forkserver").Process(
        target=be_python, args=(list(map(str, arguments)), stdout, stderr, environment or {})
    )
    process.start()
    return process


def run(*arguments: object, folder: Path) -> tuple[str, str]:
    """What Python prints on stdout and stderr; it must end well."""
    stdout, stderr = folder / "stdout", folder / "stderr"
    process = start(*arguments, stdout=stdout, stderr=stderr)
    process.join()
    assert process.exitcode == 0, stderr.read_text()
    return stdout.read_text(), stderr.read_text()


def check_told(request: dict[str, Any]) -> None:
    """Each token has its log-probability, which is among the two likeliest if it is one of them."""
    told = (request["token_ids"], request["logprobs"], request["top_logprobs"])
    for token_id, logprob, top in zip(*told, strict=True):
        (_, most), (_, second) = top
        assert 0 >= most >= second
        assert dict(top).get(token_id, logprob) == logprob <= most


@pytest.mark.slow
@worlds("cpu:1")
def test_json_and_compare(ranks: Ranks, small_path: Path, tmp_path: Path) -> None:
    """One object on stdout; all exchanges agree; the tokens are those of a single rank."""
    prompts = ["abc", "Hello", "x"]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    arguments: list[object] = ["--model", small_path, "--prompt-file", tmp_path / "prompts"]
    arguments += ["--max-num-reqs", 2, "--max-new-tokens", NEW_TOKENS, "--json", "--compare"]
    arguments += ["--temperature", 1.5, "--top-k", 40, "--seed", 9, "--logprobs", 2]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    stdout, stderr = run(*torchrun, DECODE, *arguments, folder=tmp_path)
    report = json.loads(stdout)
    params = SamplingParams(temperature=1.5, top_k=40, seed=9).spawn(3)
    ids = [request["prompt_token_ids"] for request in report["requests"]]
    expected = ranks.run(decode_prompts, small_path, ids, params, max_num_reqs=2)[0]
    assert [request["token_ids"] for request in report["requests"]] == expected
    assert [request["prompt"] for request in report["requests"]] == prompts
    assert all(request["text"] for request in report["requests"])
    for request in report["requests"]:
        check_told(request)
    figures = report["figures"]
    assert figures["perplexity"] > 1
    assert figures["ranks"] == 2
    assert figures["tokens"] == sum(map(len, expected))
    assert set(figures["step_ms"]) >= {"model", "exchange", "draw", "gather", "total"}
    assert figures["tokens_per_second"] > 0 < figures["wire_bytes"]
    moved = figures["exchange"] != "vocab"  # what "auto" took
    assert moved <= figures["logits_bytes"] <= moved * figures["replicated_logits_bytes"]
    assert "[0] abc" in stderr


def test_json_of_speculation(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """All exchanges agree on what they accept, and on texts that are those without speculation."""
    target, draft = pair
    arguments: list[object] = ["--model", target, "--draft-model", draft, "--speculate", "draft"]
    arguments += ["--num-speculative-tokens", 3, "--compare", "--json", "Hello", "x"]
    arguments += ["--logprobs", 2]
    arguments += ["--plot", tmp_path / "drafts.svg"]
    stdout, stderr = run(DECODE, *arguments, folder=tmp_path)
    assert (tmp_path / "drafts.svg").read_text().rstrip().endswith("</svg>")
    report = json.loads(stdout)
    for request in report["requests"]:
        check_told(request)
        assert request["logprobs"] == [most for (_, most), _ in request["top_logprobs"]]  # greedy
    figures = report["figures"]
    assert set(figures["step_ms"]) == {"draft", "plan", "model", "compare", "verify", "total"}
    speculation = figures["speculation"]
    assert len(speculation["acceptance_per_position"]) == 3
    assert speculation["method"] == "block"
    assert figures["steps"] < 24 < figures["tokens"] == 48
    assert speculation["tokens_per_target_step"] > 1 < speculation["acceptance_length"]
    assert 0 < speculation["accepted_tokens"] < speculation["drafted_tokens"]
    assert f"by {draft.name}, at most 3 a step" in stderr


class Wrong(Sampler):
    """Samples the next id under one of the exchanges."""

    def gather(self, drawn: Any, plan: ShardPlan) -> SamplerOutput:
        output = super().gather(drawn, plan)
        if plan.exchange.name == "vocab":
            output.token_ids.add_(1)
        return output


def compare_wrongly(mesh: DeviceMesh, path: Path) -> str:
    try:
        params = greedy(1)
        kinds: dict[str, Any] = {"sampler_class": Wrong, "compare": True}
        decode_prompts(mesh, path, SMALL_PROMPTS[:1], params, max_num_reqs=1, **kinds)
    except SystemExit as error:
        return str(error)
    return ""


@worlds("cpu:2")
def test_compare_ends_every_rank_if_a_token_differs(ranks: Ranks, small_path: Path) -> None:
    for error in ranks.run(compare_wrongly, small_path):
        assert "the exchanges differ at positions [3]" in error


def test_one_process(small_path: Path, tmp_path: Path) -> None:
    """Without torchrun: texts in lines, then the figures."""
    arguments = ("--model", small_path, "Hello", "--max-new-tokens", 3)
    stdout, _ = run(DECODE, *arguments, "--plot", tmp_path / "steps.png", folder=tmp_path)
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    assert stdout.startswith("[0] Hello")
    assert "tokens/s" in stdout
    told = ("sampling sent", "logits received", "if replicated")
    assert all(re.search(f"{name} .* bytes a rank and step, at most", stdout) for name in told)


@pytest.fixture(params=[(), ("--speculate", "ngram")], ids=["plain", "speculative"])
def long_run(
    request: pytest.FixtureRequest, small_path: Path, tmp_path: Path
) -> Iterator[list[BaseProcess]]:
    """Two ranks in mid-decode, with no launcher that would end one for the other."""
    (tmp_path / "prompts").write_text("Hello\n" * 20000)
    command = (DECODE, "--model", small_path, "--prompt-file", tmp_path / "prompts")
    command += request.param
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    output = tmp_path / "output"
    output.touch()
    ranks = [
        start(*command, stdout=output, stderr=output, environment=group | {"RANK": str(rank)})
        for rank in range(2)
    ]
    try:
        while "[0] Hello" not in output.read_text():
            assert all(rank.is_alive() for rank in ranks), output.read_text()
            time.sleep(0.1)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_ends_the_others(
    long_run: list[BaseProcess], how: signal.Signals
) -> None:
    """Within a minute, by themselves."""
    first, second = long_run
    assert second.pid
    os.kill(second.pid, how)
    first.join(60)
    assert first.exitcode
