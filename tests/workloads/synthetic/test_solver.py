"""Every answer follows from the text: a solver that reads it, knowing only how facts are worded."""

import re
from collections.abc import Iterator
from itertools import product

import pytest

from picbench.workloads.synthetic.generate import example
from picbench.workloads.synthetic.passages import continuations
from picbench.workloads.synthetic.world import relations, relatives

QA = ("musique", "2wikimqa", "hotpotqa")
PRONOUN = re.compile(r"(?:She|He|It|Her|His|Its|The [a-z]+(?:'s)?)$")

Facts = dict[tuple[str, str], str]


def pattern(template: str) -> re.Pattern[str]:
    """A template as a pattern with the groups `s`, `o` and `x`."""
    text = re.escape(template).replace(r"\{s\}'s", "(?P<s>.+'s|Her|His|Its)")
    for field, what in {"s": ".+", "x": ".+", "o": "[A-Z0-9].*|[a-z]+"}.items():
        text = text.replace(rf"\{{{field}\}}", f"(?P<{field}>{what})")
    return re.compile(text)


STATEMENTS = [(relation, pattern(s)) for relation, r in relations().items() for s in r.statements]
QUESTIONS = [(relation, pattern(q)) for relation, r in relations().items() for q in r.questions]
PHRASES = [(relation, pattern(p)) for relation, r in relations().items() for p in r.phrases]


def read(context: str) -> Facts:
    """The facts that the passages state; fails if two of them contradict each other."""
    facts: Facts = {}
    topic = ""
    for passage in re.split(r"^Passage \d+:\n", context, flags=re.MULTILINE)[1:]:
        title, body = passage.rstrip("\n").split("\n")
        topic = topic if title in continuations() else title
        for sentence in re.split(r"(?<=\.) ", body):
            for subject, relation, found in stated(sentence, topic):
                assert facts.setdefault((subject, relation), found) == found
    return facts


def stated(sentence: str, topic: str) -> Iterator[tuple[str, str, str]]:
    for relation, statement in STATEMENTS:
        match = statement.fullmatch(sentence)
        if match:
            subject = match["s"].removesuffix("'s")
            yield topic if PRONOUN.match(match["s"]) else subject, relation, match["o"]


def resolve(phrase: str, facts: Facts) -> set[str]:
    """What a noun phrase can stand for: the name itself, or the end of a chain."""
    found = {phrase} if any(phrase == subject for subject, _ in facts) else set()
    for relation, form in PHRASES:
        match = form.fullmatch(phrase)
        if match:
            found |= look_up(relation, match["x"], facts)
    return found


def look_up(relation: str, phrase: str, facts: Facts) -> set[str]:
    subjects = resolve(phrase, facts)
    return {facts[s, relation] for s in subjects if (s, relation) in facts}


def solve(question: str, facts: Facts) -> set[str]:
    for solver in (contest, bridge_contest, sameness, kin):
        found = solver(question, facts)
        if found is not None:
            return found
    matches = [(relation, form.fullmatch(question)) for relation, form in QUESTIONS]
    return {
        answer
        for relation, match in matches
        if match
        for answer in look_up(relation, match["x"], facts)
    }


def contest(question: str, facts: Facts) -> set[str] | None:
    asked = re.fullmatch(
        r"(?:Who|Which) (?:was|is|came) (?:.* )?(\w+(?: recent)?), (.+) or (.+)\?", question
    )
    if not asked:
        return None
    word, *names = asked.groups()
    years = {name: year(name, facts) for name in names}
    pick = min if word in ("earlier", "older", "first") else max
    return {pick(years, key=years.__getitem__)}


def year(name: str, facts: Facts) -> int:
    nouns = ("birth year", "release year", "founding year")
    return next(int(facts[name, noun]) for noun in nouns if (name, noun) in facts)


def bridge_contest(question: str, facts: Facts) -> set[str] | None:
    asked = re.fullmatch(r"Which has the (older|younger) (\w+), (.+) or (.+)\?", question)
    if not asked:
        return None
    word, maker, *names = asked.groups()
    years = {name: int(facts[facts[name, maker], "birth year"]) for name in names}
    return {(min if word == "older" else max)(years, key=years.__getitem__)}


def sameness(question: str, facts: Facts) -> set[str] | None:
    asked = re.fullmatch(r"(?:Were|Did|Do|Are) (.+?) and (.+?) (\w+ .*)\?", question)
    if not asked:
        return None
    relation = {
        "born in the same town": "birthplace",
        "have the same trade": "trade",
        "work for the same organisation": "employer",
        "live in the same town": "home",
        "in the same country": "country",
        "directed by the same person": "director",
        "written by the same person": "author",
        "composed by the same person": "composer",
        "set in the same town": "setting",
        "based in the same town": "headquarters",
    }
    for wording, noun in relation.items():
        if question.endswith(f" {wording}?"):
            names = question.removesuffix(f" {wording}?").split(" ", 1)[1]
            one, other = split_pair(names, noun, facts)
            return {"yes" if facts[one, noun] == facts[other, noun] else "no"}
    return None


def split_pair(names: str, noun: str, facts: Facts) -> tuple[str, str]:
    known = {subject for subject, relation in facts if relation == noun}
    return next(
        (one, other) for one, other in product(known, known) if f"{one} and {other}" == names
    )


def kin(question: str, facts: Facts) -> set[str] | None:
    asked = re.fullmatch(r"Who is the (.+) of ([^ ]+ [^ ]+)\?", question)
    if not asked or asked[1] not in relatives():
        return None
    first, second = relatives()[asked[1]]
    return {facts[facts[asked[2], first], second]}


@pytest.mark.parametrize("dataset", QA)
def test_answers_follow_from_the_text_and_are_unique(dataset: str) -> None:
    for index in range(60):
        made = example(dataset, "test", index)
        assert solve(made.exchange.input, read(made.context)) == {made.answer}, made.exchange


@pytest.mark.parametrize("dataset", QA)
def test_every_step_of_a_reply_is_stated(dataset: str) -> None:
    for index in range(60):
        made = example(dataset, "test", index)
        facts = read(made.context)
        for step in made.exchange.reply.split("; "):
            noun, _, rest = step.partition(" of ")
            subject, _, found = rest.partition(" is ")
            assert noun not in relations() or facts[subject, noun] == found


def test_a_text_without_its_gold_passages_has_no_answer() -> None:
    for index in range(20):
        made = example("musique", "test", index)
        passages = re.split(r"^(?=Passage \d+:\n)", made.context, flags=re.MULTILINE)[1:]
        rest = [text for i, text in enumerate(passages) if i not in made.gold]
        assert made.answer not in solve(made.exchange.input, loosely(rest))


def loosely(passages: list[str]) -> Facts:
    """The facts of passages of which some are missing: only those with a title of their own."""
    whole = [text for text in passages if text.split("\n")[1] not in continuations()]
    return read("".join(whole))


def test_needle_remarks_name_their_owner_or_are_in_its_section() -> None:
    for index in range(40):
        made = example("needle", "test", index)
        asked = re.fullmatch(r"What is (?:the (.+) of (.+)|(.+)'s (.+))\?", made.exchange.input)
        assert asked
        kind, person = (asked[1], asked[2]) if asked[1] else (asked[4], asked[3])
        sections = re.split(r"^Section \d+: ", made.context, flags=re.MULTILINE)[1:]
        own = [section for section in sections if section.split("\n")[0] == person]
        assert len(own) == 1
        remarks = [s for s in re.split(r"(?<=\.) ", own[0]) if kind in s]
        assert len(remarks) == 1
        assert made.answer in remarks[0]


def test_summaries_draw_on_every_article() -> None:
    for index in range(30):
        made = example("multi_news", "test", index)
        numbers = re.findall(r"\b\d+\b", made.answer)
        articles = re.split(r"^Passage \d+:\n", made.context, flags=re.MULTILINE)[1:]
        assert len(numbers) == len(articles)
        for number, article in zip(numbers, articles, strict=True):
            assert re.search(rf"\b{number}\b", article)


def test_chats_are_summed_up_in_the_style_of_the_examples() -> None:
    for index in range(30):
        made = example("samsum", "test", index)
        shown = re.findall(r"^Summary: (.+)$", made.context, re.MULTILINE)
        assert len({style(text) for text in (*shown, made.answer)} - {None}) == 1


def style(summary: str) -> int | None:
    marks = {" will ": 0, " going to ": 1, "It was ": 1, "The plan of ": 2, "The one to ": 2}
    marks |= {" hears that ": 2}
    return next((number for mark, number in marks.items() if mark in summary), None)
