"""What users should know of choices made for them."""

import functools
import logging

from dtensor_sample.exchange import Axis


@functools.cache
def say(axis: Axis, text: str) -> None:
    """Log a text once, on the first rank of an axis whose ranks all have it to say."""
    if axis.rank == 0:
        logging.getLogger("dtensor_sample").warning(text)
