"""Objectives of latency."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picbench.errors import ConfigError
from picbench.store.records import Objectives, SampleRow, parse_slo


def row(**values: float | str | None) -> SampleRow:
    return SampleRow(arm="a", sample="s", round=0, timed=True, prompt_sha256="", **values)  # type: ignore[arg-type]


def test_every_objective_has_to_be_met() -> None:
    bounds = parse_slo("ttft=500, tpot=50,e2e=2000")
    assert bounds == Objectives(500, 50, 2000)
    assert bounds.met(row(ttft_ms=500.0, tpot_ms=50.0, e2e_ms=2000.0))
    assert not bounds.met(row(ttft_ms=501.0, tpot_ms=1.0, e2e_ms=1.0))
    assert not bounds.met(row(ttft_ms=1.0, tpot_ms=51.0, e2e_ms=1.0))
    assert not bounds.met(row(ttft_ms=1.0, tpot_ms=1.0, e2e_ms=2001.0))


def test_one_token_has_no_gap_and_a_failure_is_never_good() -> None:
    assert parse_slo("tpot=1").met(row(ttft_ms=1.0, e2e_ms=1.0))
    assert not parse_slo("tpot=1").met(row(error="no"))


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=x", "itl=5", "ttft=1,ttft=2", "e2e=inf"],
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no objective"):
        parse_slo(text)


@given(st.floats(0.001, 1e6), st.floats(0.001, 1e6))
def test_looser_objectives_are_met_by_more(bound: float, time: float) -> None:
    tight, loose = Objectives(ttft=bound), Objectives(ttft=2 * bound)
    if tight.met(row(ttft_ms=time)):
        assert loose.met(row(ttft_ms=time))
