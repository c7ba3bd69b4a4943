"""Kernels whose outputs are wrong are not timed."""

import pytest
import torch

from picbench.errors import InvalidRun
from picbench.experiments.kernel_cases import decode_errors, draw, plain, require_right, rope_table
from picbench.kernels.shape import HeadShape

NAN = float("nan")


def test_the_largest_error_is_returned() -> None:
    assert require_right("decode", [1e-3, 2e-3, 0.0], torch.bfloat16) == pytest.approx(2e-3)


@pytest.mark.parametrize("errors", [[0.0, 0.02], [NAN, 0.0], [0.0, NAN]], ids=str)
def test_one_that_is_too_large_or_no_number_is_refused(errors: list[float]) -> None:
    with pytest.raises(InvalidRun, match="decode of it: relative error") as refused:
        require_right("decode of it", errors, torch.bfloat16)
    assert "nothing was timed" in refused.value.hint


def test_a_type_has_a_tolerance_of_its_own() -> None:
    with pytest.raises(InvalidRun):
        require_right("decode", [1e-3], torch.float32)


def test_requests_at_both_ends_and_in_the_middle_are_compared() -> None:
    shape = HeadShape(4, 2, 32, torch.float32)
    requests = [plain(20, 1)] * 5
    scene = draw(requests, shape, rope_table(32, 64, "cpu"), device="cpu")
    query = scene.queries(5)
    ends = torch.tensor([19], dtype=torch.int32)
    right = torch.cat([scene.expected(i, query[i : i + 1], ends) for i in range(5)])
    assert decode_errors(scene, query, right) == [0.0, 0.0, 0.0]
    right[1] = right[3] = NAN
    assert decode_errors(scene, query, right) == [0.0, 0.0, 0.0]
    right[4] = 0.0
    assert decode_errors(scene, query, right) == [0.0, 0.0, 1.0]
