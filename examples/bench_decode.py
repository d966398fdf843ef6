"""How fast a whole decode loop runs, with a model of 8 billion random weights, by how it samples.

    torchrun --nproc_per_node=2 examples/bench_decode.py --output docs/NAME
    python examples/bench_decode.py --size tiny --concurrency 1 2 --steps 4    # a CPU will do

A step is one CUDA graph, from the last tokens to the next ones: the model, tensor-parallel over the
ranks, its logits, sampling, and what the next step begins with. Ways differ only in what follows
the logits: gathered and sampled in PyTorch on every rank, as scripts do it, or sampled by this
library under one exchange.

With K speculative tokens each request verifies K drafts a step. Each has a text of its own, ids
that follow from its number and the position alone; the drafts are that text, and cost nothing. The
model does not know it: in each row of logits the text's next id is raised to where it has about the
probability given by --acceptance after top-p, by a formula of the logits' deviation instead of a
second pass. So drafts are accepted at that rate, and rows are peaked as those of real models are,
without drafts too. `--output` writes NAME.csv and NAME.md.
"""

import argparse
import gc
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_model import LOGIT_STD, SIZES, Model
from bench_report import Record, about, join, markdown, percentile, show, slowest, write
from bench_ways import accept, gather, pick, probabilities
from ending import end_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_sample import (
    GraphedStep,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    ShardPlan,
    vocab_sharded,
)
from dtensor_sample.exchange import EXCHANGES

BASELINE = "gather + sample"
WAYS = (BASELINE, *EXCHANGES)
WARM_UP = 3
"""Steps before those that count: one as it is, one captured, one replayed."""
SMALL = 0.02
"""A smaller difference is none."""
COLUMNS = {
    "K": "K",
    "concurrency": "concurrency",
    "way": "way",
    "tokens_per_s": "output tokens/s",
    "tpot_ms": "ms an output token",
    "itl_ms": "inter-token ms, median",
    "itl_99_ms": "99%",
    "tokens_per_step": "tokens a step, found",
    "peak_mib": "peak MiB a rank",
    "fits": "most requests, estimate",
}
"""Fields of the CSV, and what the table calls them."""


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def number(name: str, default: Any, metavar: str, text: str, **more: Any) -> None:
        kind = type(default[0] if isinstance(default, list) else default)
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        parser.add_argument(
            name,
            type=kind,
            default=default,
            metavar=metavar,
            help=f"{text}, default {shown}",
            **more,
        )

    number("--concurrency", [1, 4, 8, 16, 64, 256], "B", "requests at a time", nargs="+")
    number("--num-speculative-tokens", [0, 7], "K", "drafts of a request", nargs="+")
    number("--acceptance", 0.7, "A", "probability of a draft to be accepted")
    number("--top-p", 0.95, "P", "of every request, at temperature 1; 1 is off")
    number("--context", 256, "L", "positions that a token sees")
    number("--steps", 32, "N", "steps that are timed")
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), choices=WAYS, help="to sample (default: all)"
    )
    parser.add_argument(
        "--size", choices=list(SIZES), help="of the model, default 8b on GPUs, else tiny"
    )
    parser.add_argument("--output", type=Path, metavar="NAME", help="write NAME.csv and NAME.md")
    args = parser.parse_args(given)
    if min(*args.concurrency, args.steps) < 1:
        parser.error("--concurrency and --steps must be at least 1")
    if min(args.num_speculative_tokens) < 0:
        parser.error("--num-speculative-tokens must be at least 0")
    if not 0 < args.acceptance < 1 or not 0 < args.top_p <= 1:
        parser.error("--acceptance must be in (0, 1), and --top-p in (0, 1]")
    if args.context <= max(args.num_speculative_tokens):
        parser.error("--context must be larger than --num-speculative-tokens")
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"--output: no folder {args.output.parent}")
    return args


def make_step(
    model: Model, mesh: DeviceMesh, way: str, B: int, K: int, args: argparse.Namespace
) -> tuple[GraphedStep, ShardPlan]:
    """A step of B requests, and its plan, which stays while the requests do.

    It takes last tokens [B] and positions [B] of the next ones, and returns tokens [B, K + 1], -1
    after the last one, and what the next step takes.
    """
    V, exchange = model.size.vocab, way if way in EXCHANGES else "replicate"
    state = SamplingState(
        mesh,
        vocab_size=V,
        max_num_reqs=B,
        num_speculative_tokens=K,
        exchange=exchange,
        seed=1,
    )
    params = SamplingParams(top_p=args.top_p)
    for slot in range(B):
        state.add(slot, params, position=args.context)
    sampler, verifier = Sampler(state), RejectionSampler(state) if K else None
    cache = model.make_cache(B, args.context)

    def run(plan: ShardPlan, last_B: Tensor, position_B: Tensor) -> tuple[Tensor, ...]:
        text_BJ = text(position_B, K + 1, V)  # of padding too, if the plan has any
        token_BJ = torch.cat([last_B[:, None], text_BJ[:, :K]], 1)[:B]
        hidden_NH, id_N = model.hidden(token_BJ, position_B[:B] - 1, cache), text_BJ[:B].flatten()
        if way != BASELINE:
            hidden_NH, id_N = plan.select(hidden_NH), id_N[plan.logits_indices]
        logits_Tv = model.logits(hidden_NH)
        model.make_likely(logits_Tv, id_N, args.acceptance * args.top_p)
        logits = vocab_sharded(logits_Tv, mesh, vocab_size=V)
        if way == BASELINE:
            p_TV = probabilities(gather(logits), params)
            text_BJ, position_B = text_BJ[:B], position_B[:B]
            drawn = accept(p_TV.view(B, -1, V), None, text_BJ[:, :K]) if K else pick(p_TV)[:, None]
        elif verifier is not None:
            drawn = verifier(logits, plan, text_BJ[:, :K]).token_ids
        else:
            drawn = sampler(logits, plan).token_ids
        count_B = (drawn >= 0).sum(1)
        return (
            drawn,
            drawn.gather(1, (count_B[:, None] - 1).clamp(min=0))[:, 0],
            position_B + count_B,
        )

    step = GraphedStep(run, state, capacities=[-(-B // mesh.size()) * (K + 1)])
    return step, step.plan(range(B), [K + 1] * B)


def text(position_B: Tensor, length: int, V: int) -> Tensor:
    """[B, length]: ids of each request's own text from a position on."""
    request_B, step_J = (
        torch.arange(n, device=position_B.device) for n in (len(position_B), length)
    )
    return ((position_B[:, None] + step_J) * 40_503 + request_B[:, None] * 9_973) % V


def decode(
    step: GraphedStep, plan: ShardPlan, steps: int, context: int
) -> tuple[list[float], list[int]]:
    """Seconds of each step until its tokens are on the host, and how many those are."""
    B, device = len(plan.slots), plan.state.device
    last_B = torch.zeros(B, dtype=torch.int64, device=device)
    position_B = torch.full_like(last_B, context)
    seconds, counts = [], []
    for _ in range(WARM_UP + steps):
        begin = time.perf_counter()
        drawn, last_B, position_B = step(plan, last_B, position_B)
        found = drawn.cpu()
        seconds.append(time.perf_counter() - begin)
        if (found[:, 0] < 0).any():
            raise SystemExit("a request got no token: the model's logits are not numbers")
        counts.append(int((found >= 0).sum()))
    return seconds[WARM_UP:], counts[WARM_UP:]


def measure(mesh: DeviceMesh, model: Model, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each number of drafts, of requests, and way."""
    cuda = mesh.device_type == "cuda"
    every = itertools.product(args.num_speculative_tokens, args.concurrency, args.ways)
    cases = list(dict.fromkeys(every))
    for i, (K, B, way) in enumerate([*cases[:1], *cases]):
        told = f"{i} of {len(cases)}" if i else "warming up"  # the first steps of all are odd ones
        progress(mesh, f"{told}: K={K}, concurrency {B}, {way}")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(1)  # the ranks draw alike where each draws everything
        step, plan = make_step(model, mesh, way, B, K, args)
        try:
            seconds, counts = decode(step, plan, args.steps, args.context)
        finally:
            step.close()
        peak = slowest([torch.cuda.max_memory_allocated() / 2**20], "cuda")[0] if cuda else None
        del step, plan
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        seconds = slowest(seconds, mesh.device_type)
        if i == 0:
            continue
        # Luck with the drafts of a few steps says nothing about a way: all get what they have at
        # the set acceptance, and what came out is told beside it.
        expected = sum(args.acceptance**k for k in range(K + 1))
        speed = B * expected * args.steps / sum(seconds)
        yield {
            "K": K,
            "concurrency": B,
            "way": way,
            "tokens_per_s": round(speed, 1),
            "tpot_ms": round(1e3 * B / speed, 3),
            "itl_ms": round(1e3 * percentile(seconds, 50), 3),
            "itl_99_ms": round(1e3 * percentile(seconds, 99), 3),
            "tokens_per_step": round(sum(counts) / args.steps / B, 2),
            "peak_mib": None if peak is None else round(peak),
            "fits": None,
        }


def room_mib(mesh: DeviceMesh) -> float | None:
    """Memory that torch has or can have, on the rank that has least; other uses are left out."""
    if mesh.device_type == "cpu":
        return None
    free, _ = torch.cuda.mem_get_info()
    return -slowest([-(free + torch.cuda.memory_reserved()) / 2**20], "cuda")[0]


def estimate(records: Sequence[dict[str, Any]], room: float | None) -> None:
    """How many requests would fit, if memory goes on to grow as from the fewest to the most."""
    for own in by(records, "K", "way"):
        low, high = (f(own, key=lambda record: record["concurrency"]) for f in (min, max))
        grown = high["concurrency"] - low["concurrency"]
        if room is None or grown == 0:
            continue
        each = max(high["peak_mib"] - low["peak_mib"], 1) / grown
        for record in own:
            record["fits"] = int(high["concurrency"] + (room - high["peak_mib"]) / each)


def by(records: Sequence[Record], *fields: str) -> list[list[Any]]:
    """Records with equal fields together."""
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for record in records:
        groups.setdefault(tuple(record[field] for field in fields), []).append(record)
    return list(groups.values())


def verdict(records: Sequence[Record]) -> str:
    """Where this library does not pay, next to gathering and sampling in PyTorch."""
    if all(record["way"] != BASELINE for record in records):
        return f"Nothing to compare with: {BASELINE} was not measured."
    slower, same = [], []
    for record in sorted(records, key=lambda r: WAYS.index(r["way"])):
        case = record["K"], record["concurrency"]
        others = [r for r in records if (r["K"], r["concurrency"]) == case]
        (base,) = (r["itl_ms"] for r in others if r["way"] == BASELINE)
        if record["way"] == BASELINE:
            continue
        gain = base / record["itl_ms"] - 1
        where = "`{}` at K = {}, concurrency {}".format(record["way"], *case)
        if abs(gain) < SMALL:
            same.append(where)
        elif gain < 0:
            slower.append(f"{where}: {-gain:.0%}")
    lines = (
        "Where it does not pay, by the median time of a step next to gathering and sampling in "
        f"PyTorch:\n\n- slower: {'; '.join(slower) or 'nowhere'}.\n"
    )
    return lines + f"- less than {SMALL:.0%} apart: {'; '.join(same) or 'nowhere'}."


def report(records: Sequence[Record], args: argparse.Namespace, mesh: DeviceMesh) -> str:
    """The records as Markdown, and how they came about."""
    size, graph = SIZES[args.size], mesh.device_type == "cuda"
    facts = {
        "model": f"random weights, {size}, one all-reduce after the embedding, each attention and "
        f"each MLP; every token sees {args.context} positions",
        "requests": f"temperature 1, top-p {args.top_p:g}, all running from the first step to the "
        "last; no prompts are read",
        "logits": f"of standard deviation {LOGIT_STD:g}, but for one id of each row, the next one "
        "of the request's made-up text, which is raised to a probability of about "
        f"{args.acceptance:g} after top-p",
        "drafts": "that text, chosen and not drawn, at no cost: a real drafter costs time that is "
        "not in here",
        "output tokens/s": "by the mean time of a step, at 1 + A + ... + A^K tokens a request and "
        f"step for A = {args.acceptance:g}; tokens a step, found: those that came out",
        "verification": "block in this library, standard rejection sampling in PyTorch",
        "a step": "one replay of a CUDA graph, until its tokens are on the host"
        if graph
        else "one eager call, until its tokens are on the host",
        "inter-token ms": f"of {args.steps} steps, the slowest rank's each; with K > 0 a step "
        "gives several tokens. Of fewer than 100 steps the 99th percentile is the slowest",
        "most requests": "what would fit into a rank's memory, if that goes on to grow as it did "
        "between the fewest and the most requests measured",
    }
    title = "Decoding with a tensor-parallel model, by how its logits are sampled"
    return markdown(
        title, about(mesh, "bench_decode.py", **facts), COLUMNS, records, verdict(records)
    )


def progress(mesh: DeviceMesh, line: str) -> None:
    if mesh.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def main() -> None:
    args = parse()
    mesh = join()
    cuda = mesh.device_type == "cuda"
    args.size = args.size or ("8b" if cuda else "tiny")
    begin, records = time.perf_counter(), []
    try:
        model = Model(SIZES[args.size], mesh, torch.bfloat16 if cuda else torch.float32)
    except ValueError as error:
        dist.destroy_process_group()
        sys.exit(f"bench_decode.py: error: {error}")
    progress(mesh, f"made the weights in {time.perf_counter() - begin:.0f} s")
    with torch.inference_mode():
        for record in measure(mesh, model, args):
            records.append(record)
            show(record)
    estimate(records, room_mib(mesh))
    if args.output is not None and mesh.get_rank() == 0:
        write(args.output, COLUMNS, records, report(records, args, mesh))
    end_ranks()


if __name__ == "__main__":
    main()
