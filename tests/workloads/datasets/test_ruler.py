"""RULER-like rows: what is asked for is in the context as planned."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets import Reading, find
from picbench.workloads.datasets.grid import Grid
from picbench.workloads.load import load_samples
from picbench.workloads.prompts.tokens import Tokenizer
from picbench.workloads.scoring import find_scorer, right_answers
from picbench.workloads.sources.row import DatasetRow
from picbench.workloads.sources.source import RowSource, locate

HIDDEN = ["ruler:multikey", "ruler:multiquery", "ruler:multivalue", "ruler:vt"]
TASKS = [*HIDDEN, "ruler:cwe"]
DATA = RowSource(Path("bundled"))
CODE = re.compile(r"The entry code of (the \w+ \w+) is (\d{7})\.")
LINK = re.compile(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.")

LENGTHS = st.integers(1_200, 6_000)
SEEDS = st.integers(0, 2**32 - 1)


def count_words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def rows(
    name: str, grid: Grid | None = None, *, seed: int = 0, room: int | None = None, limit: int = 4
) -> list[DatasetRow]:
    made = find(name).rows(DATA, Reading(count_words, seed, room, grid=grid))
    return list(islice(made, limit))


def wanted(row: DatasetRow) -> list[str]:
    [answer] = row.answers
    return answer.split(", ")


def holders(row: DatasetRow, text: str) -> list[int]:
    return [n for n, passage in enumerate(row.passages) if text in passage]


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=20, deadline=None)
@given(LENGTHS, SEEDS)
def test_the_seed_decides_and_lengths_are_those_asked_for(
    name: str, length: int, seed: int
) -> None:
    grid = Grid(length, length, 1, 3)
    made = rows(name, grid, seed=seed)
    assert made == rows(name, grid, seed=seed) != rows(name, grid, seed=seed + 1)
    assert len({row.id for row in made}) == len({row.answers for row in made}) == 3
    for row in made:
        assert row.context == "".join(row.passages)
        prompt = [*find(name).template.render(row.input), row.context]
        # A sentence less at most, or three lines.
        assert length - 20 <= sum(count_words(prompt)) <= length


@pytest.mark.parametrize("name", HIDDEN[:3])
@settings(max_examples=20, deadline=None)
@given(LENGTHS, SEEDS)
def test_codes_are_those_of_the_keys_that_are_asked(name: str, length: int, seed: int) -> None:
    for row in rows(name, Grid(length, length, 1, 3), seed=seed):
        said = CODE.findall(row.context)
        assert len(said) == len({code for _, code in said}) == 4
        assert len({key for key, _ in said}) == (1 if name == "ruler:multivalue" else 4)
        asked = re.findall(r"the [A-Z]\w+ [A-Z]\w+", row.input)
        assert [code for key, code in said if key in asked] == wanted(row)
        assert len(wanted(row)) == (1 if name == "ruler:multikey" else 4)
        places = [place for _, code in said for place in holders(row, code)]
        assert len(places) == len(set(places)) == 4
        assert row.gold == tuple(place for code in wanted(row) for place in holders(row, code))


@settings(max_examples=20, deadline=None)
@given(LENGTHS, SEEDS)
def test_chains_of_variables_have_four_hops_over_passages(length: int, seed: int) -> None:
    for row in rows("ruler:vt", Grid(length, length, 1, 3), seed=seed):
        said = dict(LINK.findall(row.context))
        [value] = re.findall(r"\d{5}", row.input)

        def ends(name: str, said: dict[str, str] = said) -> str:
            return ends(said[name]) if name in said else name

        assert [name for name in said if ends(name) == value] == wanted(row)
        assert all(said[name] == before for before, name in pairwise(wanted(row)))
        assert sorted(Counter(map(ends, said)).values()) == [5, 5, 5]
        places = [place for name in wanted(row) for place in holders(row, f" VAR {name} = ")]
        assert row.gold == tuple(places) == tuple(sorted(set(places)))


@settings(max_examples=20, deadline=None)
@given(LENGTHS, SEEDS)
def test_ten_words_occur_thirty_times_and_the_others_three_times(length: int, seed: int) -> None:
    for row in rows("ruler:cwe", Grid(length, length, 1, 3), seed=seed):
        lines = [line.split(". ") for line in row.context.splitlines()]
        assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1))
        found = Counter(word for _, word in lines)
        assert [word for word, times in found.items() if times == 30] == wanted(row)
        assert Counter(found.values()) == {30: 10, 3: (len(lines) - 300) // 3}
        # A reply with other words has none of those that are asked for.
        assert not any(a in b for a in wanted(row) for b in found if a != b)
        assert all(passage.endswith("\n") for passage in row.passages)


@pytest.mark.parametrize("name", HIDDEN)
def test_one_fact_is_at_the_depth_and_filler_recurs(name: str) -> None:
    made = rows(name, Grid(2_000, 3_000, 2, 11), limit=22)
    assert len(made) == 22
    for row in made:
        depth = int(row.id.rsplit("-", 1)[1]) / 10
        assert round(depth * (len(row.passages) - 1)) in row.gold
        assert all(passage.startswith("\n") for passage in row.passages)
    seen = Counter(passage for row in made for passage in row.passages)
    assert sum(times for times in seen.values() if times > 1) > 0.5 * seen.total()


@pytest.mark.parametrize("name", TASKS)
def test_the_own_grid_fits_small_models(name: str) -> None:
    made = rows(name, room=3_500, limit=200)
    assert len(made) == 100
    sizes = {len(row.context.split()) for row in made}
    assert min(sizes) > 2_900 and 3_400 < max(sizes) <= 3_500


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    ("grid", "room", "said"),
    [
        (Grid(100, 4_000, 2, 2), None, r"`grid` 100: ruler:\w+ (needs|has) "),
        (Grid(1, 1, 1, 1), None, r"`grid` 1: ruler:\w+ (needs|has) "),
        (Grid(1_000, 4_000, 2, 2), 3_000, r"`grid`: 4000 tokens, .* has room for 30\d\d"),
        (None, 2_000, r"`grid`: 3072 tokens, .* has room for 20\d\d .*`context`"),
    ],
)
def test_lengths_that_are_not_possible_are_refused_at_once(
    name: str, grid: Grid | None, room: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        rows(name, grid, room=room, limit=1)


def test_a_list_has_only_so_many_words() -> None:
    with pytest.raises(ConfigError, match=r"ruler:cwe has 330-1\d{4} words"):
        rows("ruler:cwe", Grid(10**5, 10**5, 1, 1))


def test_facts_can_be_in_text_files(tmp_path: Path) -> None:
    said = [f"Sentence {number} is about   the weather." for number in range(400)]
    (tmp_path / "a.txt").write_text("\n\n".join(said[:200]))
    (tmp_path / "b.txt").write_text(" ".join(said[200:]))
    reading = Reading(count_words, grid=Grid(1_500, 1_500, 1, 3))
    for row in find("ruler:multikey").rows(RowSource(tmp_path), reading):
        assert len(CODE.findall(row.context)) == 4
        text = CODE.sub("", row.context)
        sentences = re.findall(r"Sentence (\d+) is about the weather\.", text)
        assert len(sentences) == len(set(sentences)) > 200
        assert not re.sub(r"Sentence \d+ is about the weather\.", "", text).strip()


def test_other_data_is_refused(tmp_path: Path) -> None:
    assert locate("bundled", "ruler:vt", generated=True) == DATA
    reading = Reading(count_words, grid=Grid(1_500, 1_500, 1, 3))
    for name, wanted in (("ruler:vt", r"\*\.txt in it"), ("ruler:cwe", "no `data`")):
        with pytest.raises(ConfigError, match=wanted):
            list(find(name).rows(RowSource(tmp_path), reading))
    (tmp_path / "a.txt").write_text("There is not much to say. " * 20)
    with pytest.raises(DataError, match="120 tokens of text, the longest prompt has 1500"):
        list(find("ruler:vt").rows(RowSource(tmp_path), reading))


@pytest.mark.parametrize("name", TASKS)
def test_samples_fit_and_their_chunks_and_answers_are_those_of_the_row(
    name: str, tiny_tokenizer: Tokenizer
) -> None:
    samples = load_samples(name, DATA, tiny_tokenizer, limit=3, context=4_096)
    golds = right_answers(samples, tiny_tokenizer)
    for sample in samples:
        assert not sample.truncated and not sample.ordered
        assert 2_950 < sample.prompt_tokens <= 4_096 - sample.max_tokens
        assert len(sample.chunks) > 15
        [answer] = sample.answers
        assert tiny_tokenizer.decode(list(golds[sample.id])) == f" {answer}"


@pytest.mark.parametrize("rule", ["longbench", "cacheblend", "longbench-zh"])
def test_the_score_is_the_share_of_wanted_texts(rule: str, tiny_tokenizer: Tokenizer) -> None:
    scorer = find_scorer(find("ruler:vt"), rule, lambda: tiny_tokenizer)
    assert scorer.metric == "string-match"
    answer = ["ABCDE, FGHIJ, KLMNO, PQRST"]
    assert scorer.score("abcde and PQRST.", answer) == 0.5
    assert scorer.score("PQRST\nKLMNO FGHIJ; it is ABCDE", answer) == 1.0
    assert scorer.score("", answer) == scorer.score("FGHI", answer) == 0.0
