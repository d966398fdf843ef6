"""Generate tokens with a model of torchtitan and its tensor-parallel plan, on random weights.

    torchrun --nproc_per_node=2 examples/torchtitan_generate.py
    torchrun --nproc_per_node=2 examples/torchtitan_generate.py --model qwen3 --temperature 0.8
    torchrun --nproc_per_node=2 examples/torchtitan_generate.py --backend partial_dtensor

Needs 2 ranks or more, and torchtitan 0.3. Of what it depends on, its models use only this much:

    pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring-parser typeguard

Under torchtitan's default backend, "spmd_types", logits are plain local shards; under
"partial_dtensor" they are DTensors. These models keep no key-value cache: a step runs all tokens,
packed into one row, but computes logits only of the last ones.
"""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  torchtitan's axes of size 1
from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend

from dtensor_sample import BatchSharder, Sampler, SamplingParams, SamplingState, vocab_sharded


def main() -> None:
    """Build the model on all ranks, generate, print."""
    args = parse_arguments()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks < 2:
        sys.exit("torchtitan_generate.py: error: start it with torchrun, on 2 ranks or more")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    model, dims = build_model(args.model, args.backend, ranks)
    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    texts = generate(
        model, dims, prompts, params.spawn(len(prompts)), max_new_tokens=args.max_new_tokens
    )
    if dist.get_rank() == 0:
        for prompt, text in zip(prompts, texts, strict=True):
            print(*prompt, "->", *text)
    dist.barrier()
    dist.destroy_process_group()


def build_model(name: str, backend: str, ranks: int) -> tuple[Any, ParallelDims]:
    """Torchtitan's smallest configuration of a model, sharded over all ranks.

    Args:
        name: "llama3" or "qwen3".
        backend: "spmd_types" or "partial_dtensor".
        ranks: of the tensor-parallel axis.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parallel_dims.device_type = device  # it takes a machine without accelerators for one with CUDA
    set_spmd_backend(backend)
    dims = ParallelDims.from_config(
        ParallelismConfig(
            tensor_parallel_degree=ranks, data_parallel_shard_degree=1, spmd_backend=backend
        ),
        ranks,
    )
    dims.build_mesh()
    model = random_model(name, device)
    model.parallelize(dims)
    return model.eval(), dims


def random_model(name: str, device: str) -> Any:
    """The whole model; its configuration has the plan for `parallelize`."""
    package = importlib.import_module(f"torchtitan.models.{name}")
    sharding = importlib.import_module(f"torchtitan.models.{name}.sharding")
    config = getattr(package, f"{name}_configs")["debugmodel"](attn_backend="flex")
    if name == "qwen3":
        sharding.set_qwen3_sharding_config(config, enable_sp=False, enable_ep=False)
    else:
        sharding.set_llama3_sharding_config(config, enable_sp=False)
    with torch.device(device):
        model = config.build()
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device(device))
    return model


@torch.no_grad()
def generate(
    model: Any,
    dims: ParallelDims,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    *,
    max_new_tokens: int,
) -> list[list[int]]:
    """Continue prompts by `max_new_tokens` each."""
    mesh, V = dims.get_mesh("tp"), model.config.vocab_size
    state = SamplingState(mesh, vocab_size=V, max_num_reqs=len(prompts))
    sharder, sampler = BatchSharder(state), Sampler(state)
    for slot, prompt in enumerate(prompts):
        state.add(slot, params[slot], prompt_token_ids=prompt)

    texts = [list(prompt) for prompt in prompts]
    slots = range(len(texts))
    model._skip_lm_head = True  # torchtitan's switch for those who apply lm_head themselves
    with get_spmd_context(parallel_dims=dims)(), eager_attention(mesh.device_type):
        for _ in range(max_new_tokens):
            tokens, positions = pack(texts, mesh.device_type)
            starts = list(accumulate(map(len, texts), initial=0))
            # [sample]
            plan = sharder.plan(slots, query_start_loc=starts)
            # [/sample]
            masks = model.get_attention_masks(positions)
            hidden = model(tokens, positions=positions, attention_masks=masks)
            # [sample]
            logits = model.lm_head(plan.select(hidden[0]))
            # [/sample]
            if not isinstance(logits, DTensor):
                # [sample]
                logits = vocab_sharded(logits, mesh, vocab_size=V)  # with the default backend
                # [/sample]
            # [sample]
            token_ids = sampler(logits, plan).token_ids
            # [/sample]
            if token_ids[:, 0].min() < 0:  # -1 is no input
                raise RuntimeError("a row of logits left no token to draw, as if all were NaN")
            for text, (token_id, *_) in zip(texts, token_ids.tolist(), strict=True):
                text.append(token_id)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def pack(texts: Sequence[list[int]], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens in one row, and their positions, which begin again with each text."""
    tokens = [token_id for text in texts for token_id in text]
    positions = [position for text in texts for position in range(len(text))]
    return torch.tensor([tokens], device=device), torch.tensor([positions], device=device)


@contextmanager
def eager_attention(device_type: str) -> Iterator[None]:
    """On CPUs, compiling attention for each length costs more than it saves."""
    if device_type != "cpu":
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Generate tokens with a model of torchtitan.")
    add = parser.add_argument
    add("--model", choices=("llama3", "qwen3"), default="llama3", help="(default: llama3)")
    add(
        "--backend",
        choices=("spmd_types", "partial_dtensor"),
        default="spmd_types",
        help="torchtitan's: logits are plain shards, or DTensors (default: spmd_types)",
    )
    add("--max-new-tokens", type=int, default=8, metavar="N", help="of each prompt (default: 8)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="in [0, 1] (default: 1, off)")
    add("--seed", type=int, default=0, help="of all requests (default: 0)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
