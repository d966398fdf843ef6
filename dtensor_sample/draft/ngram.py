"""Drafts without a draft model: what followed the last tokens when they were seen before.

Prompt lookup decoding (Saxena, 2023): text that quotes, edits or repeats itself goes on as it did.
The drafts are chosen, not drawn: verification takes them as one-hot.
"""

from collections.abc import Sequence

import numpy as np

from dtensor_sample import check


def ngram_drafts(token_ids: Sequence[int], k: int, *, max_n: int = 3, min_n: int = 1) -> list[int]:
    """Up to `k` tokens that followed an earlier occurrence of a request's last tokens.

    The longest suffix that occurred before counts, of n tokens from `max_n` down to `min_n`. Of its
    occurrences the most recent one that `k` tokens follow is read; if none has as many, the first,
    which most tokens follow. Host arithmetic, a function of its arguments: the same on every rank.

    Args:
        token_ids: the request's own tokens, prompt and output; ids >= 0.
        k: how many drafts at most, >= 0.
        max_n: tokens of the longest suffix to look for.
        min_n: tokens of the shortest, in [1, max_n].

    Returns:
        0 to `k` ids; none when no suffix occurred before.

    Raises:
        ValueError: names the argument.

    Example:
        >>> ngram_drafts([7, 1, 2, 3, 9, 1, 2], 3)
        [3, 9, 1]
    """
    k, max_n = check.integer("k", k, low=0), check.integer("max_n", max_n, low=1)
    min_n = check.integer("min_n", min_n, 1, max_n)
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
        raise ValueError(f"token_ids must be a flat list of ids, got {token_ids!r}")
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        # What follows each earlier occurrence; the suffix itself is not one.
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
        after = np.flatnonzero((windows == tokens[-n:]).all(1)) + n
        if after.size and k:
            enough = after[after + k <= len(tokens)]
            begin = enough[-1] if enough.size else after[0]
            return [int(token) for token in tokens[begin : begin + k]]
    return []
