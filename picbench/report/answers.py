"""Samples whose score differs from full's in some arm, with all that explains a reply."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from picbench.compare.arm import sample_labels
from picbench.report.contents import RunContents
from picbench.report.sections import HtmlCell, HtmlTable, number, text
from picbench.store.records import SampleRow
from picbench.store.summary import BASELINE
from picbench.store.writer import WORKLOAD, ChunkLine, StoredSample, TextSegment

#: Samples that are shown at most, whatever room there is.
SAMPLES = 200

#: Characters that are shown of a reply or question, and of a passage.
_REPLY, _PASSAGE = 2_000, 6_000

#: Arms whose change is written beside a sample's name.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class BrowsedSample:
    """A sample: its question (None where the run did not keep it), right answers, replies by arm.

    `passages` are keys of the browser's `passages`, `flipped` the arms whose score differs from
    full's, `change` the largest differences in words.
    """

    sample: str
    question: str | None
    answers: Sequence[str]
    replies: HtmlTable
    passages: Sequence[str]
    flipped: Sequence[str]
    change: str


@dataclass(frozen=True, slots=True)
class AnswerBrowser:
    """The samples whose score changed most; `total` samples changed, `arms` are those to choose.

    `passages` has every passage once, by the id of its chunk.
    """

    samples: Sequence[BrowsedSample]
    total: int
    arms: Sequence[str]
    passages: Mapping[str, str]
    notes: Sequence[str]


def browse_answers(contents: RunContents, room: int) -> AnswerBrowser | None:
    """The flipped samples in about `room` characters; None where nothing was compared."""
    comparison = contents.comparison
    if comparison is None:
        return None
    flipped: dict[str, dict[str, float]] = {}
    for arm in comparison.arms:
        for flip in arm.flips:
            change = (flip.after or 0.0) - (flip.before or 0.0)
            flipped.setdefault(flip.sample, {})[arm.after] = change
    order = sorted(flipped, key=lambda name: -max(map(abs, flipped[name].values())))
    replies = _by_sample(contents, order[:SAMPLES])
    asked = {name: next(iter(rows.values())).sample for name, rows in replies.items()}
    sent = contents.sent({*asked.values()})
    samples: list[BrowsedSample] = []
    passages: dict[str, str] = {}
    for name in order[:SAMPLES]:
        stored = sent.get(asked[name])
        found = _sample(name, stored, replies[name], flipped[name], contents)
        new = {k: v for k, v in _passages(stored).items() if k not in passages}
        room -= _size(found) + sum(map(len, new.values()))
        if room < 0 and samples:
            break
        samples.append(found)
        passages |= new
    arms = [arm.after for arm in comparison.arms if arm.flips]
    return AnswerBrowser(samples, len(order), arms, passages, _notes(contents, samples, order))


def _by_sample(contents: RunContents, wanted: Iterable[str]) -> dict[str, dict[str, SampleRow]]:
    """Answered rows of the wanted samples by arm, named as comparisons name them."""
    found: dict[str, dict[str, SampleRow]] = {name: {} for name in wanted}
    for arm in contents.arms.values():
        answered = [row for row in arm.rows if row.error is None]
        for name, row in zip(sample_labels(answered), answered, strict=True):
            if name in found:
                found[name][arm.name] = row
    return found


def _sample(
    name: str,
    stored: StoredSample | None,
    rows: Mapping[str, SampleRow],
    flipped: Mapping[str, float],
    contents: RunContents,
) -> BrowsedSample:
    head = (
        "arm",
        "reply",
        contents.metric,
        "outcome",
        "TTFT ms",
        "reused",
        "linked",
        "compiled",
        "chunk blocks",
    )
    order = sorted(rows, key=lambda arm: (arm != BASELINE, arm not in flipped))
    table = HtmlTable("", head, [_reply(arm, rows[arm]) for arm in order], (), contents.labels)
    largest = sorted(flipped, key=lambda arm: -abs(flipped[arm]))
    return BrowsedSample(
        sample=name,
        question=_question(stored),
        answers=() if stored is None else stored.answers,
        replies=table,
        passages=list(_passages(stored)),
        flipped=list(flipped),
        change=", ".join(f"{arm} {flipped[arm]:+.2f}" for arm in largest[:_NAMED]),
    )


def _reply(arm: str, row: SampleRow) -> list[HtmlCell]:
    return [
        text(arm),
        text(_cut(row.text or "", _REPLY)),
        number(row.score, "{:.3f}"),
        text(row.outcome),
        number(row.ttft_ms),
        number(row.tokens.reused, "{:,}"),
        number(row.tokens.linked, "{:,}"),
        number(row.tokens.compiled, "{:,}"),
        number(row.hits.chunk, "{:,}"),
    ]


def _question(stored: StoredSample | None) -> str | None:
    """The prompt's last text, which is what is asked."""
    if stored is None:
        return None
    texts = [segment for segment in stored.segments if segment.chunk is None]
    return _cut(_content(texts[-1]), _REPLY) if texts else None


def _passages(stored: StoredSample | None) -> dict[str, str]:
    if stored is None:
        return {}
    chunks = [segment for segment in stored.segments if segment.chunk is not None]
    return {str(segment.chunk): _cut(_content(segment), _PASSAGE) for segment in chunks}


def _content(segment: ChunkLine | TextSegment) -> str:
    return segment.text if segment.text is not None else f"({segment.tokens} tokens, no text)"


def _cut(value: str, length: int) -> str:
    value = value.strip()
    more = len(value) - length
    return value if more <= 0 else f"{value[:length]} ... ({more:,} more characters)"


def _size(sample: BrowsedSample) -> int:
    """About how many characters a sample takes, its passages apart."""
    cells = sum(len(cell.text) + 30 for row in sample.replies.rows for cell in row)
    return cells + len(sample.question or "") + 70 * len(sample.passages) + 1000


def _notes(
    contents: RunContents, samples: Sequence[BrowsedSample], order: Sequence[str]
) -> list[str]:
    notes = []
    if len(samples) < len(order):
        notes.append(
            f"The {len(samples):,} of {len(order):,} that changed most; picbench compare "
            f"{contents.run.path} --format json lists all."
        )
    if WORKLOAD in contents.missing:
        notes.append("The run did not keep what it sent: questions and passages are not known.")
    return notes
