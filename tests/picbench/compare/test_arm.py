"""One arm in columns, and one against another."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from harness_fakes import REFUSED, Harness, make_sample
from measured_arms import known, make_arm, noisy, repeated

from picbench.cli import main
from picbench.compare.arm import (
    COUNTERS,
    SCORE,
    SCORE_OF_ALL,
    TIMES,
    Drift,
    MeasuredArm,
    compare_arms,
    measured_arms,
)
from picbench.errors import IncomparableRuns
from picbench.statistics.significance import Loss
from picbench.store.reader import read_run
from picbench.store.writer import SAMPLES, SUMMARY, WORKLOAD


def arms_of(harness: Harness, output: Path, *more: str) -> dict[str, MeasuredArm]:
    flags = ("--dataset", "fake", "--data", "d", "--output", str(output), "--algo", "full,mepic")
    CliRunner().invoke(main, ("run", "--only", *flags, *more), obj=harness.services())
    return measured_arms(read_run(output))


def test_columns_have_a_value_for_each_answer(tmp_path: Path) -> None:
    arms = arms_of(Harness([make_sample(n) for n in range(3)]), tmp_path / "run")
    assert list(arms) == ["full", "mepic"]
    arm = arms["mepic"]
    assert arm.samples == ("s0", "s1", "s2")
    assert arm.times["ttft_ms"] == pytest.approx((100,) * 3)
    assert arm.counters["computed_tokens"] == (36 - 16 - 4,) * 3
    assert arm.counters["chunk_blocks"] == (1,) * 3
    assert arm.scores == (1.0,) * 3
    assert arm.totals["peak_blocks"] == 20
    assert arm.totals["failed"] == 0
    assert len(set(arm.prompts)) == 3
    assert len(set(arm.outputs)) == 1
    assert set(COUNTERS) - {*arm.counters} == {"text_chunks"}, "no arm here chooses"
    columns = [*(arm.times[name] for name in TIMES), *arm.counters.values()]
    assert {len(column) for column in columns} == {3}


def test_documents_are_read_where_they_link_all_requests(tmp_path: Path) -> None:
    """Here each request also has the next one's chunk; alone, each has one of its own."""
    apart = [make_sample(n) for n in range(3)]
    chunks = [sample.segments[1] for sample in apart]
    texts = [(*s.segments, chunks[(n + 1) % 3]) for n, s in enumerate(apart)]
    linked = [replace(s, segments=text) for s, text in zip(apart, texts, strict=True)]
    assert arms_of(Harness(apart), tmp_path / "apart")["full"].documents == ()
    found = arms_of(Harness(linked), tmp_path / "linked")["full"]
    assert [len(own) for own in found.documents] == [3, 3, 3]
    assert len(frozenset.union(*found.documents)) == 4
    (tmp_path / "linked" / WORKLOAD).unlink()
    assert measured_arms(read_run(tmp_path / "linked"))["full"].documents == ()


def test_failed_requests_are_counted_and_have_no_values(tmp_path: Path) -> None:
    samples = [make_sample(0), make_sample(1, first=REFUSED), make_sample(2)]
    arm = arms_of(Harness(samples), tmp_path / "run")["full"]
    assert arm.samples == ("s0", "s2")
    assert arm.totals["failed"] == 1
    assert arm.times["ttft_ms"] == (None, None), "they ran apart from their group"


def test_repeated_samples_keep_apart(tmp_path: Path) -> None:
    arm = arms_of(Harness([make_sample(0), make_sample(0)]), tmp_path / "run")["full"]
    assert arm.samples == ("s0", "s0+1")
    assert arm.clusters[0] == arm.clusters[1]


def test_repeats_are_numbered_by_themselves_and_not_by_what_was_answered(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = arms_of(Harness([make_sample(0), make_sample(1)]), run, "--repeats", "2")["full"]
    assert whole.samples == ("s0", "s1", "s0#2", "s1#2")
    assert (whole.rounds, whole.places) == ((0, 0, 0, 0), (0, 1, 0, 1))
    assert whole.repeats == (0, 0, 1, 1)
    rows = [json.loads(line) for line in (run / SAMPLES).read_text().splitlines()]
    failed = next(r for r in rows if (r["arm"], r["sample"], r["repeat"]) == ("full", "s0", 0))
    answered, failed["error"] = dict(failed), "lost"
    write_rows(run, rows)
    arm = measured_arms(read_run(run))["full"]
    assert arm.samples == ("s1", "s0#2", "s1#2")
    assert (arm.rounds, arm.places, arm.repeats) == ((0, 0, 0), (1, 0, 1), (0, 1, 1))
    assert arm.totals["failed"] == 1
    write_rows(run, [*rows, answered])
    summary = json.loads((run / SUMMARY).read_text())
    summary["arms"]["full"]["requests"] += 1
    (run / SUMMARY).write_text(json.dumps(summary))
    arm = measured_arms(read_run(run))["full"]
    assert sorted(arm.samples) == sorted(whole.samples)
    assert arm.totals["failed"] == 0


def write_rows(run: Path, rows: list[dict[str, Any]]) -> None:
    (run / SAMPLES).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_samples_are_paired_by_name_in_any_order() -> None:
    before = make_arm(scores=[1.0, 0.0, 0.5])
    order = (2, 0, 1)
    after = replace(
        before,
        **{  # type: ignore[arg-type]
            name: tuple(getattr(before, name)[i] for i in order)
            for name in ("samples", "clusters", "rounds", "prompts", "outputs", "scores")
        },
    )
    found = compare_arms(before, after)
    assert found.pairs == 3
    assert found.flips == ()
    assert found.repeatability.differing == 0


def test_samples_without_a_partner_are_left_out() -> None:
    found = compare_arms(make_arm(scores=[1.0] * 5), make_arm(scores=[1.0] * 3))
    assert (found.pairs, found.unpaired) == (3, 2)


def test_nothing_in_common_cannot_be_compared() -> None:
    other = replace(make_arm(), samples=tuple(f"t{n}" for n in range(20)))
    with pytest.raises(IncomparableRuns, match="no answered sample"):
        compare_arms(make_arm(), other)


def test_of_an_arm_that_answered_nothing_totals_are_compared() -> None:
    gone = replace(make_arm().of_rows([]), totals={"failed": 20})
    found = compare_arms(make_arm(), gone, apart=True)
    assert (found.pairs, found.unpaired, found.metrics) == (0, 20, ())
    assert [(c.name, c.before, c.after) for c in found.counters] == [("failed", 0, 20)]


def test_other_prompts_are_refused_unless_that_is_allowed() -> None:
    other = replace(make_arm(), prompts=("x", *make_arm().prompts[1:]))
    with pytest.raises(IncomparableRuns, match="1 of 20 samples have other prompts"):
        compare_arms(make_arm(), other)
    assert compare_arms(make_arm(), other, allow_mismatch=True).pairs == 20


def test_unparsed_replies_count_both_ways() -> None:
    """A mean over parsed replies alone would hide that the second arm stopped answering."""
    before, after = make_arm(scores=[1.0] * 20), make_arm(scores=[1.0] * 15 + [None] * 5)
    found = compare_arms(before, after)
    complete, every = known(found.metric(SCORE)), known(found.metric(SCORE_OF_ALL))
    assert (complete.change.pairs, complete.change.value) == (15, 0.0)
    assert (every.change.pairs, every.change.value) == (20, -0.25)
    assert [(flip.before, flip.after) for flip in found.flips] == [(1.0, None)] * 5


def test_scores_that_all_have_are_compared_once() -> None:
    found = compare_arms(make_arm(), make_arm())
    assert found.metric(SCORE_OF_ALL) is None


def test_runs_without_right_answers_have_no_score() -> None:
    unscored = make_arm(scores=[None] * 5)
    assert compare_arms(unscored, unscored).metric(SCORE) is None


def test_samples_that_share_documents_count_as_one() -> None:
    before, after = make_arm(scores=[1.0] * 24), make_arm(scores=[0.0] * 6 + [1.0] * 18)
    alone = compare_arms(before, after).metric(SCORE)
    shared = replace(before, clusters=tuple(f"d{n // 6}" for n in range(24)))
    together = compare_arms(shared, after).metric(SCORE)
    assert alone is not None
    assert together is not None
    assert together.change.clusters == 4
    assert known(alone.change.p_others) < 0.05 < known(together.change.p_others)
    assert together.p == alone.p, "on the same requests"


def test_a_margin_is_judged() -> None:
    before = make_arm(scores=[1.0] * 100)
    same = compare_arms(before, before, margin=0.03).metric(SCORE)
    worse = compare_arms(before, make_arm(scores=[0.0] * 2 + [1.0] * 98), margin=0.03).metric(SCORE)
    assert same is not None
    assert worse is not None
    assert same.loss is Loss.WITHIN
    assert worse.loss is Loss.UNKNOWN
    assert worse.needed is not None
    assert worse.needed > 100


def test_times_are_ratios_over_rounds() -> None:
    before = make_arm(scores=[1.0] * 64, size=16)
    found = known(compare_arms(before, noisy(before, 1, factor=1.2)).metric("ttft_ms"))
    assert found.change.clusters == 4
    assert found.change.value == pytest.approx(1.2, rel=0.05)
    assert found.losses > 60 > found.wins


def test_more_is_better_of_scores_and_less_of_times() -> None:
    before = make_arm(scores=[0.0, 1.0, 1.0, 0.5], ttft=[10.0, 10.0, 10.0, 10.0])
    after = make_arm(scores=[1.0, 0.0, 0.5, 0.5], ttft=[5.0, 20.0, 9.0, 8.0])
    found = compare_arms(before, after)
    score, time = known(found.metric(SCORE)), known(found.metric("ttft_ms"))
    assert (score.wins, score.losses, score.change.equal) == (1, 2, 1)
    assert (time.wins, time.losses, time.change.equal) == (3, 1, 0)
    assert (score.before, score.after) == (0.625, 0.5)
    # The fourth root of 5 * 20 * 9 * 8.
    assert (time.before, time.after) == (pytest.approx(10.0), pytest.approx(9.2116, abs=1e-4))


def test_an_open_loop_has_batches_of_neighbours_for_rounds() -> None:
    before = make_arm(scores=[1.0] * 100, size=100)
    found = known(compare_arms(before, noisy(before, 1)).metric("ttft_ms"))
    assert found.change.clusters == 10


def test_repeats_of_an_open_loop_are_not_its_only_clusters() -> None:
    """Two repeats as clusters gave errors ten times as large as each repeat alone."""
    once = make_arm(scores=[1.0] * 100, size=100)
    before, after = repeated(once, 2), noisy(repeated(noisy(once, 1), 2), 2, noise=0.01)
    found = compare_arms(before, after).metric("ttft_ms")
    alone = compare_arms(once, noisy(once, 1)).metric("ttft_ms")
    assert found is not None
    assert alone is not None
    assert found.change.pairs == 200
    assert found.change.clusters == alone.change.clusters == 10
    assert found.change.standard_error == pytest.approx(alone.change.standard_error, rel=0.2)


def test_rounds_of_repeats_are_the_same_requests() -> None:
    """Ratios differ from request to request more than from repeat to repeat.

    Of 50 comparisons of three repeats at most 7 miss the truth: 5 %, luck, and few clusters. With a
    cluster for every round of every repeat every third one does.
    """
    arm = make_arm(scores=[1.0] * 32)
    missed = 0
    for seed in range(50):
        after = noisy(repeated(noisy(arm, 2 * seed, noise=0.2), 3), 2 * seed + 1, noise=0.05)
        found = known(compare_arms(repeated(arm, 3), after, seed=seed).metric("ttft_ms"))
        assert found.change.interval is not None
        missed += 1.0 not in found.change.interval
    assert missed <= 7


def drifting(arm: MeasuredArm, seed: int, size: float) -> MeasuredArm:
    """The arm on a machine whose speed differs by `size` from repeat to repeat."""
    state = np.exp(np.random.default_rng(seed).normal(0, size, max(arm.repeats) + 1))
    times = {
        name: tuple(
            None if value is None else value * float(state[repeat])
            for value, repeat in zip(values, arm.repeats, strict=True)
        )
        for name, values in arm.times.items()
    }
    return replace(arm, times=times)


def test_drift_between_the_arms_of_an_open_loop_is_in_the_interval_with_repeats() -> None:
    """Of 100 comparisons of an arm with itself at most 11 find a difference: 5 %, and luck.

    Each arm has the machine for itself in each of three repeats, and it differs by 7 %. Of one
    repeat, whose interval has none of that, four in five find one.
    """
    arm = make_arm(scores=[1.0] * 49, size=49)
    missed = alone = 0
    for seed in range(100):
        three = [drifting(noisy(repeated(arm, 3), n), n, 0.07) for n in (2 * seed, 2 * seed + 1)]
        one = [drifting(noisy(arm, n), n, 0.07) for n in (2 * seed, 2 * seed + 1)]
        found = compare_arms(*three, seed=seed).metric("ttft_ms")
        single = compare_arms(*one, seed=seed).metric("ttft_ms")
        assert found is not None
        assert single is not None
        assert (found.drift, single.drift) == (Drift.REPEATS, Drift.UNSEEN)
        assert found.change.interval is not None
        assert single.change.interval is not None
        missed += 1.0 not in found.change.interval
        alone += 1.0 not in single.change.interval
    assert missed <= 11
    assert alone >= 70


def test_drift_of_a_closed_loop_hits_both_arms() -> None:
    """They take turns: what both are slowed down by in a repeat widens nothing."""
    arm = make_arm(scores=[1.0] * 32)
    first, second = noisy(repeated(arm, 3), 1), noisy(repeated(arm, 3), 2)
    calm = compare_arms(first, second).metric("ttft_ms")
    found = compare_arms(drifting(first, 3, 0.1), drifting(second, 3, 0.1)).metric("ttft_ms")
    assert calm is not None
    assert found is not None
    assert found.drift is Drift.ALIKE
    assert (found.change.repeats, found.change.clusters) == (1, 32)
    assert found.change.standard_error == pytest.approx(calm.change.standard_error)


@pytest.mark.parametrize("repeats", [1, 3])
def test_no_repeat_tells_how_runs_apart_drift(repeats: int) -> None:
    """Repeats of a run are minutes apart, runs may be days; scores and ratios do not mind."""
    arm = repeated(make_arm(scores=[1.0] * 32), repeats)
    before = replace(arm, times={**arm.times, "ttft_vs_full": arm.times["ttft_ms"]})
    found = compare_arms(before, noisy(before, 1), apart=True)
    drift = {metric.name: metric.drift for metric in found.metrics}
    assert drift["ttft_ms"] is drift["tpot_ms"] is Drift.UNSEEN
    assert drift["score"] is drift["ttft_vs_full"] is Drift.ALIKE


def test_quantiles_of_repeats_are_over_these_too() -> None:
    """One machine in three states: 300 requests, of which none is from a fourth one."""
    once = noisy(make_arm(scores=[1.0] * 100), 1, noise=0.3)
    before = drifting(repeated(once, 3), 5, 0.1)
    found, alone = compare_arms(before, before).quantiles[0].before, compare_arms(once, once)
    assert (found.count, found.repeats) == (300, 3)
    single = alone.quantiles[0].before
    assert found.interval is not None
    assert single.interval is not None
    assert single.repeats == 1
    wide, narrow = (i.high - i.low for i in (found.interval, single.interval))
    assert wide > 1.3 * narrow


def test_untimed_requests_have_no_ratio() -> None:
    times = [None, *[50.0] * 19]
    found = known(compare_arms(make_arm(ttft=times), make_arm()).metric("ttft_ms"))
    assert found.change.pairs == 19


def test_quantiles_have_intervals_and_none_from_too_few() -> None:
    times = [float(n) for n in range(1, 41)]
    found = compare_arms(make_arm(scores=[1.0] * 40, ttft=times), make_arm(scores=[1.0] * 40))
    median, p90, p99 = found.quantiles
    assert median.before.value == 20.5
    assert median.before.interval is not None
    assert 10 < median.before.interval.low < 20 < median.before.interval.high < 31
    assert p90.after.value == 50.0
    assert (p99.before.value, p99.before.needed) == (None, 100)


def test_counts_are_compared_sample_by_sample() -> None:
    """Sums that agree by chance are not the same counts."""
    before = make_arm()
    counters = {**before.counters, "computed_tokens": (99, 101, *(100,) * 18)}
    found = known(
        compare_arms(before, replace(before, counters=counters)).counter("computed_tokens")
    )
    assert found.before == found.after
    assert found.samples == 2
    assert not found.same


def test_other_tokens_are_counted() -> None:
    before = make_arm()
    found = compare_arms(before, replace(before, outputs=("x", *before.outputs[1:])))
    assert found.repeatability.differing == 1


def test_an_arm_rarely_differs_from_itself() -> None:
    """Of 100 repetitions of 64 requests at most 8 have a ratio with p <= 0.05: 5 % and luck."""
    arm = make_arm(scores=[1.0] * 64, size=8)
    alarms = 0
    for seed in range(100):
        first, second = noisy(arm, 2 * seed), noisy(arm, 2 * seed + 1)
        found = known(compare_arms(first, second, seed=seed).metric("ttft_ms"))
        alarms += found.p <= 0.05
    assert alarms <= 8
    assert np.isfinite(found.p)


def test_runs_apart_have_larger_batches() -> None:
    """What slows a machine down lasts longer than a round; ratios within a run do not see it."""
    arm = make_arm(scores=[1.0] * 100)
    before = replace(arm, times={**arm.times, "ttft_vs_full": arm.times["ttft_ms"]})
    found = compare_arms(before, noisy(before, 1), apart=True)
    clusters = {metric.name: metric.change.clusters for metric in found.metrics}
    assert clusters["ttft_ms"] == 10
    assert clusters["ttft_vs_full"] == 100
    assert clusters["score"] == 100


def test_drift_within_a_run_is_no_difference() -> None:
    """The second run is slow for a while: 100 requests that say the same thing are not 100."""
    arm = make_arm(scores=[1.0] * 100)
    slow = tuple(50.0 * (1.3 if n < 50 else 0.9) for n in range(100))
    after = replace(arm, times={**arm.times, "ttft_ms": slow})
    alike, apart = map(
        known, (compare_arms(arm, after, apart=a).metric("ttft_ms") for a in (False, True))
    )
    assert apart.change.standard_error > 2 * alike.change.standard_error


def test_rates_of_arms_stand_beside_each_other() -> None:
    """One arm was not given objectives, and has no goodput."""
    before = replace(make_arm(), totals={"throughput_tok_s": 100.0, "goodput_req_s": 2.0})
    after = replace(make_arm(), totals={"throughput_tok_s": 150.0})
    (rate,) = compare_arms(before, after).rates
    assert (rate.name, rate.before, rate.after) == ("throughput_tok_s", 100.0, 150.0)
