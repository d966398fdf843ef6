"""How many drafts of each kind are accepted, on prompts that nobody trained on.

    python examples/evaluate_drafters.py --limit 8
    python examples/evaluate_drafters.py --csv drafters.csv --plot drafters.png

Decodes the same prompts, chats and beginnings of texts, with each drafter at each temperature, and
counts. What is written is the acceptance of each place in a block, and tokens per target step.
"""

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from decode import TIMEOUT, TRAINED, choose_device, decode, join_ranks, open_drafter
from draft_models import DraftWeights
from drafters import ModelDrafter, load_block
from ending import end_ranks
from held_out import BEGINNINGS, CHATS
from llama import Llama, load_llama
from meter import Meter
from plot import PARTS
from prompts import Request
from torch.distributed.device_mesh import DeviceMesh
from weights import Checkpoint, open_checkpoint

from dtensor_sample import (
    Drafter,
    NgramDrafter,
    RejectionSampler,
    SamplingParams,
    SamplingState,
)

KINDS = ("chat", "text")
DRAFTERS = ("ngram", "draft", "block")
FIELDS = ("drafter", "temperature", "prompts", "tokens_per_target_step")
"""Of every line of the CSV file; a line is a place in a block."""


def main() -> None:
    """Evaluate all drafters at all temperatures."""
    args = parse_arguments()
    device_type, checkpoint = choose_device(), open_checkpoint()
    mesh = join_ranks(device_type, TIMEOUT)
    results = []
    for name in args.drafters:
        for result in evaluate(args, name, checkpoint, mesh):
            results.append(result)
            if dist.get_rank() == 0:
                print(line(result), flush=True)
    if dist.get_rank() == 0:
        if args.csv is not None:
            write_csv(args.csv, results)
        if args.plot is not None:
            draw(args.plot, results)
    end_ranks()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Count accepted drafts, by drafter.")
    add = parser.add_argument
    add("--limit", type=int, default=50, metavar="N", help="prompts of each kind, the first ones")
    add("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS, help="which to evaluate")
    add("--temperatures", type=float, nargs="+", default=(0.0, 1.0), help="(default: 0 and 1)")
    add("--max-new-tokens", type=int, default=96, metavar="N", help="(default: %(default)s)")
    add("--max-num-reqs", type=int, default=8, metavar="N", help="prompts at a time")
    add("--num-speculative-tokens", type=int, default=4, metavar="K", help="(default: 4)")
    add("--method", choices=("standard", "block"), default="block", help="of verification")
    add("--folder", type=Path, metavar="FOLDER", help="of drafter weights (default: those shipped)")
    add("--csv", type=Path, metavar="FILE", help="write all counts")
    add("--plot", type=Path, metavar="FILE", help="draw them (needs matplotlib)")
    return parser.parse_args()


def evaluate(
    args: argparse.Namespace, name: str, checkpoint: Checkpoint, mesh: DeviceMesh
) -> Iterator[dict[str, Any]]:
    """What one drafter brings, at each temperature and for each kind of prompts."""
    prompts = {
        kind: [checkpoint.tokenizer.encode(text, chat=kind == "chat") for text in texts]
        for kind, texts in zip(KINDS, (CHATS[: args.limit], BEGINNINGS[: args.limit]), strict=True)
    }
    longest = max(map(len, prompts["chat"] + prompts["text"])) + args.max_new_tokens
    dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32

    def load(checkpoint: Checkpoint) -> Llama:
        model = load_llama(checkpoint, mesh, dtype=dtype)
        model.allocate_cache(max_num_reqs=args.max_num_reqs, max_length=longest)
        return model

    target = load(checkpoint)
    state = SamplingState(
        mesh,
        vocab_size=checkpoint.config.vocab_size,
        max_num_reqs=args.max_num_reqs,
        num_speculative_tokens=args.num_speculative_tokens,
    )
    drafter: Drafter = NgramDrafter()
    if name != "ngram":
        path = None if args.folder is None else args.folder / TRAINED[name].name
        weights = open_drafter(name, path, checkpoint)
        if isinstance(weights, DraftWeights) and name == "block":
            drafter = load_block(weights, target, checkpoint, state, max_length=longest)
        else:
            drafter = ModelDrafter(load(weights), state)
    sampler = RejectionSampler(state, method=args.method)
    for temperature in args.temperatures:
        for kind in KINDS:
            meter = Meter(mesh.device_type)
            requests = [
                Request(
                    index=i,
                    prompt="",
                    prompt_token_ids=ids,
                    params=SamplingParams(temperature=temperature, seed=i),
                    stream=checkpoint.tokenizer.stream(),
                )
                for i, ids in enumerate(prompts[kind])
            ]
            decode(
                target,
                requests,
                sampler,
                drafter=drafter,
                mesh=mesh,
                max_new_tokens=args.max_new_tokens,
                eos_token_ids=checkpoint.tokenizer.eos_token_ids,
                meter=meter,
            )
            yield {
                "drafter": name,
                "temperature": temperature,
                "prompts": kind,
                "tokens_per_second": meter.figures()["tokens_per_second"],
                **meter.speculation(),
            }


def line(result: Mapping[str, Any]) -> str:
    """One result in a line."""
    shares = " ".join(f"{share:4.0%}" for share in result["acceptance_per_position"])
    return (
        f"{result['drafter']:6} T={result['temperature']:g} {result['prompts']}: "
        f"accepted {shares}, {result['tokens_per_target_step']:.2f} tokens a step, "
        f"{result['acceptance_length']:.2f} of a step with drafts, "
        f"{result['tokens_per_second']:.0f} tokens/s"
    )


def write_csv(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """One line a place in a block."""
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow([*FIELDS, "position", "drafted", "accepted"])
        for result in results:
            begin = [
                f"{value:.3f}" if isinstance(value, float) else value
                for value in map(result.__getitem__, FIELDS)
            ]
            counts = (result[f"{name}_per_position"] for name in ("drafted", "accepted"))
            for position, pair in enumerate(zip(*counts, strict=True), 1):
                rows.writerow([*begin, position, *pair])


def draw(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Acceptance by position above, tokens per target step below; a column for each temperature."""
    from matplotlib.figure import Figure

    temperatures = sorted({result["temperature"] for result in results})
    names = list(dict.fromkeys(result["drafter"] for result in results))
    figure = Figure(figsize=(5 * len(temperatures), 7), dpi=150, layout="constrained")
    axes = figure.subplots(2, len(temperatures), squeeze=False, sharey="row")
    for column, temperature in enumerate(temperatures):
        upper, lower = axes[:, column]
        for n, name in enumerate(names):
            for k, kind in enumerate(KINDS):
                for result in results:
                    key = result["drafter"], result["temperature"], result["prompts"]
                    if key != (name, temperature, kind):
                        continue
                    shares = result["acceptance_per_position"]
                    style = {"color": PARTS[n], "linestyle": ("-", "--")[k], "marker": "o"}
                    upper.plot(range(1, 1 + len(shares)), shares, label=f"{name}, {kind}", **style)
                    bars = lower.bar(
                        n + 0.4 * (k - 0.5),
                        result["tokens_per_target_step"],
                        0.38,
                        color=PARTS[n],
                        alpha=(1, 0.6)[k],
                    )
                    lower.bar_label(bars, fmt="%.2f", fontsize=9)
        upper.set(
            title=f"temperature {temperature:g}",
            xlabel="position of a draft in its block",
            ylim=(0, 1),
        )
        upper.xaxis.get_major_locator().set_params(integer=True)
        lower.set(xticks=range(len(names)), xticklabels=names, ylim=(0, None))
        lower.axhline(1, color="grey", linewidth=0.8)
        for ax in (upper, lower):
            ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("share of drafts accepted")
    axes[1, 0].set_ylabel("tokens per target step")
    axes[0, -1].legend(frameon=False, fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    main()
