"""Samples whose score differs from full's in some arm, with all that explains a reply."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from picbench.compare.arm import sample_labels
from picbench.report.contents import RunContents
from picbench.store.records import SampleRow
from picbench.store.summary import BASELINE
from picbench.store.writer import WORKLOAD, ChunkLine, StoredSample, TextSegment
from picbench.tables.table import Column, Table

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
    replies: Table
    passages: Sequence[str]
    flipped: Sequence[str]
    change: str

    @property
    def size(self) -> int:
        """About how many characters it takes, its passages apart."""
        texts = sum(len(text) + 30 for row in self.replies.texts() for text in row)
        return texts + len(self.question or "") + 70 * len(self.passages) + 1000


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
    if contents.comparison is None:
        return None
    flipped: dict[str, dict[str, float]] = {}
    for arm in contents.compared:
        for flip in arm.flips:
            change = (flip.after or 0.0) - (flip.before or 0.0)
            flipped.setdefault(flip.sample, {})[arm.after] = change
    order = sorted(flipped, key=lambda name: -max(map(abs, flipped[name].values())))
    replies = _by_sample(contents, order[:SAMPLES])
    asked = {name: next(iter(rows.values())).sample for name, rows in replies.items()}
    sent = contents.sent({*asked.values()})
    samples, passages = list[BrowsedSample](), dict[str, str]()
    for name in order[:SAMPLES]:
        stored = sent.get(asked[name])
        found = _sample(name, stored, replies[name], flipped[name], contents.metric)
        new = {key: text for key, text in _passages(stored).items() if key not in passages}
        room -= found.size + sum(map(len, new.values()))
        if room < 0 and samples:
            break
        samples.append(found)
        passages |= new
    arms = [arm.after for arm in contents.compared if arm.flips]
    notes = [*_notes(contents, len(samples), len(order))]
    return AnswerBrowser(samples, len(order), arms, passages, notes)


def _by_sample(contents: RunContents, wanted: Iterable[str]) -> dict[str, dict[str, SampleRow]]:
    """Answered rows of the wanted samples by arm, named as comparisons name them."""
    found: dict[str, dict[str, SampleRow]] = {name: {} for name in wanted}
    for arm, facts in contents.arms.items():
        answered = [row for row in facts.rows if row.error is None]
        for name, row in zip(sample_labels(answered), answered, strict=True):
            if name in found:
                found[name][arm] = row
    return found


def _sample(
    name: str,
    stored: StoredSample | None,
    rows: Mapping[str, SampleRow],
    flipped: Mapping[str, float],
    metric: str,
) -> BrowsedSample:
    counts = ("reused", "linked", "compiled", "chunk blocks")
    head = [
        *(Column("arm"), Column("reply"), Column(metric, 3), Column("outcome"), Column("TTFT ms")),
        *(Column(title, 0) for title in counts),
    ]
    order = sorted(rows, key=lambda arm: (arm != BASELINE, arm not in flipped))
    texts = [] if stored is None else [s for s in stored.segments if s.chunk is None]
    largest = sorted(flipped, key=lambda arm: -abs(flipped[arm]))
    return BrowsedSample(
        sample=name,
        # The prompt's last text is what is asked.
        question=_cut(_content(texts[-1]), _REPLY) if texts else None,
        answers=() if stored is None else stored.answers,
        replies=Table("", head, [_reply(arm, rows[arm]) for arm in order]),
        passages=list(_passages(stored)),
        flipped=list(flipped),
        change=", ".join(f"{arm} {flipped[arm]:+.2f}" for arm in largest[:_NAMED]),
    )


def _reply(arm: str, row: SampleRow) -> list[str | float | None]:
    tokens, text = row.tokens, _cut(row.text or "", _REPLY)
    counts = (tokens.reused, tokens.linked, tokens.compiled, row.hits.chunk)
    return [arm, text, row.score, str(row.outcome), row.ttft_ms, *counts]


def _passages(stored: StoredSample | None) -> dict[str, str]:
    chunks = [] if stored is None else [s for s in stored.segments if s.chunk is not None]
    return {str(segment.chunk): _cut(_content(segment), _PASSAGE) for segment in chunks}


def _content(segment: ChunkLine | TextSegment) -> str:
    return segment.text if segment.text is not None else f"({segment.tokens} tokens, no text)"


def _cut(value: str, length: int) -> str:
    value = value.strip()
    more = len(value) - length
    return value if more <= 0 else f"{value[:length]} ... ({more:,} more characters)"


def _notes(contents: RunContents, shown: int, total: int) -> Iterator[str]:
    if shown < total:
        yield (
            f"The {shown:,} of {total:,} that changed most; picbench compare "
            f"{contents.run.path} --format json lists all."
        )
    if WORKLOAD in contents.missing:
        yield "The run did not keep what it sent: questions and passages are not known."
