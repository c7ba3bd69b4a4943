"""Advice from counts made by hand: what is compared, and where a difference begins."""

import pytest

from picbench.engines.algorithms import parse
from picbench.profile.predictor import ArmPrediction
from picbench.profile.profile import ArmProfile, TraceProfile, TrafficSums, Worth, advise
from picbench.profile.reuse import ReuseTotals


def arm(
    spec: str,
    computed: int,
    limited: int | None = None,
    requests_s: float | None = None,
    *,
    inside: bool = True,
) -> ArmProfile:
    """An arm that computes so many of 1000 tokens of ten requests, without and with a pool."""
    totals = [
        None if count is None else ReuseTotals(requests=10, prompt=1000, reused=1000 - count)
        for count in (computed, limited)
    ]
    assert totals[0] is not None
    predicted = ArmPrediction(None, requests_s, None, 0.0, inside) if requests_s else None
    return ArmProfile(parse(spec), totals[0], totals[1], peak_blocks=0, predicted=predicted)


def profile(*arms: ArmProfile, chunks: int = 30) -> TraceProfile:
    traffic = TrafficSums(
        requests=10, prompt=1000, chunks=chunks, chunk_tokens=900, contents_tokens=225
    )
    return TraceProfile("t", "plain", False, None, 1, traffic, arms)


@pytest.mark.parametrize(
    ("computed", "worth", "taken"),
    [
        (449, Worth.YES, "mepic"),
        (450, Worth.EQUAL, "prefix"),
        (550, Worth.EQUAL, "prefix"),
        (551, Worth.NO, "prefix"),
    ],
)
def test_a_tenth_is_no_difference(computed: int, worth: Worth, taken: str) -> None:
    found = advise(profile(arm("full", 1000), arm("prefix", 500), arm("mepic", computed)))
    assert (found.worth, found.arm) == (worth, taken)
    assert f"mepic takes {computed / 500:.2f} of prefix's computed tokens" in found.line


def test_the_pool_that_was_given_counts() -> None:
    arms = arm("prefix", 500), arm("mepic", 100, limited=600)
    assert advise(profile(*arms)).worth is Worth.NO


def test_the_reasons_are_shares_and_means() -> None:
    line = advise(profile(arm("prefix", 500), arm("mepic", 100))).line
    assert "75% of chunk tokens recur" in line
    assert "90% of prompt tokens are saved against 50%" in line
    assert "prompts have 100 tokens in 3.0 chunks" in line
    plain = advise(profile(arm("prefix", 500), arm("mepic", 500), chunks=0)).line
    assert plain.endswith("the trace has no chunks.")
    costly = advise(profile(arm("prefix", 500), arm("mepic", 100, limited=160))).line
    assert costly.endswith("the pool costs 6% of them.")


def test_mepic_is_taken_where_it_is_as_good_as_the_best() -> None:
    shared = "epic:copy=shared"
    arms = arm("prefix", 500), arm(shared, 100)
    assert advise(profile(*arms, arm("mepic", 110))).arm == "mepic"
    assert advise(profile(*arms, arm("mepic", 111))).arm == parse(shared).spec
    assert advise(profile(*arms, arm("mepic", 90))).arm == "mepic"


def test_bounds_and_private_copies_are_not_advised() -> None:
    for other in ("naive", "epic"):
        found = advise(profile(arm("prefix", 500), arm(other, 10)))
        assert (found.worth, found.arm) == (Worth.UNKNOWN, None)
        both = advise(profile(arm("prefix", 500), arm(other, 10), arm("mepic", 200)))
        assert both.arm == "mepic"
    assert advise(profile(arm("mepic", 10))).worth is Worth.UNKNOWN


def test_seconds_count_instead_of_tokens_where_they_are_predicted() -> None:
    """Twice the tokens in half of the time: 0.1 s a request against 0.2 s."""
    arms = arm("prefix", 300, requests_s=5.0), arm("mepic", 600, requests_s=10.0)
    found = advise(profile(*arms))
    assert (found.worth, found.arm) == (Worth.YES, "mepic")
    assert "mepic takes 0.50 of prefix's seconds of the engine a request;" in found.line


@pytest.mark.parametrize(
    ("prefix", "mepic", "worth"),
    [(600, 300, Worth.YES)] + [(300, mepic, Worth.UNKNOWN) for mepic in (600, 300, 280)],
)
def test_outside_of_the_grid_tokens_have_to_say_the_same(
    prefix: int, mepic: int, worth: Worth
) -> None:
    outside = arm("mepic", mepic, requests_s=10.0, inside=False)
    found = advise(profile(arm("prefix", prefix, requests_s=5.0), outside))
    assert (found.worth, found.arm) == (worth, "mepic" if worth is Worth.YES else None)
    assert "(extrapolated, outside of the measured grid) and" in found.line
    if worth is Worth.UNKNOWN:
        assert found.line.startswith("unknown, measure it. mepic takes 0.50 of prefix's seconds")
