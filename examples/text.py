"""Text to token ids and back, with a model's own tokenizer and chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Self

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.decoders import DecodeStream

# Token types in the vocabulary of a GGUF file.
CONTROL, USER_DEFINED = 3, 4


class ChatTokenizer:
    """A tokenizer, the chat template that goes with it, and the ids that end a text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_token_ids: frozenset[int],
        template: str | None,
        special_tokens: Mapping[str, str],
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self._template = None if template is None else _environment().from_string(template)
        self._special_tokens = special_tokens

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a text to continue or, if `chat`, of a message to answer.

        Raises:
            ValueError: `chat`, but the model has no template, or one that refuses the message.
        """
        if not chat:
            return self.tokenizer.encode(prompt).ids
        if self._template is None:
            raise ValueError("the model has no chat template")
        messages = [{"role": "user", "content": prompt}]
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except TemplateError as error:
            raise ValueError(f"the chat template of the model fails: {error}") from error
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def stream(self, stops: Sequence[str] = ()) -> "TextStream":
        """A text that grows token by token, and ends before the first of `stops`."""
        return TextStream(self.tokenizer, stops)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """Build the byte-level BPE tokenizer that the metadata of a GGUF file describes.

        Raises:
            ValueError: it describes another kind.
        """
        kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"its tokenizer is {kind}, expected ('gpt2', 'smollm')")
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        ids = {token: i for i, token in enumerate(tokens)}
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        tokenizer = Tokenizer(models.BPE(ids, merges))
        # Each digit is a piece of its own; the pattern of GPT-2 then splits the rest.
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = metadata["tokenizer.ggml.token_type"]
        for token, token_type in zip(tokens, types, strict=True):
            if token_type == CONTROL:
                tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
            elif token_type == USER_DEFINED:
                tokenizer.add_tokens([AddedToken(token, normalized=False)])

        def named(name: str) -> dict[str, int]:
            token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
            return {} if token_id is None else {tokens[token_id]: token_id}

        bos, ends = named("bos"), named("eos") | named("eot")
        special_tokens = {
            f"{name}_token": token for name in ("bos", "eos", "unknown") for token in named(name)
        }
        if metadata.get("tokenizer.ggml.add_bos_token", False):
            first = next(iter(bos))
            tokenizer.post_processor = processors.TemplateProcessing(
                f"{first} $A", special_tokens=list(bos.items())
            )
        # What separates documents ends a continued text, whatever ends a message.
        ends |= {token: ids[token] for token in ("<|endoftext|>",) if token in ids}
        return cls(
            tokenizer,
            eos_token_ids=frozenset(ends.values()),
            template=metadata.get("tokenizer.chat_template"),
            special_tokens=special_tokens,
        )

    @classmethod
    def from_directory(cls, path: Path, *, eos_token_ids: frozenset[int]) -> Self:
        """Read `tokenizer.json`, and the template and the special tokens if there are any.

        Raises:
            ValueError: there is no such file, or it is not a tokenizer.
        """
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the bindings raise nothing more specific
            raise ValueError(f"{path / 'tokenizer.json'} cannot be read: {error}") from error
        config_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
        config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        template = config.get("chat_template")
        if template_file.is_file():
            template = template_file.read_text("utf-8")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        special_tokens = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in config.items()
            if name.endswith("_token") and isinstance(token, str | dict)
        }
        return cls(
            tokenizer,
            eos_token_ids=eos_token_ids,
            template=template,
            special_tokens=special_tokens,
        )


class TextStream:
    """The text of one request: whole characters only, until `finish`.

    What may become one of `stops` is held back until it is clear whether it does.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.text = ""
        self.stopped = False
        """Whether one of `stops` came; the text ends before it."""
        self._tokenizer, self._stops = tokenizer, stops
        self._stream = DecodeStream(skip_special_tokens=True)
        self._shown = 0

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain, perhaps none."""
        self.text += self._stream.step(self._tokenizer, token_id) or ""
        self._stop()
        held = 0 if self.stopped else max(map(self._begun, self._stops), default=0)
        return self._piece(len(self.text) - held)

    def finish(self, token_ids: Sequence[int]) -> str:
        """Return what the text of all tokens has beyond the pieces: a character cut short."""
        if not self.stopped:
            self.text = self._tokenizer.decode(token_ids)
            self._stop()
        return self._piece(len(self.text))

    def _stop(self) -> None:
        found = [at for stop in self._stops if (at := self.text.find(stop)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _begun(self, stop: str) -> int:
        """How many characters of `stop` end the text."""
        return max((n for n in range(len(stop)) if self.text.endswith(stop[:n])), default=0)

    def _piece(self, end: int) -> str:
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for."""

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.now().strftime(pattern)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
