"""Drafts without a draft model: what followed the last tokens when they were seen before.

Prompt lookup decoding (Saxena, 2023): text that quotes, edits or repeats itself goes on as it did.
The drafts are chosen, not drawn: verification takes them as one-hot.
"""

from collections.abc import Sequence

import numpy as np

from dtensor_sample import check


class NgramDrafter:
    """Drafts tokens that followed an earlier occurrence of a request's last tokens.

    The longest suffix that occurred before counts, of n tokens from `max_n` down to `min_n`. Of its
    occurrences the most recent one that as many tokens as wanted follow is read; if none has as
    many, the first, which most tokens follow. A request whose suffixes are all new has no drafts.

    Host arithmetic over all requests at once, a function of its arguments: the same on every rank.

    Args:
        max_n: tokens of the longest suffix to look for.
        min_n: tokens of the shortest, in [1, max_n].

    Raises:
        ValueError: names the argument.

    Example:
        >>> NgramDrafter().propose([0], [[7, 1, 2, 3, 9, 1, 2]], [3])
        ([[3, 9, 1]], [True])
    """

    def __init__(self, *, max_n: int = 3, min_n: int = 1) -> None:
        self.max_n = check.integer("max_n", max_n, low=1)
        self.min_n = check.integer("min_n", min_n, 1, self.max_n)

    def propose(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> tuple[list[list[int]], list[bool]]:
        """See `Drafter`; raises ValueError, naming the argument."""
        B = len(check.integers("slots", slots, None, 0))
        k_B = np.array(check.integers("limits", limits, B, 0, check.INT64_MAX), dtype=np.int64)
        if not isinstance(token_ids, Sequence):
            raise ValueError(f"token_ids must be a sequence of ids of each slot, got {token_ids!r}")
        if len(token_ids) != B:
            raise ValueError(f"token_ids must have {B} entries, got {len(token_ids)}")
        texts = [_flat(f"token_ids[{i}]", tokens) for i, tokens in enumerate(token_ids)]

        # All texts behind one another. An occurrence is known by the place t right after it.
        text_T = np.concatenate([np.empty(0, np.int64), *texts])
        size_B = np.array([len(tokens) for tokens in texts], dtype=np.int64)
        end_B = size_B.cumsum()
        request_T = np.repeat(np.arange(B), size_B)
        t, start_T, end_T = np.arange(len(text_T)), (end_B - size_B)[request_T], end_B[request_T]

        # How many of the tokens before each place are those before the end of its text.
        common_T = np.zeros_like(t)
        for n in range(1, min(self.max_n, len(t)) + 1):
            same_T = text_T[t - n] == text_T[end_T - n]
            common_T += same_T & (t - n >= start_T) & (common_T == n - 1)
        longest_B = np.zeros(B, np.int64)
        np.maximum.at(longest_B, request_T, common_T)
        after_T = (common_T == longest_B[request_T]) & (common_T >= self.min_n)

        first_B, last_B = end_B.copy(), np.full(B, -1)
        np.minimum.at(first_B, request_T[after_T], t[after_T])
        enough_T = after_T & (k_B[request_T] <= end_T - t)
        np.maximum.at(last_B, request_T[enough_T], t[enough_T])
        begin_B = np.where(last_B >= 0, last_B, first_B)
        stop_B = begin_B + np.minimum(k_B, end_B - begin_B)
        drafts = [text_T[a:b].tolist() for a, b in zip(begin_B, stop_B, strict=True)]
        return drafts, [True] * B


def _flat(name: str, tokens: Sequence[int]) -> np.ndarray:
    try:
        array = np.asarray(tokens)
    except ValueError:  # nested lists of unequal lengths
        array = np.asarray("ragged")
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"{name} must be a flat list of ids, got {tokens!r}")
    if array.dtype.kind == "u" and array.size and array.max() > check.INT64_MAX:
        raise ValueError(f"{name} must have ids below 2**63, got {array.max()}")
    return array.astype(np.int64)
