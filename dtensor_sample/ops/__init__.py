"""Custom ops: the arithmetic that decides, opaque to tracing and able to run on DTensors."""

from dtensor_sample.ops.histogram import BINS, DIGIT_BITS, histogram
from dtensor_sample.ops.mass import mass
from dtensor_sample.ops.peak import peak, unpack_peak
from dtensor_sample.ops.pick import pick
from dtensor_sample.ops.uniform import uniform
from dtensor_sample.ops.values import key_value

__all__ = [
    "BINS",
    "DIGIT_BITS",
    "histogram",
    "key_value",
    "mass",
    "peak",
    "pick",
    "uniform",
    "unpack_peak",
]
