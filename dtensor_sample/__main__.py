"""`python -m dtensor_sample explain`: what a step would cost, without running it."""

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dtensor_sample import explain as explaining
from dtensor_sample.params import SamplingParams, filters_of
from dtensor_sample.predict import hardware
from dtensor_sample.rejection import METHODS
from dtensor_sample.sharder import MOST_ROWS, POLICIES, assign_owners
from dtensor_sample.workload import Workload

DTYPES = ("bfloat16", "float16", "float32")
FILTERS = ("none", "top-k", "top-p", "both")
EPILOG = """\
Tokens are the same under every exchange; only time and memory differ. Bytes, collectives and memory
are counted from shapes. Time is predicted from constants that were fitted to measured steps: device
time, as in a replayed CUDA graph. An eager step takes the host's time instead, under any exchange.

  python -m dtensor_sample explain --rows 512 --vocab 129280 --tp 8 --k 7
  python -m dtensor_sample explain --rows 64 --vocab 32000 --tp 4 --top-k 50 --json
  torchrun --nproc_per_node=2 -m dtensor_sample explain --calibrate mine.json
  python -m dtensor_sample explain --rows 64 --vocab 32000 --tp 2 --gpu mine.json
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m dtensor_sample", description="Sampling under tensor parallelism."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    it = commands.add_parser(
        "explain",
        help="what a step would cost under each exchange, and which one auto takes",
        description="Show owners, bytes on the wire, peak memory, collectives and predicted time "
        "of one sampling step under each exchange, and which one auto takes. Runs nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    step = it.add_argument_group("the step")
    add = step.add_argument
    add("--rows", type=_count(MOST_ROWS), metavar="T", help="rows of logits, of all requests")
    add("--vocab", type=_count(2**31 - 1), metavar="V", help="ids of the vocabulary")
    add("--tp", type=_count(1 << 20), metavar="P", help="ranks that share the vocabulary")
    add(
        "--k",
        type=_count(MOST_ROWS, 0),
        default=0,
        metavar="K",
        help="draft tokens to verify of each request, which then has K + 1 rows (default: 0)",
    )
    add(
        "--budget",
        type=_count(1 << 30, 0),
        metavar="N",
        help="verify at most N draft tokens of all requests together (default: all)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="of the logits, hidden rows and draft logits (default: %(default)s)",
    )
    add(
        "--hidden",
        type=_count(1 << 24, 0),
        default=0,
        metavar="H",
        help="width of the hidden rows, to count those that are selected (default: not counted)",
    )
    add(
        "--slots",
        type=_count(MOST_ROWS, 0),
        default=0,
        metavar="N",
        help="requests whose draft logits are kept, K each, which lie in peak memory; drafts "
        "are then drawn from them (default: none, drafts are given as tokens alone)",
    )
    add("--top-k", type=int, default=0, metavar="N", help="requests keep the N likeliest tokens")
    add("--top-p", type=float, default=1.0, metavar="X", help="requests keep a mass of X")
    add("--filters", choices=FILTERS, help="instead of those: top-k 50, top-p 0.95, or both")
    add("--greedy", action="store_true", help="all requests take the likeliest token")
    add(
        "--method",
        choices=METHODS,
        default="block",
        help="how drafts are verified (default: %(default)s)",
    )
    add(
        "--owners",
        choices=POLICIES,
        default=POLICIES[0],
        help="who owns which request under batch (default: %(default)s)",
    )
    machine = it.add_argument_group("the machine")
    add = machine.add_argument
    add(
        "--gpu",
        default="h200",
        metavar="NAME",
        help="whose constants predict time: h200, cpu, or a file that --calibrate wrote "
        "(default: %(default)s)",
    )
    add(
        "--calibrate",
        type=Path,
        metavar="FILE.json",
        help="measure this machine and write FILE.json for --gpu, in less than a minute; under "
        "torchrun its collectives too. DTENSOR_SAMPLE_HARDWARE=FILE.json makes auto use it",
    )
    out = it.add_argument_group("output")
    add = out.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw it too: a .png, .pdf or .svg file (needs matplotlib)",
    )
    return top


def _count(most: int, least: int = 1) -> Callable[[str], int]:
    def count(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be an integer in [{least}, {most}], got {text}")
        return value

    return count


def params_of(args: argparse.Namespace) -> SamplingParams:
    """What the options say of every request; ValueError for values out of range."""
    top_k, top_p = args.top_k, args.top_p
    if args.filters is not None:
        if top_k > 0 or top_p < 1:
            raise ValueError("--filters cannot be given with --top-k or --top-p")
        top_k = 50 if args.filters in ("top-k", "both") else 0
        top_p = 0.95 if args.filters in ("top-p", "both") else 1.0
    if args.greedy and (top_k > 0 or top_p < 1):
        raise ValueError("--greedy cannot be given with filters, which a greedy request has not")
    if args.budget is not None and args.k == 0:
        raise ValueError("--budget must be given with --k, as it limits how many drafts there are")
    return SamplingParams(temperature=0.0 if args.greedy else 1.0, top_k=top_k, top_p=top_p)


def workload_of(args: argparse.Namespace) -> Workload:
    """The step that the options describe."""
    requests = -(-args.rows // (args.k + 1))
    rows_B = [args.k + 1] * requests
    rows_B[-1] -= sum(rows_B) - args.rows
    room = [max(requests, args.slots)] * args.tp
    owners_B = assign_owners(args.owners, range(requests), rows_B, [None] * requests, room)
    dtype = getattr(torch, args.dtype)
    drafted = max(rows_B) > 1
    return Workload(
        ranks=args.tp,
        rows_B=rows_B,
        owners_B=owners_B,
        vocab_size=args.vocab,
        filters=filters_of([params_of(args)]),
        dtype=dtype,
        K=args.k,
        method=args.method if drafted else None,
        draft_dtype=dtype if args.slots else None,
        budget=args.budget,
    )


def show(explanation: explaining.Explanation) -> None:
    """Print a table: by rich if it is there."""
    if importlib.util.find_spec("rich") is None:
        print(explanation)
        return
    from rich.console import Console
    from rich.table import Table

    (name, *exchanges), *rows = explanation.cells()
    table = Table(name, title=explanation.title, title_justify="left")
    for exchange in exchanges:
        table.add_column(exchange, style="bold" if exchange == explanation.choice else None)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    for note in explanation.notes:
        console.print(note, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; bad input ends with a message and status 2."""
    top = parser()
    args = top.parse_args(arguments)
    try:
        if args.calibrate is not None:
            from dtensor_sample.calibrate import calibrate

            machine = calibrate(args.calibrate)
            if machine is not None:
                print(f"{args.calibrate}: {machine.about}")
            return
        missing = [f"--{name}" for name in ("rows", "vocab", "tp") if getattr(args, name) is None]
        if missing:
            raise ValueError(f"needed, but not given: {', '.join(missing)}")
        if args.slots and not args.k:
            raise ValueError("--slots keeps draft logits, and needs --k of at least 1")
        if args.plot is not None:
            explaining.check_plot(args.plot)
        hardware(args.gpu)
        explanation = explaining.explain(
            workload_of(args), args.gpu, slots=args.slots, hidden=args.hidden
        )
    except ValueError as error:
        top.exit(2, f"{top.prog} explain: error: {error}\n")
    if args.json:
        print(json.dumps(explanation.as_json(), indent=2))
    else:
        show(explanation)
    if args.plot is not None:
        explaining.draw(explanation, args.plot)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(sys.argv[1:])
