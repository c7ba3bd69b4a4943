"""What a gate catches and what it lets pass, with the noise of real rows."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from measured_arms import make_arm, noisy, repeated
from measured_noise import measured, possible_run, residuals, save

from picbench.compare.arm import RATES, MeasuredArm
from picbench.compare.baseline import (
    TIME_METRICS,
    Baseline,
    Thresholds,
    with_relative_times,
)
from picbench.compare.comparison import Conditions
from picbench.compare.gate import Check, GateVerdict, judge_arms
from picbench.tables.metrics import Pairing, metrics_paired

OK, REGRESSION, INCONCLUSIVE = GateVerdict.OK, GateVerdict.REGRESSION, GateVerdict.INCONCLUSIVE

Arms = dict[str, MeasuredArm]


def check(arms: Arms, baseline: Baseline, *, times: bool = True) -> tuple[Check, ...]:
    return judge_arms(with_relative_times(arms), baseline, times=times)


def found(checks: Sequence[Check], verdict: GateVerdict) -> list[tuple[str, str]]:
    return [(c.arm, c.metric) for c in checks if c.verdict is verdict]


def slowed(arms: Arms, factor: float, *names: str) -> Arms:
    return {
        name: replace(arm, times={t: _times(v, factor) for t, v in arm.times.items()})
        if name in names
        else arm
        for name, arm in arms.items()
    }


def _times(values: tuple[float | None, ...], factor: float) -> tuple[float | None, ...]:
    return tuple(None if value is None else value * factor for value in values)


def with_lost_answers(arms: Arms, lost: int) -> Arms:
    """mepic no longer gives right answers that it gave."""
    arm = arms["mepic"]
    right = [place for place, score in enumerate(arm.scores) if score == 1.0][:lost]
    scores = tuple(0.0 if place in right else score for place, score in enumerate(arm.scores))
    return {**arms, "mepic": replace(arm, scores=scores)}


def with_more(arms: Arms, counter: str, amount: int) -> Arms:
    arm = arms["mepic"]
    values = tuple(value + amount for value in arm.counters[counter])
    return {**arms, "mepic": replace(arm, counters={**arm.counters, counter: values})}


def with_one_less(arms: Arms, counter: str, amount: int) -> Arms:
    """The first request of mepic has less of a count."""
    arm = arms["mepic"]
    first, *others = arm.counters[counter]
    counters = {**arm.counters, counter: (first - amount, *others)}
    return {**arms, "mepic": replace(arm, counters=counters)}


@pytest.fixture(scope="module")
def baseline() -> Baseline:
    return save([possible_run(1000)])


def test_the_stored_noise_is_what_a_busy_machine_has() -> None:
    assert 0.1 < residuals().std() < 0.3
    assert len(measured().arms["full"].samples) == 64


def test_an_unchanged_run_passes_20_times_of_20(baseline: Baseline) -> None:
    """Although all times of a run are up to 1.6 times as long, as they were on that machine."""
    for seed in range(20):
        checks = check(possible_run(seed, drift=0.2), baseline)
        assert found(checks, REGRESSION) == []


def test_it_passes_against_several_runs_too() -> None:
    repeated = save([possible_run(seed, drift=0.02) for seed in (1000, 1001, 1002)])
    for seed in range(20):
        checks = check(possible_run(seed, drift=0.02), repeated)
        assert found(checks, REGRESSION) == []


def test_a_slowdown_of_one_arm_by_5_percent_is_caught(baseline: Baseline) -> None:
    for seed in range(10):
        checks = check(slowed(possible_run(seed, drift=0.2), 1.05, "mepic"), baseline)
        assert ("mepic", "ttft_vs_full") in found(checks, REGRESSION)


def test_a_slowdown_of_all_arms_is_caught_where_runs_hardly_drift() -> None:
    """Milliseconds say it, if several runs have told how little they drift."""
    runs = [possible_run(seed, size=2400) for seed in (1000, 1001, 1002, 1003)]
    checks = check(slowed(possible_run(0, size=2400), 1.06, "full", "mepic"), save(runs))
    assert ("full", "ttft_ms") in found(checks, REGRESSION)
    assert ("mepic", "ttft_vs_full") not in found(checks, REGRESSION)


def test_drift_between_runs_excuses_as_much() -> None:
    runs = [slowed(possible_run(n), factor, "full", "mepic") for n, factor in ((1, 1.0), (2, 1.15))]
    checks = check(slowed(possible_run(0), 1.15, "full", "mepic"), save(runs))
    assert found(checks, REGRESSION) == []
    assert ("full", "ttft_ms") in found(checks, INCONCLUSIVE)


@pytest.mark.parametrize("size", [400, 600])
def test_a_loss_of_2_points_is_caught(size: int) -> None:
    saved = save([possible_run(1000, size=size)])
    checks = check(with_lost_answers(possible_run(0, size=size), size // 50), saved)
    assert found(checks, REGRESSION) == [("mepic", "score")]


def test_a_loss_below_the_margin_passes(baseline: Baseline) -> None:
    checks = check(with_lost_answers(possible_run(0), 1), baseline)
    assert ("mepic", "score") in found(checks, OK)


def test_a_loss_that_few_samples_show_is_inconclusive() -> None:
    saved = save([possible_run(1000, size=40)])
    checks = check(with_lost_answers(possible_run(0, size=40), 1), saved)
    assert ("mepic", "score") in found(checks, INCONCLUSIVE)


def test_a_loss_beyond_the_margin_that_may_be_chance_fails_and_is_no_regression() -> None:
    """Three of 200 have p = 0.25, and an interval without 0."""
    saved = save([possible_run(1000, size=200)])
    checks = check(with_lost_answers(possible_run(0, size=200), 3), saved)
    assert [c.metric for c in checks if c.fails] == ["score"]
    assert found(checks, INCONCLUSIVE) == [("mepic", "score")]


def test_a_sure_loss_within_the_margin_passes() -> None:
    """Six of 400 lost are 1.5 points on these requests, whatever others would lose."""
    saved = save([possible_run(1000, size=400)], Thresholds(score={"margin": 0.015}))
    checks = check(with_lost_answers(possible_run(0, size=400), 6), saved)
    assert {c.verdict for c in checks} == {OK}


def test_a_loss_of_exactly_the_margin_passes() -> None:
    """0.3 - 0.4 is less than -0.1 in binary."""
    saved = save([{"mepic": make_arm("mepic", [0.4] * 20)}], Thresholds(score={"margin": 0.1}))
    assert {c.verdict for c in check({"mepic": make_arm("mepic", [0.3] * 20)}, saved)} == {OK}


@pytest.mark.parametrize(
    ("size", "verdict"), [(2, INCONCLUSIVE), (5, INCONCLUSIVE), (6, REGRESSION)]
)
def test_a_few_samples_may_all_lose_by_chance(size: int, verdict: GateVerdict) -> None:
    """Losses of the same size have an interval without a width."""
    before = replace(possible_run(0, size=size)["mepic"], scores=(1.0,) * size)
    saved = save([{"mepic": before}], Thresholds(score={"margin": 0.02}))
    (found_check,) = check({"mepic": replace(before, scores=(0.5,) * size)}, saved)
    assert found_check.verdict is verdict


def linked(arms: Arms) -> Arms:
    """The arms if all of their requests share documents."""
    return {n: replace(arm, clusters=("d",) * len(arm.samples)) for n, arm in arms.items()}


def with_scores(arms: Arms, change: Callable[[int, float], float]) -> Arms:
    arm = arms["mepic"]
    scores = tuple(change(n, score or 0.0) for n, score in enumerate(arm.scores))
    return {**arms, "mepic": replace(arm, scores=scores)}


@pytest.mark.parametrize(
    ("change", "metrics"),
    [
        (lambda arms: with_scores(arms, lambda n, score: 0.0), ["score"]),
        (lambda arms: with_scores(arms, lambda n, score: score / 2), ["score"]),
        (lambda arms: with_scores(arms, lambda n, score: score * (n % 5 > 0)), ["score"]),
        (lambda arms: slowed(arms, 1.8, "mepic"), ["ttft_vs_full", "tpot_vs_full"]),
        (lambda arms: with_one_less(arms, "reused_tokens", 16), ["reused_tokens"]),
        (lambda arms: with_scores(arms, lambda n, score: 1.0), []),
    ],
)
def test_a_loss_is_caught_whatever_documents_requests_share(
    change: Callable[[Arms], Arms], metrics: list[str]
) -> None:
    arms = linked(possible_run(1000))
    checks = check(change(arms), save([arms]))
    assert sorted(found(checks, REGRESSION)) == sorted(("mepic", metric) for metric in metrics)
    assert found(checks, INCONCLUSIVE) == []


def test_two_seeds_of_the_same_code_rarely_alarm() -> None:
    """Of 200 pairs of runs, in which a fifth of all answers come out by chance."""
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        sure = rng.random(48) < 0.7
        first, second = (
            make_arm("mepic", np.where(rng.random(48) < 0.2, rng.random(48) < 0.5, sure).tolist())
            for _ in range(2)
        )
        saved = save([linked({"mepic": first})], Thresholds(score={"margin": 0.01}))
        alarms += bool(found(check({"mepic": second}, saved), REGRESSION))
    assert alarms <= 10


@pytest.mark.parametrize(
    ("outputs", "times", "verdict"),
    [(None, True, OK), ("exact", True, REGRESSION), ("exact", False, INCONCLUSIVE)],
)
def test_other_answers_at_an_equal_score_are_named(
    outputs: Literal["exact"] | None, times: bool, verdict: GateVerdict
) -> None:
    """The same answers are the same on any machine, and those that are missing are not."""
    arms = possible_run(0)
    saved = save([arms], Thresholds(outputs=outputs))
    new = replace(arms["mepic"], outputs=("other", *arms["mepic"].outputs[1:]))
    (told,) = (c for c in check({**arms, "mepic": new}, saved, times=times) if c.after)
    assert (told.arm, told.metric, told.verdict) == ("mepic", "outputs", verdict)
    assert "1 of them at an equal score: s0" in told.message
    asked = [c for c in check(arms, saved, times=times) if c.metric == "outputs"]
    assert [c.verdict for c in asked] == [OK] * (2 if outputs else 0)
    fewer = check({**arms, "mepic": arms["mepic"].of_rows(range(599))}, saved, times=times)
    assert [c.metric for c in fewer if c.fails] == ["samples"] * (verdict is REGRESSION)


@pytest.mark.parametrize(
    ("factor", "drift", "noise", "verdict"),
    [
        # t(0.005, 3 degrees) * 0.06455: of four batches, as one run tells no drift.
        (1.0, 0.0, 1.458, INCONCLUSIVE),
        (1.2, 0.0, 1.458, REGRESSION),
        # The variance is 0.004167 + 0.0004 * 4 / 3, which has 3.73 degrees of freedom (Welch).
        (1.0, 0.02, 1.394, INCONCLUSIVE),
        (1.1, 0.02, 1.394, REGRESSION),
        (0.8, 0.02, 1.394, OK),
    ],
)
def test_the_noise_of_a_time_by_hand(
    factor: float, drift: float, noise: float, verdict: GateVerdict
) -> None:
    """Sixteen rounds make four batches, which are 10, 20, 30 and 40 % slower in logarithms."""
    before = possible_run(0, size=16)["mepic"]
    before = replace(before, times={"ttft_ms": (100.0,) * 16, "e2e_ms": (100.0,) * 16})
    slower = tuple(100.0 * factor * float(np.exp(0.1 * (1 + n // 4))) for n in range(16))
    runs = 3 if drift else 1
    limit = {"ratio": 1.05}
    saved = save([{"mepic": before}] * runs, Thresholds(ttft_ms=limit, e2e_ms=limit))
    known = replace(saved.arms["mepic"], drift={"ttft_ms": drift} if drift else {})
    saved = saved.model_copy(update={"arms": {"mepic": known}})
    after = replace(before, times={"ttft_ms": slower, "e2e_ms": (100.0,) * 16})
    ttft, e2e = check({"mepic": after}, saved)
    assert (ttft.metric, e2e.metric) == ("ttft_ms", "e2e_ms")
    # The mean is 25 % in logarithms: 1.284.
    assert ttft.message == f"{1.2840254 * factor:.3f}x, limit 1.05x, noise up to {noise:.3f}x"
    assert ttft.verdict is verdict
    assert e2e.message == "1.000x, limit 1.05x, noise up to 1.000x"


def test_noise_that_explains_everything_has_no_number() -> None:
    """Between two runs t has one degree of freedom: any drift reaches beyond all measure."""
    before = replace(possible_run(0, size=16)["mepic"], times={"ttft_ms": (100.0,) * 16})
    saved = save([{"mepic": before}] * 2, Thresholds(ttft_ms={"ratio": 1.05}))
    known = replace(saved.arms["mepic"], drift={"ttft_ms": 0.5})
    saved = saved.model_copy(update={"arms": {"mepic": known}})
    [ttft] = check({"mepic": replace(before, times={"ttft_ms": (120.0,) * 16})}, saved)
    assert ttft.message == "1.200x, limit 1.05x, noise up to any factor"
    assert ttft.verdict is INCONCLUSIVE


@pytest.mark.parametrize(
    ("counter", "amount"),
    [("computed_tokens", 16), ("padded_slots", 16), ("copied_blocks", 1), ("chunk_blocks", -1)],
)
def test_one_more_block_a_request_is_caught(baseline: Baseline, counter: str, amount: int) -> None:
    checks = check(with_more(possible_run(0), counter, amount), baseline)
    assert found(checks, REGRESSION) == [("mepic", counter)]
    message = next(c.message for c in checks if c.verdict is REGRESSION)
    assert "other in 600 of 600 samples" in message


def test_one_more_block_in_one_request_is_caught(baseline: Baseline) -> None:
    arms = possible_run(0)
    values = arms["mepic"].counters["computed_tokens"]
    counters = {**arms["mepic"].counters, "computed_tokens": (values[0] + 16, *values[1:])}
    checks = check({**arms, "mepic": replace(arms["mepic"], counters=counters)}, baseline)
    assert found(checks, REGRESSION) == [("mepic", "computed_tokens")]


def test_a_count_that_is_no_longer_given_is_inconclusive(baseline: Baseline) -> None:
    arms = possible_run(0)
    counters = {k: v for k, v in arms["mepic"].counters.items() if k != "computed_tokens"}
    checks = check({**arms, "mepic": replace(arms["mepic"], counters=counters)}, baseline)
    assert found(checks, INCONCLUSIVE) == [("mepic", "computed_tokens")]
    [lost] = [c for c in checks if c.verdict is INCONCLUSIVE]
    assert (lost.after, lost.before > 0) == (None, True)


def test_times_that_are_no_longer_measured_are_inconclusive(baseline: Baseline) -> None:
    arms = possible_run(0)
    untimed = dict.fromkeys(arms["mepic"].times, (None,) * 600)
    checks = check({**arms, "mepic": replace(arms["mepic"], times=untimed)}, baseline)
    times = ("ttft_ms", "tpot_ms", "ttft_vs_full", "tpot_vs_full")
    assert found(checks, INCONCLUSIVE) == [("mepic", time) for time in times]


def test_times_of_some_samples_that_are_missing_are_inconclusive(baseline: Baseline) -> None:
    """Those that are left may be the fast ones."""
    arms = possible_run(0)
    mepic = arms["mepic"]
    fewer = {name: (None, *times[1:]) for name, times in mepic.times.items()}
    checks = check({**arms, "mepic": replace(mepic, times=fewer)}, baseline)
    lacking = [c for c in checks if c.message.startswith("measured of")]
    assert {c.metric for c in lacking} == {"ttft_ms", "tpot_ms", "ttft_vs_full", "tpot_vs_full"}
    assert {c.message for c in lacking} == {"measured of 600 before, of 599 of these now"}
    assert {c.verdict for c in lacking} == {INCONCLUSIVE}
    # Another reply may have but one token.
    other = replace(mepic, times=fewer, outputs=("another", *mepic.outputs[1:]))
    checks = check({**arms, "mepic": other}, baseline)
    lacking = [c for c in checks if c.message.startswith("measured of")]
    assert {c.metric for c in lacking} == {"ttft_ms", "ttft_vs_full"}


def test_samples_that_are_not_answered_do_not_pass() -> None:
    """Whatever else is checked: here nothing is that a smaller run could fail."""
    saved = save([possible_run(1000)], Thresholds(score={"margin": 0.02}))
    checks = check(possible_run(1000, size=590), saved)
    assert found(checks, INCONCLUSIVE) == [("full", "samples"), ("mepic", "samples")]
    assert checks[0].message == "600 in the baseline, 590 of them answered now"
    assert check(possible_run(1000, size=610), saved) == check(possible_run(1000), saved)


@pytest.mark.parametrize(
    ("answered", "fails"), [(599, False), (588, False), (587, True), (1, True), (0, True)]
)
def test_answers_that_are_missing_may_have_lost_their_score(answered: int, fails: bool) -> None:
    """Of 600, each with a score of 1, a margin of 0.02 leaves 12."""
    arm = make_arm("mepic", [1.0] * 600)
    saved = save([{"mepic": arm}], Thresholds(score={"margin": 0.02}))
    [told] = [c for c in check({"mepic": arm.of_rows(range(answered))}, saved) if c.verdict != OK]
    assert (told.metric, told.verdict, told.fails) == ("samples", INCONCLUSIVE, fails)
    assert ("if all others score 0, margin 0.02" in told.message) is fails


def test_an_arm_that_answered_nothing_is_checked_like_any() -> None:
    """Its failures are counted, and those of its counts that come with answers are not there."""
    arms = possible_run(0)
    gone = replace(arms["mepic"].of_rows([]), totals={"failed": 600})
    checks = check({**arms, "mepic": gone}, save([arms]))
    assert found(checks, REGRESSION) == [("mepic", "failed")]
    assert ("mepic", "samples") in [(c.arm, c.metric) for c in checks if c.fails]
    assert {arm for arm, _ in found(checks, INCONCLUSIVE)} == {"mepic"}
    assert ("full", "score") in found(checks, OK)


def test_a_higher_peak_of_blocks_is_caught(baseline: Baseline) -> None:
    arms = possible_run(0)
    totals = {**arms["mepic"].totals, "peak_blocks": arms["mepic"].totals["peak_blocks"] + 1}
    checks = check({**arms, "mepic": replace(arms["mepic"], totals=totals)}, baseline)
    assert found(checks, REGRESSION) == [("mepic", "peak_blocks")]


def test_a_tolerance_is_relative() -> None:
    thresholds = Thresholds(counters={"computed_tokens": 0.05})
    saved = save([possible_run(1000)], thresholds)
    mean = sum(possible_run(0)["mepic"].counters["computed_tokens"]) / 600
    caught = [("mepic", "computed_tokens")]
    for share, expected in ((0.04, []), (0.06, caught), (-0.04, []), (-0.06, caught)):
        checks = check(with_more(possible_run(0), "computed_tokens", int(share * mean)), saved)
        assert found(checks, REGRESSION) == expected


def test_other_hardware_leaves_times_open(baseline: Baseline) -> None:
    checks = check(slowed(possible_run(0), 1.2, "mepic"), baseline, times=False)
    assert found(checks, REGRESSION) == []
    assert ("mepic", "ttft_vs_full") in found(checks, INCONCLUSIVE)
    faster = check(slowed(possible_run(0), 0.5, "full", "mepic"), baseline, times=False)
    assert {c.verdict for c in faster if c.metric in TIME_METRICS} == {INCONCLUSIVE}


def test_arms_of_an_open_loop_drift_apart_which_one_run_does_not_tell(baseline: Baseline) -> None:
    conditions = Conditions(workload={"workload.arrivals": {"requests": 9}}, hardware={})
    run = slowed(possible_run(0), 1.2, "mepic")
    assert ("mepic", "ttft_vs_full") in found(check(run, baseline), REGRESSION)
    apart = check(run, baseline.model_copy(update={"conditions": conditions}))
    assert found(apart, REGRESSION) == []
    assert ("mepic", "ttft_vs_full") in found(apart, INCONCLUSIVE)
    several = save([possible_run(n, drift=0.01) for n in (1000, 1001, 1002)])
    known = check(run, several.model_copy(update={"conditions": conditions}))
    assert ("mepic", "ttft_vs_full") in found(known, REGRESSION)


def test_only_what_has_a_threshold_is_checked() -> None:
    thresholds = Thresholds(score={"margin": 0.02}, e2e_ms={"ratio": 1.5}, counters={"failed": 0})
    checks = check(possible_run(0), save([possible_run(1000)], thresholds))
    assert {c.metric for c in checks} == {"score", "e2e_ms", "failed"}


def test_replies_without_a_score_count_as_lost() -> None:
    arms = possible_run(0)
    scores = (*[None] * 30, *arms["mepic"].scores[30:])
    checks = check(
        {**arms, "mepic": replace(arms["mepic"], scores=scores)}, save([possible_run(1)])
    )
    assert found(checks, REGRESSION) == [("mepic", "score, unparsed as 0")]


@pytest.mark.parametrize(
    ("factors", "verdict"),
    [((1.0, 1.3), INCONCLUSIVE), ((1.11, 1.17), INCONCLUSIVE), ((1.14, 1.141), REGRESSION)],
)
def test_a_slowdown_in_one_repeat_of_an_open_loop_is_chance(
    factors: tuple[float, float], verdict: GateVerdict
) -> None:
    """14 % in the mean each time. Each arm has the machine for itself, in each repeat anew."""
    arm = repeated(make_arm("mepic", scores=[1.0] * 100, size=100), 2)
    baseline = save([{"full": replace(arm, name="full"), "mepic": arm}])
    run = {"full": noisy(replace(arm, name="full"), 1, noise=0.01), "mepic": noisy(arm, 2, 0.01)}
    slow = tuple(
        None if time is None else time * factors[repeat]
        for time, repeat in zip(run["mepic"].times["ttft_ms"], arm.repeats, strict=True)
    )
    run["mepic"] = replace(arm, times={**run["mepic"].times, "ttft_ms": slow})
    checks = check(run, baseline)
    found_of = {(c.arm, c.metric): c.verdict for c in checks}
    assert found_of["mepic", "ttft_vs_full"] is verdict


def with_rate(arms: Arms, name: str, rate: float) -> Arms:
    return {key: replace(arm, totals={**arm.totals, name: rate}) for key, arm in arms.items()}


@pytest.mark.parametrize(
    ("saved", "now", "verdict"),
    [
        ((100.0,), 96.0, OK),
        ((100.0,), 80.0, INCONCLUSIVE),
        ((100.0, 101.0, 99.0, 100.0), 80.0, REGRESSION),
        ((50.0, 150.0, 100.0, 100.0), 80.0, INCONCLUSIVE),
        ((100.0,), None, INCONCLUSIVE),
    ],
)
def test_a_rate_that_falls_more_than_runs_drift_is_caught(
    saved: tuple[float, ...], now: float | None, verdict: GateVerdict
) -> None:
    """Of one run nothing tells how rates drift, and a loss is never more than inconclusive."""
    for name in RATES:
        arm = {"mepic": possible_run(0, size=16)["mepic"]}
        limit = Thresholds.model_validate({name: {"loss": 0.05}})
        known = save([with_rate(arm, name, rate) for rate in saved], limit)
        [checked] = check(arm if now is None else with_rate(arm, name, now), known)
        assert (checked.metric, checked.verdict) == (name, verdict)
        assert checked.fails is (verdict is not OK)


def test_thresholds_are_those_of_the_list_of_metrics() -> None:
    paired = {metric.name for metric in metrics_paired(Pairing.RATIO, Pairing.WHOLE)}
    assert {*Thresholds.model_fields} == {"score", "outputs", "counters", *paired}
