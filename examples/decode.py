"""Decode text with a real language model under tensor parallelism, sampled by `dtensor_sample`.

    torchrun --nproc_per_node=4 examples/decode.py
    python examples/decode.py --chat "Why is the sky blue?" --temperature 0.8 --seed 1
    python examples/decode.py --logprobs 3 "The capital of France is"
    python examples/decode.py --speculate ngram --plot drafts.png "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,"

Runs on CPUs with gloo or on GPUs with nccl, by what is there. Without prompts it continues a few of
its own, greedily. More prompts than slots wait, and take over the slots of finished requests.
"""

import heapq
import json
import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TextIO

import torch
import torch.distributed as dist
from display import Display, open_display, print_summary
from draft_models import DraftWeights
from drafters import ModelDrafter, load_block
from ending import end_ranks
from grammar import Grammar
from llama import Batch, Llama, load_llama
from meter import Meter
from options import parse_arguments
from plot import check_plot, draw_plot
from prompts import Request, make_requests
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from weights import Checkpoint, open_checkpoint

from dtensor_sample import (
    BatchSharder,
    Drafter,
    NgramDrafter,
    RejectionSampler,
    Sampler,
    SamplerOutput,
    SamplingState,
    ShardPlan,
    vocab_sharded,
)
from dtensor_sample.exchange import EXCHANGES

TRAINED = {
    kind: Path(__file__).with_name("trained") / f"{kind}.safetensors" for kind in ("draft", "block")
}
"""Drafters for the default model, see docs/drafters.md."""
# A rank that hangs ends the others after this, unless it may be compiling.
TIMEOUT, COMPILE_TIMEOUT = timedelta(seconds=30), timedelta(minutes=10)


def main() -> None:
    """Load the models, decode all prompts, report."""
    args = parse_arguments()
    stdout = claim_stdout() if args.json else sys.stdout
    started = perf_counter()
    try:
        if args.plot is not None:
            check_plot(args.plot)
        device_type = choose_device()
        checkpoint = open_checkpoint(args.model)
        checkpoint.config.padded(int(os.environ.get("WORLD_SIZE", 1)))
        requests = make_requests(args, checkpoint)
        longest = max(len(request.prompt_token_ids) for request in requests) + args.max_new_tokens
        greedy = all(request.params.greedy for request in requests)
        grammar = None
        if args.json_schema is not None or args.regex is not None:
            grammar = Grammar(
                checkpoint.tokenizer,
                checkpoint.config.vocab_size,
                json_schema=args.json_schema,
                regex=args.regex,
            )
        if args.compare and (grammar or any(request.params.needs.edited for request in requests)):
            raise ValueError(
                "--compare needs texts without grammar, penalties and --min-tokens: what is kept "
                "for those lies where one exchange has it"
            )
        learnt = None
        if args.speculate in TRAINED:
            learnt = open_drafter(args.speculate, args.draft_model, checkpoint)
            check_drafter(learnt, checkpoint, longest, args.num_speculative_tokens)
            if args.compare and not greedy:
                raise ValueError(
                    f"--compare needs --temperature 0 with --speculate {args.speculate}"
                )
    except ValueError as error:
        sys.exit(f"decode.py: error: {error}")

    mesh = join_ranks(device_type, COMPILE_TIMEOUT if args.compile else TIMEOUT)
    dtype = args.dtype or ("bfloat16" if device_type == "cuda" else "float32")

    def load(checkpoint: Checkpoint) -> Llama:
        model = load_llama(checkpoint, mesh, dtype=getattr(torch, dtype))
        model.allocate_cache(max_num_reqs=args.max_num_reqs, max_length=longest)
        return model

    def make_state(num_speculative_tokens: int = 0) -> SamplingState:
        return SamplingState(
            mesh,
            vocab_size=checkpoint.config.vocab_size,
            max_num_reqs=args.max_num_reqs,
            num_speculative_tokens=num_speculative_tokens,
            exchange=args.exchange,
            debug=args.debug or None,
        )

    model, meter = load(checkpoint), Meter(device_type)
    drafter: Drafter | None = None
    sampler: Sampler | RejectionSampler
    if args.speculate is None:
        sampler = Sampler(make_state(), compile=args.compile)
    else:
        state = make_state(args.num_speculative_tokens)
        sampler = RejectionSampler(state, method=args.method, compile=args.compile)
        drafter = NgramDrafter()
        if isinstance(learnt, DraftWeights) and learnt.kind == "block":
            drafter = load_block(learnt, model, checkpoint, state, max_length=longest)
        elif learnt is not None:
            drafter = ModelDrafter(load(learnt), state)
    settings = {
        "mesh": mesh,
        "max_new_tokens": args.max_new_tokens,
        "eos_token_ids": checkpoint.tokenizer.eos_token_ids.union(args.stop_token_id),
    }
    load_seconds = perf_counter() - started

    separator = "\n" if args.chat else ""
    with open_display(separator, quiet=dist.get_rank() > 0, stderr=args.json) as display:
        decode(
            model,
            requests,
            sampler,
            drafter=drafter,
            grammar=grammar,
            compare=args.compare,
            meter=meter,
            display=display,
            **settings,
        )
    if drafter is not None and args.compare and greedy:
        plain = make_requests(args, checkpoint)
        decode(model, plain, Sampler(make_state()), meter=Meter(device_type), **settings)
        compare_texts(requests, plain)
    figures = {
        "model": checkpoint.name,
        "ranks": mesh.size(),
        "device": device_type,
        "dtype": dtype,
        "compared": args.compare,
        "load_seconds": load_seconds,
        "first_token_seconds": min(request.first_token_seconds for request in requests),
        **meter.figures(),
    }
    if args.logprobs is not None:
        told = [logprob for request in requests for logprob in request.logprobs]
        figures["perplexity"] = math.exp(-sum(told) / len(told))
    if drafter is not None:
        figures["speculation"] = {
            "drafter": args.speculate if learnt is None else learnt.name,
            "num_speculative_tokens": args.num_speculative_tokens,
            "method": args.method,
            **meter.speculation(),
        }
    if dist.get_rank() == 0:
        if args.plot is not None:
            draw_plot(args.plot, figures, meter.steps)
            figures["plot"] = str(args.plot)
        print_summary(figures, stderr=args.json)
        if args.json:
            report = {"requests": [request.report() for request in requests], "figures": figures}
            print(json.dumps(report), file=stdout, flush=True)
    end_ranks()


@torch.inference_mode()
def decode(
    model: Llama,
    requests: Sequence[Request],
    sampler: Sampler | RejectionSampler,
    *,
    mesh: DeviceMesh,
    max_new_tokens: int,
    eos_token_ids: frozenset[int],
    meter: Meter,
    drafter: Drafter | None = None,
    grammar: Grammar | None = None,
    compare: bool = False,
    display: Display | None = None,
) -> None:
    """Continuous batching: a step runs every request in a slot, new ones with all their prompt.

    With a drafter, the rows of a request that has begun are its last token and its drafts. What the
    model caches of drafts that are refused, the next step overwrites.
    """
    display = display or Display()
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
            if grammar is not None:
                grammar.begin(slot)
            display.begin(request.index, request.prompt)

        meter.start()
        slots = sorted(running)
        step_requests = [running[slot] for slot in slots]
        drafts: list[list[int]] = [[] for _ in slots]
        one_hot = [True] * len(slots)
        if drafter is not None:
            # A step emits one token more than it accepts: none may lie beyond max_new_tokens.
            limits = [
                min(state.num_speculative_tokens, max_new_tokens - 1 - len(request.token_ids))
                if request.token_ids
                else 0
                for request in step_requests
            ]
            texts = [request.all_token_ids for request in step_requests]
            drafts, one_hot = drafter.propose(slots, texts, limits)
            meter.lap("draft")
        batch = Batch.pack(
            slots,
            [r.new_token_ids + own for r, own in zip(step_requests, drafts, strict=True)],
            [r.num_cached_tokens for r in step_requests],
            device=state.device,
        )
        num_logits = [1 + len(own) for own in drafts]
        plan = sharder.plan(slots, num_logits, query_start_loc=batch.query_start_loc)
        meter.lap("plan")
        hidden = model(batch)
        if compare:
            meter.lap("model")
            positions = [r.num_tokens for r in step_requests]
            compare_exchanges(model, hidden, batch, plan, positions, drafts, sampler, mesh)
            meter.lap("compare")
        logits = model.lm_head(plan.select(hidden))
        meter.lap("model")
        mask = None
        if grammar is not None:
            mask = grammar.mask(slots, drafts)
            meter.lap("grammar")
        if isinstance(sampler, RejectionSampler):
            output = sampler(logits, plan, drafts, one_hot=one_hot, mask=mask)
            meter.lap("verify")
        else:
            rows = sampler.exchange(logits, plan, mask=mask)
            meter.lap("exchange")
            drawn = sampler.draw(rows, plan)
            meter.lap("draw")
            output = sampler.gather(drawn, plan)
            meter.lap("gather")
        token_ids = output.token_ids.tolist()
        drawn_drafts = any(own and not hot for own, hot in zip(drafts, one_hot, strict=True))
        meter.stop(
            plan,
            sampler,
            logits.dtype,
            one_hot=not drawn_drafts,
            drafting_bytes=getattr(drafter, "wire_bytes", 0),
        )

        for i, (slot, request, own, ids) in enumerate(
            zip(slots, step_requests, drafts, token_ids, strict=True)
        ):
            new = [token_id for token_id in ids if token_id >= 0]
            if not new:
                raise RuntimeError(f"prompt {request.index}: no token is left to choose")
            if not request.token_ids:
                request.first_token_seconds = perf_counter() - started
            kept, pieces = request.take(
                new, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids
            )
            meter.count(len(kept), drafted=len(own), accepted=len(new) - 1)
            if output.logprobs is not None:
                request.tell(output.logprobs, i, len(kept))
            told: Sequence[float | None] = request.logprobs[-len(kept) :] or [None] * len(kept)
            for piece, logprob in zip(pieces, told, strict=True):
                display.write(request.index, piece, logprob)
            if grammar is not None and not request.finish_reason:
                grammar.take(slot, kept)
            if request.finish_reason:
                display.end(request.index)
                state.remove(slot)
                heapq.heappush(free, slot)
                del running[slot]


def compare_exchanges(
    model: Llama,
    hidden: Tensor,
    batch: Batch,
    plan: ShardPlan,
    positions: list[int],
    drafts: list[list[int]],
    sampler: Sampler | RejectionSampler,
    mesh: DeviceMesh,
) -> None:
    """Sample the same logits under every exchange; end the program if anything differs."""
    sharder = BatchSharder(plan.state)
    ends = zip(batch.query_start_loc[1:], plan.num_logits, strict=True)
    last_rows = [row for end, count in ends for row in range(end - count, end)]
    logits = model.lm_head(hidden[last_rows])
    token_ids = {}
    for exchange in EXCHANGES:
        own = sharder.plan(plan.slots, plan.num_logits, exchange=exchange, positions=positions)
        rows = vocab_sharded(own.select(logits.to_local()), mesh, vocab_size=logits.shape[1])
        if isinstance(sampler, RejectionSampler):
            output = sampler(rows, own, drafts)
        else:
            output = sampler(rows, own)
        token_ids[exchange] = output.token_ids.tolist(), told_bits(output)
    if any(ids != token_ids["replicate"] for ids in token_ids.values()):
        sys.exit(f"decode.py: the exchanges differ at positions {positions}: {token_ids}")


def told_bits(output: SamplerOutput) -> list[list[int]]:
    """All that is told of a step's tokens, floats by their bits."""
    told = vars(output.logprobs).values() if output.logprobs is not None else ()
    return [(x.view(torch.int32) if x.is_floating_point() else x).flatten().tolist() for x in told]


def compare_texts(requests: Sequence[Request], plain: Sequence[Request]) -> None:
    """End the program if speculation changed a text that it must not change."""
    for request, other in zip(requests, plain, strict=True):
        if request.token_ids != other.token_ids:
            sys.exit(
                f"decode.py: prompt {request.index} differs without speculation: "
                f"{request.token_ids} and {other.token_ids}"
            )


def open_drafter(kind: str, path: Path | None, target: Checkpoint) -> Checkpoint | DraftWeights:
    """What drafts: the file of that kind that lies beside this program, or the model at `path`.

    Raises:
        ValueError: there is no model, or one that cannot draft for `target` in this way.
    """
    path = TRAINED[kind] if path is None else path
    if path.suffix == ".safetensors":
        weights = DraftWeights(path, target)
        if weights.kind != kind:
            raise ValueError(f"{path} is for --speculate {weights.kind}, got {kind}")
        return weights
    if kind == "block":
        raise ValueError(f"--speculate block needs a .safetensors file, got {path}")
    return open_checkpoint(path)


def check_drafter(
    draft: Checkpoint | DraftWeights, target: Checkpoint, longest: int, num_drafts: int
) -> None:
    """Raise ValueError unless `draft` can draft for `target` in texts of `longest` tokens."""
    if draft.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"the draft model must have the model's vocabulary of {target.config.vocab_size} ids, "
            f"got {draft.config.vocab_size}"
        )
    if draft.config.max_positions < longest:
        raise ValueError(
            f"the draft model must have a context of {longest} tokens, those of the longest text, "
            f"got {draft.config.max_positions}"
        )
    most = draft.settings.get("K") if isinstance(draft, DraftWeights) else None
    if most is not None and num_drafts > most:
        raise ValueError(
            f"--num-speculative-tokens must be at most {most} with --speculate block, "
            f"got {num_drafts}"
        )


def choose_device() -> str:
    """CUDA devices if there are any, and then enough of them."""
    if not torch.cuda.is_available():
        return "cpu"
    ranks, devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if ranks > devices:
        raise ValueError(f"{ranks} ranks need a GPU each, found {devices}: lower --nproc_per_node")
    return "cuda"


def join_ranks(device_type: str, timeout: timedelta) -> DeviceMesh:
    """The mesh of all ranks that torchrun started, or of this process alone."""
    backend, device = "gloo", None
    if device_type == "cuda":
        backend, device = "nccl", torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout, device_id=device)
    else:
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=device)
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("tp",))


def claim_stdout() -> TextIO:
    """Keep stdout for the caller; whatever else prints to it, native code too, goes to stderr."""
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stdout


if __name__ == "__main__":
    main()
