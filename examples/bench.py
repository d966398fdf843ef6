"""How long one sampling step takes, from vocabulary-sharded logits to tokens on every rank.

    torchrun --nproc_per_node=2 examples/bench.py --output docs/NAME
    python examples/bench.py --rows 4 --vocab 1000 --rounds 3    # a CPU will do, on one rank too

Each step is done in several ways: by this library under each exchange, as scripts do it that gather
the logits and sample every row on every rank, and by one all-to-all with a Gumbel number per logit.
First all ways are checked: the exchanges must give equal tokens, and greedy tokens must be the
largest logits. Then the ways take turns, on a GPU each as one CUDA graph, and the slowest rank
counts. `--output` writes NAME.csv and NAME.md. `--k` also verifies drafts that were chosen, under
each exchange.
"""

import argparse
import csv
import datetime as dt
import functools
import importlib.util
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_sample import (
    BatchSharder,
    RejectionSampler,
    Sampler,
    SamplingParams,
    SamplingState,
    ShardPlan,
    vocab_sharded,
)
from dtensor_sample.calibrate import chosen_drafts, slowest, timer, verified
from dtensor_sample.exchange import EXCHANGES
from dtensor_sample.params import filters_of

Step = Callable[[], Tensor]
"""One way to sample: token ids [B]."""
FILTERS = {"off": SamplingParams(), "on": SamplingParams(top_k=50, top_p=0.95)}
COLUMNS = {
    "rows": "rows",
    "filters": "top-k 50, top-p 0.95",
    "way": "way",
    "us": "us, median",
    "us_20": "20%",
    "us_80": "80%",
    "ratio": "x floor",
    "gb_per_s": "GB/s",
    "host_us": "host us, eager",
    "extra_mib": "extra MiB",
    "ranks": "ranks",
    "vocab": "ids",
    "dtype": "dtype",
    "k": "K",
    "candidates": "candidates",
}
"""Fields of the CSV, and what the table calls them."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 64, 512, 2048], metavar="N")
    parser.add_argument("--vocab", type=int, default=129280, metavar="V", help="default 129280")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--k", type=int, nargs="+", default=[0], metavar="K", help="one-hot drafts to verify"
    )
    parser.add_argument("--filters", nargs="+", default=["off", "on"], choices=list(FILTERS))
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="default 30")
    parser.add_argument("--output", type=Path, metavar="NAME", help="write NAME.csv, .md and .png")
    parser.add_argument("--draw", type=Path, metavar="CSV", help="only draw what was measured once")
    args = parser.parse_args()
    if min(*args.rows, args.vocab, args.rounds) < 1:
        parser.error("--rows, --vocab and --rounds must be at least 1")
    if any(k < 0 or any(rows % (k + 1) for rows in args.rows) for k in args.k):
        parser.error("--k must be >= 0, and K + 1 must divide each of --rows")
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"--output: no folder {args.output.parent}")
    if args.draw is not None and not args.draw.is_file():
        parser.error(f"--draw: no file {args.draw}")
    return args


def ways(
    mesh: DeviceMesh, logits_BV: DTensor, params: SamplingParams, k: int = 0
) -> Iterator[tuple[str, Step]]:
    """Every way to sample these rows, or to verify them as requests of k drafts."""
    B, V = logits_BV.shape
    slots = range(B // (k + 1))
    for exchange in EXCHANGES:
        state = SamplingState(
            mesh,
            vocab_size=V,
            max_num_reqs=len(slots),
            num_speculative_tokens=k,
            seed=1,
            exchange=exchange,
        )
        for slot in slots:
            state.add(slot, params)
        # With owners by position, rows in batch order are rows in the plan's order but for padding.
        sharder = BatchSharder(state, owners="position")
        plan = sharder.plan(slots, [k + 1] * len(slots), positions=[0] * len(slots))
        rows = vocab_sharded(plan.select(logits_BV.to_local()), mesh, vocab_size=V)
        if k:
            drafts = chosen_drafts(plan)
            yield exchange, functools.partial(verified, RejectionSampler(state), rows, plan, drafts)
        else:
            yield exchange, functools.partial(sampled, Sampler(state), rows, plan)
    if k:
        return
    yield "gather + sample", functools.partial(gathered, logits_BV, params)
    if params.top_k == 0 and B % mesh.size() == 0:
        yield "all-to-all + Gumbel", functools.partial(gumbel, mesh, logits_BV, params)
    if importlib.util.find_spec("flashinfer") is not None:
        yield "gather + FlashInfer", functools.partial(flashinfer, logits_BV, params)


def sampled(sampler: Sampler, rows: DTensor, plan: ShardPlan) -> Tensor:
    """What this library does."""
    return sampler(rows, plan).token_ids[:, 0]


def gathered(logits_BV: DTensor, params: SamplingParams) -> Tensor:
    """All logits to all ranks, and every row sampled on each, in the usual PyTorch operations."""
    x_BV = logits_BV.redistribute(placements=[Replicate()]).to_local().float() / params.temperature
    if params.top_k:
        least_B1 = x_BV.topk(params.top_k).values[:, -1:]
        x_BV = x_BV.masked_fill(x_BV < least_B1, -torch.inf)
    if params.top_p < 1:
        sorted_BV, id_BV = x_BV.sort(descending=True)
        probs_BV = sorted_BV.softmax(-1)
        beyond_BV = probs_BV.cumsum(-1) - probs_BV >= params.top_p
        x_BV = x_BV.masked_fill(beyond_BV.scatter(1, id_BV, beyond_BV), -torch.inf)
    probs_BV = x_BV.softmax(-1)
    return (probs_BV / torch.empty_like(probs_BV).exponential_(1)).argmax(-1)


def flashinfer(logits_BV: DTensor, params: SamplingParams) -> Tensor:
    """All logits to all ranks, and every row sampled on each by FlashInfer's kernels."""
    sample = importlib.import_module("flashinfer.sampling").top_k_top_p_sampling_from_logits
    x_BV = logits_BV.redistribute(placements=[Replicate()]).to_local()
    token_B: Tensor = sample(x_BV, params.top_k or x_BV.shape[1], params.top_p)
    return token_B


def gumbel(mesh: DeviceMesh, logits_BV: DTensor, params: SamplingParams) -> Tensor:
    """Rows to owners by one all-to-all and a copy; there one random number per logit."""
    local_Bv, P = logits_BV.to_local(), mesh.size()
    width = -(-logits_BV.shape[1] // P)
    padded_Bv = torch.nn.functional.pad(local_Bv, (0, width - local_Bv.shape[1]), value=-torch.inf)
    received = torch.empty_like(padded_Bv)
    dist.all_to_all_single(received, padded_Bv, group=mesh.get_group())
    x_RV = received.view(P, -1, width).transpose(0, 1).flatten(1).float() / params.temperature
    token_R = (x_RV - torch.empty_like(x_RV).exponential_(1).log()).argmax(-1)
    return DTensor.from_local(token_R, mesh, [Shard(0)], run_check=False).full_tensor()


def check(mesh: DeviceMesh, logits_BV: DTensor, params: SamplingParams, k: int = 0) -> None:
    """Equal tokens under all exchanges, largest logits if greedy, and known ids in any way."""
    if k:
        first, *others = (step().tolist() for _, step in ways(mesh, logits_BV, params, k))
        if any(other != first for other in others):
            raise SystemExit("the exchanges differ from each other in verification")
        return
    tokens = {name: step().tolist() for name, step in ways(mesh, logits_BV, params)}
    largest = logits_BV.full_tensor().argmax(-1).tolist()
    greedy = SamplingParams(temperature=0.0)
    chosen = [step().tolist() for name, step in ways(mesh, logits_BV, greedy) if name in EXCHANGES]
    V = logits_BV.shape[1]
    for name, ids in tokens.items():
        if any(not 0 <= token < V for token in ids):
            raise SystemExit(f"{name} gives ids beyond the vocabulary")
    if any(tokens[name] != tokens["batch"] for name in EXCHANGES) or any(
        ids != largest for ids in chosen
    ):
        raise SystemExit("the exchanges differ from each other, or greedy tokens from the largest")


def host_us(step: Step, device: str) -> float:
    """Microseconds until a step has been asked for, without waiting for a GPU."""
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        step()
        times.append((time.perf_counter() - begin) * 1e6)
        if device == "cuda":
            torch.cuda.synchronize()
    return statistics.median(times)


def extra_mib(step: Step, device: str) -> float | None:
    """Memory that a step takes beyond what it was given, at most."""
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def bytes_per_us(device: str) -> float:
    """What a copy of much memory reads and writes."""
    source = torch.empty(2**30 if device == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    run = timer(lambda: target.copy_(source), device)
    return 2 * source.nbytes / statistics.median(run() for _ in range(10))


def measure(mesh: DeviceMesh, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One record for each number of rows, filters and way."""
    device, dtype, V = mesh.device_type, getattr(torch, args.dtype), args.vocab
    speed = bytes_per_us(device)
    width = -(-V // mesh.size())
    first = mesh.get_local_rank() * width
    for B in args.rows:
        generator = torch.Generator(device).manual_seed(mesh.get_local_rank())
        columns = max(min(width, V - first), 0)
        local = torch.randn(B, columns, generator=generator, device=device).mul_(2).to(dtype)
        logits_BV = vocab_sharded(local, mesh, vocab_size=V)
        floor_us = B * V * dtype.itemsize / mesh.size() / speed
        for k, filters in itertools.product(args.k, args.filters):
            check(mesh, logits_BV, FILTERS[filters], k)
            steps = dict(ways(mesh, logits_BV, FILTERS[filters], k))
            host = {name: host_us(step, device) for name, step in steps.items()}
            extra = {name: extra_mib(step, device) for name, step in steps.items()}
            timers = {name: timer(step, device) for name, step in steps.items()}
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(args.rounds):
                for name, run in timers.items():
                    times[name].append(slowest(run(), device))
            timers.clear()  # graphs hold collectives: they must go before the group does
            for name, us in times.items():
                low, median, high = (statistics.quantiles(us, n=10)[i] for i in (1, 4, 7))
                yield {
                    "rows": B,
                    "filters": filters,
                    "way": name,
                    "us": round(median, 1),
                    "us_20": round(low, 1),
                    "us_80": round(high, 1),
                    "ratio": round(median / floor_us, 1),
                    "gb_per_s": round(B * V * dtype.itemsize / mesh.size() / median / 1e3, 1),
                    "host_us": round(slowest(host[name], device)),
                    "extra_mib": None if extra[name] is None else round(extra[name] or 0.0, 1),
                    "ranks": mesh.size(),
                    "vocab": V,
                    "dtype": args.dtype,
                    "k": k,
                    "candidates": filters_of([FILTERS[filters]]).candidates,
                }


def report(records: list[dict[str, Any]], args: argparse.Namespace, mesh: DeviceMesh) -> str:
    """The records as Markdown, and how they came about."""
    cuda = mesh.device_type == "cuda"
    machine = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    about = {
        "date": dt.date.today().isoformat(),
        "machine": f"{mesh.size()} x {machine}",
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "command": " ".join(["examples/bench.py", *sys.argv[1:]]),
        "logits": f"{args.vocab} ids, {args.dtype}",
        "a step": "one replay of a CUDA graph" if cuda else "one eager call",
        "floor": "the time in which a copy moves as many bytes as a rank's part of the logits has",
    }
    lines = ["# One sampling step, from sharded logits to tokens on every rank", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += ["", "| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for record in records:
        cells = ("" if record[key] is None else str(record[key]) for key in COLUMNS)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A picture of time and of memory over rows."""
    from matplotlib.figure import Figure

    panels = [
        ("us", "off", "microseconds a step, no filter"),
        ("us", "on", "the same, top-k 50 and top-p 0.95"),
        ("extra_mib", "on", "MiB beyond the logits, with filters"),
    ]
    names = list(dict.fromkeys(record["way"] for record in records))
    figure = Figure(figsize=(13, 4.2), dpi=150, layout="constrained")
    for ax, (field, filters, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for i, name in enumerate(names):
            points = [
                (int(record["rows"]), float(record[field]))
                for record in records
                if (record["way"], record["filters"]) == (name, filters)
                and not int(record.get("k") or 0)
                and float(record[field] or 0) > 0  # a logarithm has no place for the others
            ]
            if points:
                own = name in EXCHANGES
                ax.plot(
                    *zip(*points, strict=True), "o-" if own else "s--", label=name, color=f"C{i}"
                )
        ax.set(xscale="log", yscale="log", xlabel="rows", title=title)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    args = parse()
    if args.draw is not None:
        with args.draw.open(newline="") as file:
            draw(list(csv.DictReader(file)), args.draw.with_suffix(".png"))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    records = []
    with torch.inference_mode():
        for record in measure(mesh, args):
            records.append(record)
            if mesh.get_rank() == 0:
                print(*(f"{key}={value}" for key, value in record.items()), flush=True)
    if args.output is not None and mesh.get_rank() == 0:
        with args.output.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(records)
        args.output.with_suffix(".md").write_text(report(records, args, mesh))
        if importlib.util.find_spec("matplotlib") is not None:
            draw(records, args.output.with_suffix(".png"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
