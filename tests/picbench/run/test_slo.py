"""Objectives of latency."""

from dataclasses import replace

import pytest

from picbench.errors import ConfigError
from picbench.store.records import GroupResult, SampleRow, Tally, parse_slo
from picbench.store.summary import summarise


def good(slo: str, *times: tuple[float, float | None, float]) -> float:
    """Requests of these times to the first, a later and the last token that meet objectives."""
    plain = SampleRow(arm="a", sample="s", round=0, timed=True, prompt_sha256="")
    rows = [replace(plain, ttft_ms=a, tpot_ms=b, e2e_ms=c) for a, b, c in times]
    failed = replace(plain, timed=False, error="no")
    tally = Tally([*rows, failed], [GroupResult((), busy=1.0)])
    arms = summarise({"a": tally}, metric="f1", meaningful=True, objectives=parse_slo(slo))
    return arms["a"].goodput_req_s or 0.0


def test_every_objective_has_to_be_met() -> None:
    slo = "ttft=500, tpot=50,e2e=2000"
    assert parse_slo(slo) == {"ttft_ms": 500.0, "tpot_ms": 50.0, "e2e_ms": 2000.0}
    assert good(slo, (500.0, 50.0, 2000.0)) == 1
    # One token has no gap, and the request that failed is never good.
    assert good("tpot=1", (1.0, None, 1.0)) == 1
    assert good(slo, (501.0, 1.0, 1.0), (1.0, 51.0, 1.0), (1.0, 1.0, 2001.0)) == 0


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=", "ttft=0", "ttft=-1", "ttft=x", "itl=5", "ttft=1,ttft=2", "e2e=inf"],
)
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no objective"):
        parse_slo(text)
