"""The custom ops as torch sees them: schemas, fakes, aliasing."""

import pytest
import torch
from torch.library import opcheck

from dtensor_sample import ops
from dtensor_sample.ops.edits import Edits

V = 11


def arguments() -> dict[str, tuple[object, ...]]:
    """Valid arguments of each op: four rows in a strided receive buffer of three segments."""
    x_NSv = torch.randn(3, 4, 4).bfloat16().transpose(0, 1)
    rows_R = torch.tensor([2, -1, 0, 3])
    peak_R, zero_R = torch.full((4,), 3.0), torch.zeros(4, dtype=torch.int64)
    edits = Edits(
        row_R=torch.tensor([0, -1, 1, 0]),
        table_E=torch.tensor([1, -1]),
        rates_E3=torch.tensor([[1.5, 0.5, 0.25]] * 2),
        drafts_EK=torch.tensor([[3, -1]] * 2),
        banned_EB=torch.tensor([[-1], [7]]),
        mask_E=torch.tensor([0, -1]),
        bias_MW=torch.zeros(2, V),
        counts_MW=torch.ones(2, V, dtype=torch.int32),
        mask_GX=torch.tensor([[0b10110111]], dtype=torch.int32),
        mask_id_1=torch.zeros(1, dtype=torch.int64),
    )
    row = (x_NSv, torch.arange(3) * 4, rows_R, list(edits), peak_R, peak_R - 9, torch.ones(4))
    draft = (x_NSv, zero_R - 1, list(edits), peak_R, peak_R, peak_R, zero_R)
    residual = (*row, rows_R, zero_R + (1 << 50), zero_R + ops.ONE, *draft, zero_R)
    drawn = (torch.ones(3, 4, ops.PARTS, dtype=torch.int64).transpose(0, 1), 0, zero_R + 5)
    shape = (torch.ones(4), peak_R - 9, zero_R + 3, zero_R + (1 << 30))
    ones_QK = torch.ones(4, 2, dtype=torch.int64)
    # Four requests, of two drafts, of one and of none; drafts of the last are not listed.
    place_QK = torch.tensor([[0, 1], [2, 6], [6, 6], [6, 6]])
    six_G = torch.full((6,), 6)
    grid = (zero_R[:, None].expand(-1, 3).contiguous(), zero_R + 1, ones_QK, place_QK)
    return {
        "peak": (*row[:4], V),
        "join_peaks": ((zero_R + (1 << 62)).expand(2, 3, 4).permute(2, 1, 0), peak_R),
        "take": (
            torch.tensor([3, 0, 3, -1]),
            torch.tensor([True, False, True, True]),
            rows_R,
            *row[4:],
            torch.ones(3, 4, ops.PARTS, dtype=torch.int64).transpose(0, 1),
            zero_R,
            zero_R,
        ),
        "histogram": (*row, zero_R, V, 0, True),
        "shortlist": (*row[:4], V, 8),
        "sift": (torch.zeros(4, 3, 15, dtype=torch.int64), *row[4:], *shape[2:], V),
        "mass": (*row, V),
        "weigh": (*row[:4], *shape, True, True, True, V),
        "deliver": (
            *(zero_R[:, None].expand(-1, 6).contiguous(), rows_R.clamp(min=0), 3),
            *(rows_R.clamp(min=0), zero_R.clone()),
        ),
        "pick": (*row, *drawn[:2], rows_R, drawn[2], V),
        "draw": (*row, *drawn, zero_R, zero_R, zero_R == 0, V),
        "log_probability": (torch.zeros(4, 2), peak_R, torch.ones(4), zero_R + 7, V),
        "entropy": (zero_R + 7, zero_R + 3, V),
        "read": (*row[:4], torch.arange(8).view(4, 2), V),
        "tally": (*row, peak_R, V, True),
        "top": (*row[:4], V, 5),
        "lookup": (*row, rows_R, zero_R, V),
        "row_params": (
            *(torch.ones(5, 6, dtype=torch.int64), zero_R + 4, zero_R, zero_R, zero_R),
            *(0, 2),
        ),
        "uniform": (zero_R, zero_R, zero_R, 0),
        "lay_out": (zero_R, torch.zeros(5, dtype=torch.int64), *[zero_R] * 2, None, ones_QK, 3),
        "eligible": (zero_R, zero_R > 0, drawn[0], rows_R, zero_R, V),
        "chances": (*[six_G] * 5, zero_R > 0, grid[0], place_QK, zero_R, zero_R),
        "prefixes": (ones_QK, ones_QK, ones_QK, zero_R + 1, place_QK, 6),
        "accept": (
            *(ones_QK, ones_QK, ones_QK, ones_QK, torch.ones(6, 3, ops.PARTS, dtype=torch.int64)),
            *(zero_R + 1, grid[0], place_QK, zero_R, zero_R, zero_R > 0),
        ),
        "emit": (zero_R, zero_R, zero_R > 0, *grid[:3], zero_R, None),
        "residual_mass": (*residual, rows_R, V),
        "recover": (*residual, drawn[0], drawn[0], True, rows_R, rows_R, *drawn[1:], V),
        "copy": (*row[:4], V),
        "markov": (
            x_NSv,
            peak_R - 9,
            rows_R,
            *ops.quantized(torch.randn(V, 2)),
            *ops.quantized(torch.randn(9, 2)),
            torch.arange(9) + 2,
            V,
        ),
        "confidence": (torch.randn(4, 6), torch.randn(6), zero_R + 5),
        "store": (
            torch.zeros(4, V).bfloat16(),
            [*torch.zeros(3, 4), zero_R[:, None, None].clone(), zero_R.clone(), zero_R.clone()],
            rows_R,
            0,
            zero_R > 0,
            x_NSv,
            *row[4:],
            torch.ones(4, 3, ops.PARTS, dtype=torch.int64),
            zero_R,
            zero_R,
        ),
    }


def test_every_op_is_checked() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if "dtensor_sample::" in name}
    assert names == {f"dtensor_sample::{name}" for name in arguments()}


@pytest.mark.parametrize("name", arguments())
def test_opcheck(name: str) -> None:
    """Catches fakes of another shape or dtype, and outputs that alias inputs."""
    opcheck(getattr(torch.ops.dtensor_sample, name).default, arguments()[name])


def test_edits_hold_no_tensor_twice() -> None:
    """Catches what makes torch 2.13 fail as it compiles a verifier again, for other arguments."""
    edits = Edits.none(3, torch.device("cpu"))
    assert len(set(map(id, edits))) == len(edits)
