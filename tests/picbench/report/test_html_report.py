"""The page about runs of fake engines: what it says, and that it needs nothing else."""

import base64
import hashlib
import json
import tomllib
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import patch

import pytest
from harness_fakes import REFUSED, FakeEngine, Harness, PicEngine, make_sample, run_fakes
from hypothesis import given
from hypothesis import strategies as st
from measured_arms import known

from picbench.engines.request import Request, Result
from picbench.errors import ConfigError, InvalidRun
from picbench.report.contents import read_contents
from picbench.report.page import frontier, report_page, write_report
from picbench.report.sections import browse_answers, decay_table
from picbench.store.reader import read_run
from picbench.workloads.sample import SampleSegment

ARMS = ("full", "naive", "mepic")
NASTY = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"
VOID = {"meta", "link", "img", "br", "input"}
FIGURES = [
    "Score against time to the first token",
    "Distribution of time to the first token",
    "KV blocks over time",
]


POINTS = st.dictionaries(
    st.text(max_size=3),
    st.tuples(st.sampled_from([1.0, 2.0, 3.0, 10.0]), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    max_size=8,
)


class WrongEngine(FakeEngine):
    """Answers with HTML that must not become part of a page."""

    def _answer(self, request: Request) -> Result:
        return replace(super()._answer(request), text=NASTY)


@dataclass
class Page(HTMLParser):
    """Tags with their attributes, texts of scripts and of figures, and all other text of a page."""

    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    text: str = ""
    labels: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @classmethod
    def of(cls, html: str) -> "Page":
        page = cls()
        page.feed(html)
        page.close()
        assert page.open == []
        return page

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] == ["text"]:
            self.labels.append(data)
        elif self.open[-1:] != ["style"]:
            self.text += data


def page_of(*runs: Path, drawn: bool = False) -> Page:
    """The page; without figures unless they are asked for, as drawing takes a second a run."""
    with nullcontext() if drawn else patch("picbench.figures.run.draw_run"):
        return Page.of(report_page(runs, 0.02))


def harness(count: int = 6, weights: str = "real") -> Harness:
    samples = []
    for number in range(count):
        sample = make_sample(number)
        nasty = replace(sample.segments[1], text=f"{number} {NASTY}")
        segments = (sample.segments[0], nasty, *sample.segments[2:-1])
        question = SampleSegment("text", f"who? {NASTY}", (3, 4))
        samples.append(replace(sample, segments=(*segments, question)))
    return Harness(samples, weights=weights, engines={"naive": WrongEngine("naive")})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_fakes(harness(), tmp_path / "run", *ARMS)


def test_what_models_and_rows_say_is_text(run: Path) -> None:
    page = page_of(run)
    assert page.text.count(NASTY) >= 6  # Replies.
    assert f"who? {NASTY}" in page.text
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in page.tags]
    passages = json.loads(page.scripts[0])
    assert f"3 {NASTY}" in passages.values()
    assert "alert" not in page.scripts[1]


def test_the_page_needs_no_network(run: Path) -> None:
    html = report_page([run], 0.02)
    page = Page.of(html)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    assert "http:" not in html
    assert "https:" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_no_other_script_may_run(run: Path) -> None:
    """Even if something escaped from its place, the browser would not run it."""
    page = page_of(run)
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_all_arms_are_in_all_parts(run: Path) -> None:
    contents = read_contents(read_run(run), 0.02)
    assert list(contents.arms) == list(ARMS)
    page = page_of(run, drawn=True)
    text = page.text
    assert [a["aria-label"] for t, a in page.tags if t == "svg"] == FIGURES
    for arm in ARMS:
        assert page.labels.count(arm) == 3, "a legend, or the name of a panel"
    assert "mepic against full: first token in 0.25x the time" in text
    assert "(n=6)" in text
    # 1 - 0.05 ** (1 / 6): six samples without a change do not rule out more.
    unseen = "n other documents: none differs, but a loss in 39% of samples may go unseen; about"
    assert f"0 lost, 0 won of 6 on these requests, exact p 1.000. O{unseen}" in text
    assert f"mepic: score o{unseen}" in text
    assert "loses less than" not in text
    assert "undecided" in text


def test_what_changed_most_is_browsed_as_far_as_there_is_room(run: Path) -> None:
    contents = read_contents(read_run(run), 0.02)
    browser = known(browse_answers(contents, 100_000))
    assert (browser.total, list(browser.arms)) == (6, ["naive"])
    first = browser.samples[0]
    assert (first.flipped, first.change, first.answers) == (["naive"], "naive -1.00", ["yes"])
    assert [row[0] for row in first.replies.rows] == ["full", "naive", "mepic"]
    assert all(len(sample.passages) == 2 for sample in browser.samples)
    # A passage of its own for each sample, and one that all share.
    assert len({key for sample in browser.samples for key in sample.passages}) == 7
    few = known(browse_answers(contents, 5_000))
    assert 0 < len(few.samples) < few.total == 6
    assert f"The {len(few.samples)} of 6 that changed most" in few.notes[0]


@pytest.mark.parametrize("arm", ["full", "mepic"])
def test_a_single_arm_has_no_comparison(tmp_path: Path, arm: str) -> None:
    text = page_of(run_fakes(harness(), tmp_path / "run", arm)).text
    assert "No comparison" in text
    assert "Paired comparison" not in text
    assert "TTFT p50" in text


def test_failed_requests_are_counted_and_quoted(tmp_path: Path) -> None:
    made = harness()
    made.samples = [*made.samples[:3], make_sample(9, first=REFUSED)]
    text = page_of(run_fakes(made, tmp_path / "run", *ARMS)).text
    assert "mepic: 1 of 4 requests failed, the first: " in text
    assert "a chunk is too long" in text
    assert "partial run" in text


@given(POINTS)
def test_the_frontier_is_what_no_other_beats(points: dict[str, tuple[float, float]]) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] >= other[1]

    kept = frontier(points)
    assert {*kept} == {
        arm for arm, own in points.items() if not any(beats(p, own) for p in points.values())
    }
    for axis in (0, 1):
        values = [points[arm][axis] for arm in kept]
        assert values == sorted(values)


def test_an_invalid_run_says_so_first(tmp_path: Path) -> None:
    made = replace(harness(), engines={"full": FakeEngine("mepic")})
    with suppress(InvalidRun):
        run_fakes(made, tmp_path / "run", *ARMS)
    text = page_of(tmp_path / "run").text
    assert "Invalid run" in text
    assert "came from a cache that must be off" in text
    assert "Its numbers mean nothing." in text


def test_a_run_that_ended_early_is_shown_as_far_as_it_got(run: Path) -> None:
    for name in ("summary.json", "memory.parquet", "workload.jsonl"):
        (run / name).unlink()
    text = page_of(run).text
    assert "The run has no summary.json" in text
    assert "TTFT p50" in text
    assert "KV blocks over time" not in text
    (run / "samples.jsonl").unlink()
    assert "No request was answered." in page_of(run).text


@pytest.mark.parametrize(
    ("name", "content", "error", "words"),
    [
        ("samples.jsonl", "", InvalidRun, "has 0 rows of"),
        ("summary.json", "{", ConfigError, r"summary\.json: cannot be read"),
    ],
)
def test_broken_files_are_an_error(
    run: Path, name: str, content: str, error: type[Exception], words: str
) -> None:
    (run / name).write_text(content)
    with pytest.raises(error, match=words):
        page_of(run)


def test_memory_stalls_and_few_requests_are_told(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    summary["arms"]["mepic"]["stalls"] = {"steps": 2, "allowed_s": 1.0, "longest_s": 7.5}
    (run / "summary.json").write_text(json.dumps(summary))
    text = page_of(run).text
    assert "KV peak GiB" in text
    assert "Memory of workers at the end, GiB" in text
    assert "0.010" in text  # The process of a fake engine: 10 MiB.
    assert "mepic: stalled in 2 steps, the longest of 7.5 s" in text
    assert "n < 100" in text
    assert "p99 is not given: it needs 100 timed requests, an arm has 6." in text


def test_numbers_that_mean_little_are_labelled_everywhere(tmp_path: Path) -> None:
    made = harness(weights="random")
    page = page_of(run_fakes(made, tmp_path / "run", *ARMS), drawn=True)
    labels = page.text.count("random weights: scores mean nothing")
    headings = [tag for tag, _ in page.tags].count("figure") + 4  # And four tables.
    browsed = 6
    assert labels == headings + browsed
    assert "Scores mean nothing here." in page.text


def test_a_reference_that_scores_nothing_tells_no_loss(tmp_path: Path) -> None:
    made = harness()
    made.engines |= {name: WrongEngine(name) for name in ("full", "mepic")}
    page = page_of(run_fakes(made, tmp_path / "run", *ARMS))
    assert "full scores 0 on all of them, so there is no score to lose." in page.text


def test_several_runs_have_an_overview(run: Path, tmp_path: Path) -> None:
    same = run_fakes(harness(), tmp_path / "same", *ARMS)
    other = run_fakes(harness(4), tmp_path / "other", *ARMS)
    page = page_of(run, same, other)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"overview", "run-1", "run-2", "run-3"} <= {*ids}
    assert "same against run" in page.text
    assert "other against run" in page.text
    assert page.text.count("Not compared: ") == 1
    # Passages of runs of one workload are in the page once.
    assert len(json.loads(page.scripts[0])) == 7


def test_a_declared_cache_is_said_and_a_steady_stream_has_its_decay(
    run: Path, tmp_path: Path
) -> None:
    assert "Cache: cold at start, kept between requests." in page_of(run).text
    engines = {name: PicEngine(name) for name in ("full", "mepic")}
    made = Harness([make_sample(number) for number in range(200)], engines=engines)
    steady = run_fakes(made, tmp_path / "steady", "full", "mepic", cache="steady")
    contents = read_contents(read_run(steady), 0.02)
    (found,) = decay_table(contents)
    assert [row[1] for row in found.rows] == [0, 40, 80, 120, 160] * 2
    assert found.texts()[-1][4] == "0.25x"
    text = page_of(steady).text
    assert "Cache steady: kept over a stream of different prompts; verified" in text
    assert "Decay over a steady stream" in text


def test_repeats_are_compared_with_the_same_repeat(tmp_path: Path) -> None:
    page = page_of(run_fakes(harness(), tmp_path / "run", *ARMS, repeats=2), drawn=True)
    assert "(n=12)" in page.text
    assert "12 samples have another score" in page.text
    assert "TTFT over full's" in page.labels


@pytest.mark.parametrize("broken", ["missing/report.html", "."])
def test_an_output_that_cannot_be_written_is_named(run: Path, tmp_path: Path, broken: str) -> None:
    with pytest.raises(ConfigError, match="`output`"):
        write_report([run], tmp_path / broken, 0.02)


def test_a_large_run_gives_a_page_of_limited_size(tmp_path: Path) -> None:
    """Long passages and replies, in more samples than are shown."""
    long = Harness(
        [
            replace(
                sample,
                segments=(
                    sample.segments[0],
                    replace(sample.segments[1], text=f"{sample.id} " + "word " * 20_000),
                    *sample.segments[2:],
                ),
            )
            for sample in map(make_sample, range(450))
        ],
        weights="real",
        engines={"naive": WrongEngine("naive")},
    )
    page = report_page([run_fakes(long, tmp_path / "run", *ARMS)], 0.02)
    assert len(page.encode()) < 5_000_000
    assert "of 450 that changed most" in page


def test_the_page_is_packaged() -> None:
    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    folder = root / "picbench" / "report"
    packaged = {f for glob in data["package-data"]["picbench.report"] for f in folder.glob(glob)}
    assert packaged == {*(folder / "templates").iterdir()}
    assert len(packaged) == 3


@pytest.mark.parametrize(
    ("repeats", "words", "p50"),
    [
        (1, "drift not included", "order statistics of the requests of one repeat"),
        (3, "over 3 repeats", "order statistics over requests, and Student's t over 3 repeats"),
    ],
)
def test_an_open_loop_says_beside_intervals_what_of_drift_is_in_them(
    tmp_path: Path, repeats: int, words: str, p50: str
) -> None:
    """In the verdict, in the table of arms, and in the comparison; not for arms that take turns."""
    made = replace(harness(10), arrivals=tuple(map(float, range(10))))
    text = page_of(run_fakes(made, tmp_path / "open", *ARMS, repeats=repeats)).text
    assert f"first token in 0.25x the time (0.25 to 0.25, {words})" in text
    assert f"0.25x (0.25 to 0.25, {words})" in text
    assert text.count(f"0.25 to 0.25, {words}") == 5, "two arms in two tables, and the verdict"
    assert f"with 95 % from {p50}" in text
    turns = run_fakes(harness(10), tmp_path / "turns", *ARMS, repeats=repeats, concurrency=1)
    assert f"0.25 to 0.25, {words}" not in page_of(turns).text
