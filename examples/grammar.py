"""Texts that a grammar allows: masks of tokens by llguidance (`pip install llguidance`).

Every rank runs the same matchers on the same tokens, so no mask travels.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from text import ChatTokenizer

from dtensor_sample import TokenBitmask


class Grammar:
    """What texts may be: JSON by a schema, or what a regular expression matches.

    Raises:
        ValueError: llguidance is not installed, or does not take the grammar.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        vocab_size: int,
        *,
        json_schema: Path | None = None,
        regex: str | None = None,
    ) -> None:
        try:
            import llguidance
        except ImportError:
            raise ValueError("grammars need llguidance: pip install llguidance") from None
        self._new_matcher = llguidance.LLMatcher
        if regex is not None:
            grammar = llguidance.LLMatcher.grammar_from_regex(regex)
        else:
            assert json_schema is not None
            if not json_schema.is_file():
                raise ValueError(f"no JSON schema {json_schema}")
            options: Any = {"whitespace_flexible": False}  # a model might go on with blanks forever
            try:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(
                    json_schema.read_text("utf-8"), overrides=options
                )
            except ValueError as error:
                raise ValueError(f"{json_schema} is no JSON schema: {error}") from None
        self._grammar, self.words = grammar, -(-vocab_size // 32)
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.tokenizer.to_str(),
            n_vocab=vocab_size,
            eos_token=sorted(tokenizer.eos_token_ids),
        )
        if refusal := llguidance.LLMatcher.validate_grammar(grammar, self._tokenizer):
            source = repr(regex) if json_schema is None else json_schema
            raise ValueError(f"llguidance refuses the grammar of {source}: {refusal}")
        self._matchers: dict[int, Any] = {}

    def begin(self, slot: int) -> None:
        """A text begins in a slot."""
        self._matchers[slot] = self._new_matcher(self._tokenizer, self._grammar)

    def mask(self, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> TokenBitmask:
        """What may come next in each slot, and after each of its drafts that may come."""
        rows = np.zeros((sum(1 + len(own) for own in drafts), self.words), np.int32)
        first, acceptable = 0, []
        for slot, own in zip(slots, drafts, strict=True):
            matcher, count = self._matchers[slot], 0
            self._fill(matcher, rows[first])
            for draft in own:
                if matcher.try_consume_tokens([draft]) == 0:
                    break
                count += 1
                if not matcher.is_stopped():
                    self._fill(matcher, rows[first + count])
            matcher.rollback(count)
            acceptable.append(count)
            first += 1 + len(own)
        return TokenBitmask(bitmask=torch.from_numpy(rows), num_acceptable=acceptable)

    def take(self, slot: int, token_ids: Sequence[int]) -> None:
        """Tokens were emitted in a slot."""
        self._matchers[slot].consume_tokens(list(token_ids))

    def _fill(self, matcher: Any, row: np.ndarray) -> None:
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
