"""Drafts by prompt lookup against a plain search."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_sample import ngram_drafts


def searched(tokens: list[int], k: int, max_n: int, min_n: int) -> list[int]:
    """The definition: longest suffix first, most recent first, but k tokens rather than fewer."""
    for n in range(max_n, min_n - 1, -1):
        found = [
            tokens[i + n : i + n + k]
            for i in reversed(range(len(tokens) - n))
            if tokens[i : i + n] == tokens[len(tokens) - n :]
        ]
        if found:
            return next((drafts for drafts in found if len(drafts) == k), found[-1])
    return []


@given(
    tokens=st.lists(st.integers(0, 3), max_size=20),
    k=st.integers(0, 6),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_against_plain_search(tokens, k, lengths):
    """Catches a match of the suffix with itself, a shorter match preferred, an end overrun."""
    min_n, max_n = sorted(lengths)
    drafts = ngram_drafts(tokens, k, max_n=max_n, min_n=min_n)
    assert drafts == searched(tokens, k, max_n, min_n)
    assert all(type(token) is int for token in drafts)


EXAMPLES = [
    # tokens, k, drafts
    ([], 3, []),
    ([5], 3, []),
    ([5, 5], 3, [5]),
    ([1, 2, 3], 3, []),
    ([7, 1, 2, 3, 9, 1, 2], 3, [3, 9, 1]),
    ([1, 2, 8, 0, 1, 2, 9, 0, 1, 2], 2, [9, 0]),  # the most recent
    ([3, 2, 8, 0, 0, 4, 2, 9, 0, 0, 3, 2], 1, [8]),  # the longest, though older
    ([4, 4, 4, 4, 4], 2, [4, 4]),  # two tokens rather than one
    ([6, 1, 6], 0, []),
]


@pytest.mark.parametrize("example", range(len(EXAMPLES)))
def test_examples(example):
    """Catches a definition that both the search above and the code have wrong."""
    tokens, k, drafts = EXAMPLES[example]
    assert ngram_drafts(tokens, k) == drafts
    arrays: Any = np.array(tokens, np.int32)
    assert ngram_drafts(arrays, k) == drafts


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"k": -1}, ("k ", "-1", ">= 0")),
        ({"k": 1.5}, ("k ", "1.5", "integer")),
        ({"min_n": 0}, ("min_n", "0", "[1, 3]")),
        ({"max_n": 2, "min_n": 3}, ("min_n", "3", "[1, 2]")),
        ({"token_ids": [[1]]}, ("token_ids", "[[1]]", "flat")),
        ({"token_ids": [0.5]}, ("token_ids", "[0.5]", "flat")),
    ],
)
def test_refusals(given, parts):
    """Catches silent acceptance and vague messages."""
    arguments = {"token_ids": [1, 2, 1], "k": 2} | given
    with pytest.raises(ValueError, match=parts[0]) as refused:
        ngram_drafts(arguments.pop("token_ids"), arguments.pop("k"), **arguments)
    assert all(part in str(refused.value) for part in parts)
