"""What proposes drafts: one interface, whatever is behind it."""

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Proposes tokens for a step of the target to verify.

    A step of the target emits one token more than it accepts. So drafts decide how many steps a
    text takes, never how likely it is: any function of replicated data will do.

    Example:
        >>> drafts, one_hot = drafter.propose(slots, texts, [4] * len(slots))   # doctest: +SKIP
        >>> plan = sharder.plan(slots, [1 + len(own) for own in drafts])        # doctest: +SKIP
        >>> output = verifier(logits, plan, drafts, one_hot=one_hot)            # doctest: +SKIP
    """

    def propose(
        self, slots: Sequence[int], token_ids: Sequence[Sequence[int]], limits: Sequence[int]
    ) -> tuple[list[list[int]], list[bool]]:
        """Drafts of some requests, the same on every rank; every rank of the axis must call this.

        Args:
            slots: [B], where the requests are.
            token_ids: [B], the tokens of each request so far, prompt and output.
            limits: [B], how many drafts of each at most, >= 0.

        Returns:
            draft_token_ids and one_hot as `RejectionSampler` takes them, that is [B] lists of ids,
            and [B] whether a request's drafts were chosen rather than drawn from draft logits.
        """
        ...
