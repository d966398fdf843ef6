"""Sampling under tensor parallelism: DTensor in, tokens out."""

from dtensor_sample.draft.drafter import Drafter
from dtensor_sample.draft.ngram import NgramDrafter
from dtensor_sample.draft.sampler import DraftSampler
from dtensor_sample.functional import sample, sample_with_logprobs
from dtensor_sample.graphed import GraphedStep
from dtensor_sample.layout import replicated, vocab_sharded
from dtensor_sample.logprobs import logprobs
from dtensor_sample.output import SamplerOutput
from dtensor_sample.params import SamplingParams
from dtensor_sample.plan import ShardPlan
from dtensor_sample.process import TokenBitmask
from dtensor_sample.rejection import RejectionSampler
from dtensor_sample.sampler import Sampler
from dtensor_sample.sharder import BatchSharder
from dtensor_sample.state import SamplingState

__version__ = "0.1.0"

__all__ = [
    "BatchSharder",
    "DraftSampler",
    "Drafter",
    "GraphedStep",
    "NgramDrafter",
    "RejectionSampler",
    "Sampler",
    "SamplerOutput",
    "SamplingParams",
    "SamplingState",
    "ShardPlan",
    "TokenBitmask",
    "logprobs",
    "replicated",
    "sample",
    "sample_with_logprobs",
    "vocab_sharded",
]
