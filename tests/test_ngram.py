"""Drafts by prompt lookup against a plain search."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtensor_sample import NgramDrafter


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
    texts=st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 6)), max_size=5
    ),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_against_plain_search(texts, lengths):
    """Catches a match with the suffix itself or another text, a shorter one, an end overrun."""
    min_n, max_n = sorted(lengths)
    tokens, limits = [own for own, _ in texts], [k for _, k in texts]
    drafter = NgramDrafter(max_n=max_n, min_n=min_n)
    drafts, one_hot = drafter.propose(range(len(texts)), tokens, limits)
    assert drafts == [searched(own, k, max_n, min_n) for own, k in texts]
    assert one_hot == [True] * len(texts)
    assert all(type(token) is int for own in drafts for token in own)


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
    arrays: Any = np.array(tokens, np.int32)
    for text in (tokens, arrays):
        assert NgramDrafter().propose([5], [text], [k]) == ([drafts], [True])


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"limits": [-1]}, ("limits[0]", "-1", "[0, 2**63)")),
        ({"limits": [1.5]}, ("limits", "1.5", "integer")),
        ({"limits": [1, 1]}, ("limits", "1 entries", "2")),
        ({"min_n": 0}, ("min_n", "0", "[1, 3]")),
        ({"max_n": 2, "min_n": 3}, ("min_n", "3", "[1, 2]")),
        ({"max_n": 0}, ("max_n", "0", ">= 1")),
        ({"token_ids": [[[1]]]}, ("token_ids", "[[1]]", "flat")),
        ({"token_ids": [[0.5]]}, ("token_ids", "[0.5]", "flat")),
        ({"token_ids": []}, ("token_ids", "1 entries", "0")),
    ],
)
def test_refusals(given, parts):
    """Catches silent acceptance and vague messages."""
    arguments = {"slots": [0], "token_ids": [[1, 2, 1]], "limits": [2]} | given
    lengths = {name: arguments.pop(name) for name in ("max_n", "min_n") if name in arguments}
    with pytest.raises(ValueError, match=re.escape(parts[0])) as refused:
        NgramDrafter(**lengths).propose(**arguments)
    assert all(part in str(refused.value) for part in parts)
