"""Decodes text with a real language model under tensor parallelism, sampled by `dtensor_sample`.

    torchrun --nproc_per_node=4 examples/decode.py
    python examples/decode.py --chat "Why is the sky blue?" --temperature 0.8 --seed 1

Runs on CPUs with gloo or on GPUs with nccl, by what is there. Without prompts it continues a few of
its own, greedily. More prompts than slots wait, and take over the slots of finished requests.
"""

import argparse
import heapq
import json
import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from time import perf_counter
from typing import Any, TextIO

import torch
import torch.distributed as dist
from display import Display, open_display, print_summary
from llama import Batch, Llama, load_llama
from meter import Meter
from options import EXCHANGES, parse_arguments
from text import TextStream
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from weights import Checkpoint, open_checkpoint

from dtensor_sample import (
    BatchSharder,
    Sampler,
    SamplingParams,
    SamplingState,
    vocab_sharded,
)

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time",
    "1, 2, 3, 4,",
    "The three primary colors are",
    "To be, or not to be,",
    "def factorial(n):",
    "The opposite of hot is",
]
# A rank that died or hangs ends the others after this.
TIMEOUT = timedelta(seconds=30)


@dataclass(kw_only=True)
class Request:
    """A prompt on its way to a text."""

    index: int
    prompt: str
    shown_prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    first_token_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def new_token_ids(self) -> list[int]:
        """What the model has not seen yet: first the prompt, then the last token."""
        return self.token_ids[-1:] or self.prompt_token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens so far, which is the position of the next one."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the model has seen."""
        return self.num_tokens - len(self.new_token_ids)

    def report(self) -> dict[str, Any]:
        """What --json prints."""
        names = ("prompt", "prompt_token_ids", "token_ids", "finish_reason", "first_token_seconds")
        return {name: getattr(self, name) for name in names} | {"text": self.stream.text}


def main() -> None:
    """Load the model, decode all prompts, report."""
    args = parse_arguments()
    stdout = claim_stdout() if args.json else sys.stdout
    started = perf_counter()
    try:
        device_type = choose_device()
        checkpoint = open_checkpoint(args.model)
        checkpoint.config.padded(int(os.environ.get("WORLD_SIZE", 1)))
        requests = make_requests(args, checkpoint)
    except ValueError as error:
        sys.exit(f"decode.py: error: {error}")

    mesh = join_ranks(device_type)
    dtype = args.dtype or ("bfloat16" if device_type == "cuda" else "float32")
    model = load_llama(checkpoint, mesh, dtype=getattr(torch, dtype))
    longest = max(len(request.prompt_token_ids) for request in requests) + args.max_new_tokens
    model.allocate_cache(max_num_reqs=args.max_num_reqs, max_length=longest)
    state = SamplingState(
        mesh,
        vocab_size=checkpoint.config.vocab_size,
        max_num_reqs=args.max_num_reqs,
        exchange=args.exchange,
        debug=args.debug or None,
    )
    sampler = Sampler(state, compile=args.compile)
    meter = Meter(device_type)
    load_seconds = perf_counter() - started

    with open_display(quiet=dist.get_rank() > 0, stderr=args.json) as display:
        decode(
            model,
            requests,
            sampler,
            mesh=mesh,
            max_new_tokens=args.max_new_tokens,
            eos_token_ids=checkpoint.tokenizer.eos_token_ids,
            compare=args.compare,
            meter=meter,
            display=display,
        )
    figures = {
        "model": checkpoint.name,
        "ranks": mesh.size(),
        "device": device_type,
        "dtype": dtype,
        "load_seconds": load_seconds,
        "first_token_seconds": min(request.first_token_seconds for request in requests),
        **meter.figures(),
    }
    if dist.get_rank() == 0:
        print_summary(figures, stderr=args.json)
        if args.json:
            report = {"requests": [request.report() for request in requests], "figures": figures}
            print(json.dumps(report), file=stdout, flush=True)
    dist.destroy_process_group()


@torch.inference_mode()
def decode(
    model: Llama,
    requests: Sequence[Request],
    sampler: Sampler,
    *,
    mesh: DeviceMesh,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    compare: bool,
    meter: Meter,
    display: Display,
) -> None:
    """Continuous batching: a step runs every request in a slot, new ones with all their prompt."""
    state = sampler.state
    sharder = BatchSharder(state)
    waiting, free = deque(requests), list(range(state.max_num_reqs))
    running: dict[int, Request] = {}
    started = perf_counter()
    while waiting or running:
        while waiting and free:
            slot, request = heapq.heappop(free), waiting.popleft()
            state.add(slot, request.params, prompt_token_ids=request.prompt_token_ids)
            running[slot] = request
            display.begin(request.index, request.shown_prompt)

        meter.start()
        slots = sorted(running)
        batch = Batch.pack(
            slots,
            [running[slot].new_token_ids for slot in slots],
            [running[slot].num_cached_tokens for slot in slots],
            device=state.device,
        )
        plan = sharder.plan(slots, query_start_loc=batch.query_start_loc)
        meter.lap("plan")
        hidden = model(batch)
        if compare:
            meter.lap("model")
            positions = [running[slot].num_tokens for slot in slots]
            compare_exchanges(model, hidden, batch, slots, positions, sharder, sampler, mesh)
            meter.lap("compare")
        logits = model.lm_head(plan.select(hidden))
        meter.lap("model")
        rows = sampler.exchange(logits, plan)
        meter.lap("exchange")
        drawn = sampler.draw(rows, plan)
        meter.lap("draw")
        output = sampler.gather(drawn, plan)
        meter.lap("gather")
        token_ids = output.token_ids[:, 0].tolist()
        meter.stop(plan, sharder, logits.dtype)

        for slot, token_id in zip(slots, token_ids, strict=True):
            request = running[slot]
            if token_id < 0:
                raise RuntimeError(f"prompt {request.index}: the model's logits are not numbers")
            if not request.token_ids:
                request.first_token_seconds = perf_counter() - started
            request.token_ids.append(token_id)
            display.write(request.index, request.stream.push(token_id))
            if token_id in eos_token_ids:
                request.finish_reason = "stop"
            elif len(request.token_ids) == max_new_tokens:
                request.finish_reason = "length"
            if request.finish_reason:
                display.write(request.index, request.stream.finish(request.token_ids))
                display.end(request.index)
                state.remove(slot)
                heapq.heappush(free, slot)
                del running[slot]


def compare_exchanges(
    model: Llama,
    hidden: Tensor,
    batch: Batch,
    slots: list[int],
    positions: list[int],
    sharder: BatchSharder,
    sampler: Sampler,
    mesh: DeviceMesh,
) -> None:
    """Samples the same logits under every exchange; ends the program if a token differs."""
    last_rows = [end - 1 for end in batch.query_start_loc[1:]]
    logits = model.lm_head(hidden[last_rows])
    token_ids = {}
    for exchange in EXCHANGES:
        plan = sharder.plan(slots, exchange=exchange, positions=positions)
        rows = vocab_sharded(plan.select(logits.to_local()), mesh, vocab_size=logits.shape[1])
        token_ids[exchange] = sampler(rows, plan).token_ids[:, 0].tolist()
    if any(ids != token_ids["replicate"] for ids in token_ids.values()):
        sys.exit(f"decode.py: the exchanges differ at positions {positions}: {token_ids}")


def make_requests(args: argparse.Namespace, checkpoint: Checkpoint) -> list[Request]:
    """Tokenizes the prompts and gives each its own random stream."""
    prompts = list(args.prompts)
    if args.prompt_file is not None:
        if not args.prompt_file.is_file():
            raise ValueError(f"no prompt file {args.prompt_file}")
        prompts += filter(str.strip, args.prompt_file.read_text("utf-8").splitlines())
        if not prompts:
            raise ValueError(f"no prompt in {args.prompt_file}")
    prompts = prompts or PROMPTS
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
    ).spawn(len(prompts))
    limit = checkpoint.config.max_positions
    requests = []
    for i, prompt in enumerate(prompts):
        token_ids = checkpoint.tokenizer.encode(prompt, chat=args.chat) if prompt.strip() else []
        if not token_ids:
            raise ValueError(f"prompt {i} is empty: {prompt!r}")
        if len(token_ids) + args.max_new_tokens > limit:
            raise ValueError(
                f"prompt {i} has {len(token_ids)} tokens, and {args.max_new_tokens} new ones: "
                f"more than the model's context of {limit}"
            )
        stream = checkpoint.tokenizer.stream()
        requests.append(
            Request(
                index=i,
                prompt=prompt,
                shown_prompt=prompt + "\n" * args.chat,
                prompt_token_ids=token_ids,
                params=params[i],
                stream=stream,
            )
        )
    return requests


def choose_device() -> str:
    """CUDA devices if there are any, and then enough of them."""
    if not torch.cuda.is_available():
        return "cpu"
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if ranks > devices:
        raise ValueError(f"{ranks} ranks need a GPU each, found {devices}: lower --nproc_per_node")
    return "cuda"


def join_ranks(device_type: str) -> DeviceMesh:
    """The mesh of all ranks that torchrun started, or of this process alone."""
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "nccl" if device_type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def claim_stdout() -> TextIO:
    """Keeps stdout for the caller; whatever else prints to it, native code too, goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stdout


if __name__ == "__main__":
    main()
