"""Prompts on their way to texts."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from text import TextStream
from weights import Checkpoint

from dtensor_sample import SamplingParams
from dtensor_sample.output import TokenLogprobs

PROMPTS = [
    "The capital of France is",
    "Once upon a time, a little fox",
    "1, 2, 3, 4,",
    "The largest planet in the solar system is",
    "My favourite season is autumn, because",
    "Dear Alice, thank you for",
    "The first man on the moon was",
    "Mathematics is",
]


@dataclass(kw_only=True)
class Request:
    """A prompt on its way to a text."""

    index: int
    prompt: str
    prompt_token_ids: list[int]
    params: SamplingParams
    stream: TextStream
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token, if asked for."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Ids and log-probabilities of the likeliest tokens in the place of each."""
    first_token_seconds: float = 0.0
    finish_reason: str = ""

    @property
    def new_token_ids(self) -> list[int]:
        """What the model has not seen yet: first the prompt, then the last token."""
        return self.token_ids[-1:] or self.prompt_token_ids

    @property
    def all_token_ids(self) -> list[int]:
        """The prompt and what followed."""
        return self.prompt_token_ids + self.token_ids

    @property
    def num_tokens(self) -> int:
        """Tokens so far, which is the position of the next one."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the model has seen."""
        return self.num_tokens - len(self.new_token_ids)

    def take(
        self, token_ids: Sequence[int], *, max_new_tokens: int, eos_token_ids: frozenset[int]
    ) -> tuple[Sequence[int], list[str]]:
        """Append new tokens, up to one that ends the text; return those, and what each shows."""
        pieces = []
        for i, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            pieces.append(self.stream.push(token_id))
            if token_id in eos_token_ids or self.stream.stopped:
                self.finish_reason = "stop"
            elif len(self.token_ids) == max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                pieces[-1] += self.stream.finish(self.token_ids)
                return token_ids[: i + 1], pieces
        return token_ids, pieces

    def tell(self, told: TokenLogprobs, index: int, count: int) -> None:
        """Keep what was told of the last `count` tokens, those of request `index` of a step."""
        self.logprobs += told.token_logprobs[index, :count].tolist()
        tops = zip(told.top_ids[index, :count], told.top_logprobs[index, :count], strict=True)
        self.top_logprobs += [
            list(zip(ids.tolist(), own.tolist(), strict=True)) for ids, own in tops
        ]

    def report(self) -> dict[str, Any]:
        """What --json prints."""
        names: tuple[str, ...] = ("prompt", "prompt_token_ids", "token_ids")
        names += ("finish_reason", "first_token_seconds")
        if self.logprobs:
            names = (*names, "logprobs", "top_logprobs")
        return {name: getattr(self, name) for name in names} | {"text": self.stream.text}


def make_requests(args: argparse.Namespace, checkpoint: Checkpoint) -> list[Request]:
    """Tokenize the prompts of the command line; give each a random stream of its own.

    Raises:
        ValueError: a prompt without tokens or with too many, or sampling parameters out of range.
    """
    prompts = list(args.prompts)
    if args.prompt_file is not None:
        if not args.prompt_file.is_file():
            raise ValueError(f"no prompt file {args.prompt_file}")
        prompts += filter(str.strip, args.prompt_file.read_text("utf-8").splitlines())
        if not prompts:
            raise ValueError(f"no prompt in {args.prompt_file}")
    prompts = prompts or PROMPTS
    last_id = checkpoint.config.vocab_size - 1
    for token_id in args.stop_token_id:
        if not 0 <= token_id <= last_id:
            raise ValueError(f"--stop-token-id must be an id in [0, {last_id}], got {token_id}")
    stop_token_ids = checkpoint.tokenizer.eos_token_ids.union(args.stop_token_id)
    params = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        logprobs=args.logprobs,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        min_tokens=args.min_tokens,
        stop_token_ids=sorted(stop_token_ids),
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
        requests.append(
            Request(
                index=i,
                prompt=prompt,
                prompt_token_ids=token_ids,
                params=params[i],
                stream=checkpoint.tokenizer.stream(args.stop),
            )
        )
    return requests
