"""Train the drafters of a model on what the model itself writes: no other text is needed.

    python examples/train_drafters.py all --minutes 10 --out trained
    python examples/train_drafters.py sample --minutes 2 --out trained
    python examples/train_drafters.py draft --minutes 4 --out trained
    python examples/train_drafters.py block --minutes 4 --out trained --resume

One process, on a GPU if there is one. `sample` writes texts.npy into the folder, `draft` and
`block` read it and write draft.safetensors and block.safetensors, and `all` does one after the
other in the time given. With --resume a drafter begins with the weights that lie there.
"""

import argparse
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from distill import Recipe, Scaffold, Trainer, sample_texts
from draft_models import BlockModel, DraftModel, DraftWeights, build
from llama import Llama, load_llama
from torch.distributed.device_mesh import init_device_mesh
from weights import Checkpoint, open_checkpoint

SHARES = {"sample": 0.28, "draft": 0.32, "block": 0.40}
"""What `all` spends its time on."""
TEXTS = "texts.npy"
HELD_OUT = 128
"""Texts that are only evaluated on."""


def main() -> None:
    """Load the target; do what the verb says."""
    args = parse_arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(args.model)
    target = load_target(checkpoint)
    verbs = tuple(SHARES) if args.verb == "all" else (args.verb,)
    for verb in verbs:
        minutes = args.minutes * (SHARES[verb] if args.verb == "all" else 1)
        if verb == "sample":
            sample(args, checkpoint, target, minutes)
        else:
            train(args, verb, checkpoint, target, minutes)
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train the drafters of a model.")
    add = parser.add_argument
    add("verb", choices=(*SHARES, "all"), help="what to do")
    add("--minutes", type=float, required=True, help="time to spend, without loading the model")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where files lie")
    add("--model", type=Path, metavar="PATH", help="the target (default: as decode.py)")
    add("--texts", type=int, default=4096, help="to sample at a time (default: %(default)s)")
    add("--length", type=int, default=256, help="tokens of a text (default: %(default)s)")
    add("--rounds", type=int, default=1000, help="of sampling, at most")
    add("--steps", type=int, default=1_000_000, help="of training, at most")
    add("--batch", type=int, default=64, help="texts of a training step (default: %(default)s)")
    add("--rows", type=int, default=8192, help="rows of logits at a time (default: %(default)s)")
    add("--lr", type=float, default=1.5e-3, help="highest learning rate (default: %(default)s)")
    add("--adamw", action="store_true", help="train matrices with AdamW, not with Muon")
    add("--layers", type=int, nargs="+", help="of the target, to begin with (default: two)")
    add("--units", type=int, help="of each MLP (default: draft: 5/6 of the target's, block: 23/24)")
    add("--features", type=int, nargs="+", help="layers that `block` sees (default: three)")
    add("--block", type=int, default=4, metavar="K", help="drafts of a block (default: 4)")
    add("--window", type=int, default=256, help="positions that a block sees (default: 256)")
    add("--rank", type=int, default=64, help="of the Markov head (default: 64)")
    add("--seed", type=int, default=0, help="of texts and of their order (default: 0)")
    add("--resume", action="store_true", help="begin with the weights in the folder")
    return parser.parse_args()


def load_target(checkpoint: Checkpoint) -> Llama:
    """The target on one device, as decoding loads it."""
    device, backend, dtype = "cpu", "gloo", torch.float32
    if torch.cuda.is_available():
        device, backend, dtype = "cuda", "nccl", torch.bfloat16
        # It would plan anew for each length of the texts while they grow.
        torch.backends.cuda.enable_cudnn_sdp(False)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    started = perf_counter()
    target = load_llama(checkpoint, init_device_mesh(device, (1,)), dtype=dtype)
    say(f"{checkpoint.name} on {device} in {perf_counter() - started:.1f} s")
    return target


def sample(args: argparse.Namespace, checkpoint: Checkpoint, target: Llama, minutes: float) -> None:
    """Sample rounds of texts while there is time for one more; write them."""
    scaffold = Scaffold.of(checkpoint)
    rounds: list[np.ndarray] = []
    started = began = perf_counter()
    while len(rounds) < args.rounds:
        texts_ST, temperature_S = sample_texts(
            target,
            scaffold,
            num_texts=args.texts,
            length=args.length,
            seed=args.seed + len(rounds),
        )
        rounds.append(texts_ST.cpu().numpy().astype(np.uint16))
        now = perf_counter()
        took, began = now - began, now
        rate = texts_ST.numel() / took / 1e3
        say(f"sample: round {len(rounds)}, {took:.1f} s, {rate:.0f}k tokens/s")
        if len(rounds) == 1:
            for temperature in temperature_S.unique():
                (index, *_) = (temperature_S == temperature).nonzero()[:, 0].tolist()
                told = checkpoint.tokenizer.decode(rounds[0][index].tolist())
                say(f"--- at temperature {temperature:g}: {told[:500]!r}")
        if now - started + took > 60 * minutes:
            break
    texts = np.concatenate(rounds)
    np.save(args.out / TEXTS, texts)
    say(f"sample: {len(texts)} texts, {texts.size / 1e6:.1f} M tokens")


def train(
    args: argparse.Namespace, kind: str, checkpoint: Checkpoint, target: Llama, minutes: float
) -> None:
    """Train one drafter."""
    path, texts = args.out / f"{kind}.safetensors", np.load(args.out / TEXTS)
    count = min(HELD_OUT, len(texts) // 4)
    torch.manual_seed(args.seed)
    model = begin(args, kind, checkpoint)
    if args.resume and path.is_file():
        model = build(DraftWeights(path, checkpoint))
        say(f"{kind}: begins with {path}")
    own = sum(parameter.numel() for parameter in model.parameters())
    say(f"{kind}: {own / 1e6:.2f} M weights, {texts.size / 1e6:.1f} M tokens to learn from")
    recipe = Recipe(
        minutes=minutes,
        steps=args.steps,
        batch=min(args.batch, len(texts) - count),
        lr=args.lr,
        muon=not args.adamw,
        rows=args.rows,
        seed=args.seed,
    )
    trainer = Trainer(model, target, recipe, say=say)
    trainer.run(texts[:-count], texts[-count:], path)


def begin(args: argparse.Namespace, kind: str, checkpoint: Checkpoint) -> DraftModel | BlockModel:
    """A drafter that has learnt nothing yet."""
    last, full = checkpoint.config.num_layers - 1, checkpoint.config.intermediate_size
    if kind == "draft":
        layers, units = args.layers or (0, last), args.units or full * 5 // 6
        return DraftModel.beside(checkpoint, layers=layers, units=units)
    return BlockModel.beside(
        checkpoint,
        layers=args.layers or (last - 1, last),
        units=args.units or full * 23 // 24,
        features=args.features or (last // 3, 2 * last // 3, last),
        K=args.block,
        window=args.window,
        rank=args.rank,
    )


def say(text: str) -> None:
    """Print now."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
