"""What comes back from a step."""

from dataclasses import dataclass

from torch import Tensor

TOLD_COLUMNS = 4
"""Integers about a token besides given, likeliest and kept ones: its value, rank, how many tokens
are kept, entropy."""


@dataclass(frozen=True, eq=False)
class TokenLogprobs:
    """What is told of emitted tokens: plain tensors, the same on every rank, in batch order.

    B requests, K speculative tokens; entry [b, j] is about the j-th new token of request b,
    accepted, recovered or drawn, in the row of logits that decided about it. Values follow the
    state's `logprobs_mode`; what is kept is told after temperature and filters in every mode.

    Widths are the most that any request of the batch asked for. Where there is nothing to tell
    (after the last new token, for requests that asked for less, where fewer tokens are left) ids
    are -1, counts and ranks 0, and floats -inf.
    """

    token_logprobs: Tensor
    """[B, K + 1] float32: of the token itself. In processed modes a greedy request's token has
    probability 1."""
    ranks: Tensor
    """[B, K + 1] int64: 1 + how many tokens have larger values."""
    top_ids: Tensor
    """[B, K + 1, n] int64: the tokens with the n largest values, the largest first and equal ones
    by their ids."""
    top_logprobs: Tensor
    """[B, K + 1, n] float32."""
    given_logprobs: Tensor
    """[B, K + 1, m] float32: of the request's `logprob_token_ids`."""
    num_kept: Tensor
    """[B, K + 1] int64: how many tokens the filters left to draw from; of requests that asked for
    kept tokens."""
    kept_ids: Tensor
    """[B, K + 1, c] int64: the kept tokens, likeliest first; if there are more than fit, the
    likeliest."""
    kept_logprobs: Tensor
    """[B, K + 1, c] float32: their log-probabilities, which add up to 1 if all of them fit; -inf
    also of a kept token whose own lies beyond float32, as of a logit of its least number."""
    kept_overflow: Tensor
    """[B, K + 1] bool: whether more tokens were kept than the request's `kept_capacity`."""
    entropy: Tensor
    """[B, K + 1] float32, in nats; of requests that asked for it."""


@dataclass(frozen=True, eq=False)
class SamplerOutput:
    """Plain tensors, the same on every rank, in batch order. B requests, K speculative tokens."""

    token_ids: Tensor
    """[B, K + 1] int64: each request's new tokens, then -1."""
    num_sampled: Tensor
    """[B] int64: new tokens: accepted drafts and, unless the request failed, one more."""
    num_rejected: Tensor
    """[B] int64: draft tokens refused, or never judged after one that was."""
    num_nans: Tensor
    """[B] int64: NaN logits in the request's rows."""
    failed: Tensor
    """[B] bool: in the row of the token after the accepted drafts, or the only row, no token was
    left to choose (all NaN or -inf): there its token id is -1."""
    logprobs: TokenLogprobs | None = None
    """What requests asked to be told of their tokens; None if none did."""
