"""The Triton kernels against their twins in plain torch: equal bits, wherever they run."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dtensor_sample import ops, weigh
from dtensor_sample.ops.edits import Edits
from tests.kernel_cases import KINDS, SMALL, drafted, mismatches, numbers, params

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found 0")
BESIDE = pytest.mark.parametrize("beside", ["cuda", pytest.param("cpu", marks=pytest.mark.slow)])
"""Where the twins of kernels run: a CPU takes minutes for rows of full size."""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.timeout(1200)
def test_kernels_in_the_interpreter():
    """Catches a kernel that rounds, counts or cuts off otherwise than its twin, without a GPU."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernel_cases"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


REAL = replace(SMALL, v=129280, V=129280)
REAL_CASES = (
    REAL,
    replace(REAL, dtype=torch.float32, layout="wide", V=129000),
    replace(REAL, S=2, v=64640, V=129279, layout="buffer", chosen=(0, 1, -1, 5, 3, 2)),
    replace(REAL, S=8, v=16032, V=128256, dtype=torch.float16, layout="buffer"),
    replace(REAL, v=32000, V=32000),
    replace(REAL, v=50257, V=50257),
    replace(REAL, kinds=KINDS[:3], v=262144, V=262144),
    replace(REAL, kinds=KINDS[:6], edited="bias counts bans mask"),
    replace(
        REAL, kinds=KINDS[1:5], S=2, v=64640, V=129279, layout="buffer", edited="counts bans mask"
    ),
)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(600)
@BESIDE
@pytest.mark.parametrize("case", REAL_CASES, ids=str)
def test_kernels_on_a_gpu(case, beside):
    """Catches what only a compiler does: contraction, approximate functions, races."""
    assert list(mismatches(case, "cuda", beside=beside)) == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        replace(REAL, S=2, v=64640, layout="buffer"),
        replace(REAL, S=4, v=32064, V=128249, dtype=torch.float16, layout="buffer"),
        replace(REAL, kinds=KINDS[5:], S=8, v=16160, V=129272, dtype=torch.float32),
    ],
    ids=str,
)
@BESIDE
def test_items_of_several_parts_on_a_gpu(case, beside, monkeypatch):
    """Catches parts that end early and take columns after them, in items as many rows have them."""
    monkeypatch.setattr("dtensor_sample.ops.kernels.passes._ENOUGH_ITEMS", 1)
    assert list(mismatches(case, "cuda", beside=beside)) == []


@pytest.mark.gpu
@needs_gpu
def test_numbers_on_a_gpu():
    assert list(numbers("cuda")) == []


@pytest.mark.gpu
@needs_gpu
def test_launches_of_other_kinds():
    """Catches a kernel compiled for aligned addresses, strides or sizes launched with others."""
    wide = torch.randn(5, 1, 4097, device="cuda").bfloat16()
    first_id_S = torch.zeros(1, dtype=torch.int64, device="cuda")
    for _ in range(2):  # the second time nothing is compiled
        for begin, end, rows in ((0, 4096, 5), (1, 4097, 5), (0, 4096, 1), (8, 4097, 3), (3, 4, 4)):
            x_NSv, V = wide[:rows, :, begin:end], end - begin
            for like in (x_NSv, x_NSv.contiguous(), x_NSv.float()):
                found = ops.peak(like, first_id_S, None, (), V)
                assert torch.equal(found.cpu(), ops.peak(like.cpu(), first_id_S.cpu(), None, (), V))


@pytest.mark.gpu
@needs_gpu
def test_drafting_on_a_gpu():
    """Catches products that tensor cores round, and bits that depend on tiles or shards."""
    assert list(drafted("cuda", large=True)) == []


@pytest.mark.gpu
@needs_gpu
def test_rows_beyond_2_31_logits():
    """Catches 32-bit offsets: the last rows of 2.2 billion logits as if they were alone."""
    N, V = 14200, 151936
    x_NSv = torch.empty(N, 1, V, dtype=torch.bfloat16, device="cuda")
    tail = torch.randn(8, 1, V, device="cuda").bfloat16()
    x_NSv[-8:] = tail
    first_id_S = torch.zeros(1, dtype=torch.int64, device="cuda")
    rows_R = torch.arange(N - 8, N, device="cuda")
    for filters in ((False, False, False), (True, True, False), (True, True, True)):
        shape = [p.cuda() for p in params(8, V, top_k=True, top_p=True)]
        far = weigh.whole(x_NSv, first_id_S, rows_R, (), *shape, *filters, V)
        near = weigh.whole(tail, first_id_S, None, (), *shape, *filters, V)
        assert all(map(torch.equal, far, near))
        drawn = (near[2], 0, None, torch.arange(8, device="cuda") << 58)
        row_args = (near[0], near[1], shape[0], *drawn, V)
        far_ids = ops.pick(x_NSv, first_id_S, rows_R, (), *row_args)
        assert torch.equal(far_ids, ops.pick(tail, first_id_S, None, (), *row_args))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "filters", [(False, False, False), (True, True, False), (True, True, True)]
)
def test_memory_beyond_the_logits(filters):
    """Catches a copy of the logits, a mask or a sort: at most 4 KiB a row are taken."""
    R, V = 512, 129280
    x_NSv = torch.randn(R, 1, V, device="cuda").bfloat16()
    first_id_S = torch.zeros(1, dtype=torch.int64, device="cuda")
    shape = [p.cuda() for p in params(R, V, top_k=True, top_p=True)]
    weigh.whole(x_NSv, first_id_S, None, (), *shape, *filters, V)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weigh.whole(x_NSv, first_id_S, None, (), *shape, *filters, V)
    assert torch.cuda.max_memory_allocated() - before <= 4096 * R + (4 << 20)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_edits_are_of_two_kinds():
    """Catches numbers of bans or drafts, or a mask, for which kernels would be compiled anew."""
    from dtensor_sample.ops.kernels.edits import edit_arguments
    from dtensor_sample.ops.kernels.launch import _kinds

    R, W = 3, 64
    none, first_id_S = Edits.none(R, torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
    few = [none.banned_EB.new_zeros((R, size)) for size in (0, 1, 2, 16)]
    masks = [none.mask_GX, none.mask_GX.new_zeros((1, 1)), none.mask_GX.new_zeros((R, 16))]
    biases = [none.bias_MW, none.bias_MW.new_zeros((1, W)), none.bias_MW.new_zeros((16, W))]
    counts = [none.counts_MW, none.counts_MW.new_zeros((1, W)), none.counts_MW.new_zeros((16, W))]
    kinds = {
        tuple(map(str, _kinds(edit_arguments(tuple(edits), first_id_S))))
        for banned, drafts, mask, bias, count in itertools.product(few, few, masks, biases, counts)
        for edits in [
            none._replace(
                banned_EB=banned, drafts_EK=drafts, mask_GX=mask, bias_MW=bias, counts_MW=count
            )
        ]
    }
    assert len(kinds) == 2  # with counts and without
