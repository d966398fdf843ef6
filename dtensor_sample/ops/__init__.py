"""Custom ops: the arithmetic that decides, opaque to tracing; those of `sharding` take DTensors."""

from dtensor_sample.ops.confidence import confidence, units
from dtensor_sample.ops.copy import copy
from dtensor_sample.ops.deliver import OUTCOME_COLUMNS, deliver
from dtensor_sample.ops.histogram import BINS, DIGIT_BITS, histogram
from dtensor_sample.ops.judge import accept, chances, eligible, emit, lay_out, prefixes
from dtensor_sample.ops.largest import fraction, shortlist, shortlist_integers, sift
from dtensor_sample.ops.logarithm import entropy, log_probability
from dtensor_sample.ops.lookup import lookup
from dtensor_sample.ops.markov import markov, quantized
from dtensor_sample.ops.mass import mass
from dtensor_sample.ops.parts import PARTS
from dtensor_sample.ops.peak import join_peaks, peak
from dtensor_sample.ops.pick import draw, pick
from dtensor_sample.ops.read import read, unpack_read
from dtensor_sample.ops.residual import ONE, recover, residual_mass
from dtensor_sample.ops.row_params import row_params
from dtensor_sample.ops.store import store
from dtensor_sample.ops.take import take
from dtensor_sample.ops.tally import tally
from dtensor_sample.ops.top import top, unpack_top
from dtensor_sample.ops.uniform import uniform
from dtensor_sample.ops.values import key_value

__all__ = [
    "BINS",
    "DIGIT_BITS",
    "ONE",
    "OUTCOME_COLUMNS",
    "PARTS",
    "accept",
    "chances",
    "confidence",
    "copy",
    "deliver",
    "draw",
    "eligible",
    "emit",
    "entropy",
    "fraction",
    "histogram",
    "join_peaks",
    "key_value",
    "lay_out",
    "log_probability",
    "lookup",
    "markov",
    "mass",
    "peak",
    "pick",
    "prefixes",
    "quantized",
    "read",
    "recover",
    "residual_mass",
    "row_params",
    "shortlist",
    "shortlist_integers",
    "sift",
    "store",
    "take",
    "tally",
    "top",
    "uniform",
    "units",
    "unpack_read",
    "unpack_top",
]
