"""From a data set's name to the samples of a run."""

from collections import Counter as Multiset
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

from picbench.errors import ConfigError, DataError, check_counts
from picbench.workloads.datasets import Dataset, Reading, find
from picbench.workloads.datasets.grid import Grid
from picbench.workloads.prompts.chat import Chat
from picbench.workloads.prompts.drop import Drop, leads
from picbench.workloads.prompts.segmentation import title
from picbench.workloads.prompts.template import Template, read_prompt
from picbench.workloads.prompts.tokens import Encoder, Tokenizer
from picbench.workloads.prompts.truncate import Frame, truncate
from picbench.workloads.sample import Sample, SampleSegment
from picbench.workloads.sources.row import BadRows, DatasetRow, placed
from picbench.workloads.sources.source import RowSource

#: Tokens that generated contexts leave free for the question and the end of a sentence.
_QUESTION = 128


@dataclass(frozen=True, slots=True)
class _Rendering:
    """How the rows of one data set become samples."""

    dataset: Dataset
    template: Template
    max_tokens: int
    tokenizer: Tokenizer
    encode: Encoder
    context: int | None
    chat: Chat | None
    documents: bool = False
    drop: Drop | None = None

    def count(self, texts: Iterable[str]) -> list[int]:
        return [len(ids) for ids in self.encode(texts)]

    @property
    def budget(self) -> int | None:
        """How many tokens a prompt may have; None without a bound."""
        return None if self.context is None else self.context - self.max_tokens

    @property
    def room(self) -> int | None:
        """About how many tokens of a prompt are left for the context."""
        if self.budget is None:
            return None
        return self.budget - sum(self.count(self.around(""))) - _QUESTION

    def around(self, question: str) -> tuple[str, str]:
        """Return the texts before and after the context."""
        head, tail = self.template.render(question)
        return self.chat.wrap(head, tail) if self.chat else (head, tail)

    def sample(self, row: DatasetRow) -> Sample | None:
        """The sample of a row; None for one from which there is nothing to drop.

        Raises DataError for a row whose passages are not those that it counts.
        """
        chunks = row.passages or self.dataset.split(row.context, self.count)
        self._check(row, chunks)
        left_out: frozenset[int] = frozenset()
        if self.drop:
            documents = self._documents(row, chunks) or range(len(chunks))
            left_out = leads(documents, row.gold, row.places)
            if not left_out:
                return None
        segments = self._segments(row, chunks, left_out)
        whole = Sample(
            row.id,
            row.dataset,
            segments,
            row.answers,
            self.max_tokens,
            row.source,
            ordered=not row.passages and len(self.dataset.marked(row.context)) == 1,
        )
        if self.budget is None or whole.prompt_tokens <= self.budget:
            return whole
        kept = truncate(segments, self.budget, self.encode, self._frame(self.budget))
        return replace(whole, segments=kept, truncated=True)

    def _documents(self, row: DatasetRow, chunks: Sequence[str]) -> Sequence[Hashable]:
        """Name the document of each passage, by its title; its own where its place is not known."""
        if row.documents or not (row.places or row.passages):
            return row.documents
        alone = range(len(chunks))
        return [title(chunk) or n for n, chunk in enumerate(chunks)] if row.places else alone

    def _frame(self, budget: int) -> Frame:
        if self.chat is None:
            return Frame()
        frame = Frame(*map(len, self.encode.prompt(self.chat.wrap("", ""))))
        if frame.size >= budget:
            raise ConfigError(
                f"a chat template of {frame.size} tokens leaves none for the prompt",
                hint="raise `context` or use `chat=off`",
            )
        return frame

    def _segments(
        self, row: DatasetRow, chunks: Sequence[str], left_out: frozenset[int]
    ) -> tuple[SampleSegment, ...]:
        head, tail = self.around(row.input)
        pairs = enumerate(zip(chunks, self._before(row, chunks), strict=True))
        shown = [pair for number, pair in pairs if number not in left_out]
        first, *ids, last = self.encode.prompt([head, *(text for text, _ in shown), tail])
        made = zip(shown, ids, strict=True)
        kept = [SampleSegment("chunk", text, tokens, before) for (text, before), tokens in made]
        segments = (SampleSegment("text", head, first), *kept, SampleSegment("text", tail, last))
        return tuple(segment for segment in segments if segment.tokens)

    def _before(self, row: DatasetRow, chunks: Sequence[str]) -> list[SampleSegment | None]:
        if not self.documents:
            return [None] * len(chunks)
        texts = self.dataset.before(chunks, self._documents(row, chunks), row.places)
        pairs = zip(texts, self.encode(texts), strict=True)
        return [SampleSegment("text", text, ids) if ids else None for text, ids in pairs]

    def _check(self, row: DatasetRow, chunks: Sequence[str]) -> None:
        for field, numbers in (("documents", row.documents), ("places", row.places)):
            if numbers and len(numbers) != len(chunks):
                raise DataError(
                    f"{len(numbers)} {field} for {len(chunks)} passages",
                    hint=f"`{field}` of a row has a number for each passage",
                )
        if row.gold and max(row.gold) >= len(chunks):
            raise DataError(
                f"gold passage {max(row.gold)} of {len(chunks)}",
                hint="`gold_passages` of a row counts its passages from 0",
            )


def load_samples(
    dataset: str,
    data: RowSource | Path,
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    seed: int = 0,
    context: int | None = None,
    max_tokens: int | None = None,
    prompts: Path | None = None,
    chat: Chat | None = None,
    grid: Grid | None = None,
    bad_rows: BadRows | None = None,
    documents: bool = False,
    drop: Drop | None = None,
) -> list[Sample]:
    """Read the rows of `dataset`, render them and tokenize every segment of the prompt alone.

    `data` is where they are (see `sources.source`); a path has LongBench's columns. The first
    `limit` rows are taken; a `seed` other than 0 shuffles all rows first. A prompt with more than
    `context - max_tokens` tokens loses its middle and is marked as truncated. `max_tokens`
    overrides the prompt file, which overrides the data set. The prompt starts with a BOS token if
    the tokenizer adds one.
    `chat` wraps the prompt, and `grid` makes rows from text files. `bad_rows` handles malformed
    rows; by default the first one raises. With `documents` chunks know what precedes them in
    their document. `drop` leaves passages out of prompts, and rows out that have none of that sort.

    Raises ConfigError for a wrong name, path, template or number, DataError for a malformed row
    or when no row is left.
    """
    how = _rendering(find(dataset), tokenizer, context, max_tokens, prompts, chat)
    how = replace(how, documents=documents, drop=drop)
    reading = Reading(how.count, seed, how.room, bad_rows or BadRows(), grid)
    source = data if isinstance(data, RowSource) else RowSource(data)
    rows = _distinct(_shuffle(how.dataset.rows(source, reading), seed))
    samples = list(islice(_samples(how, rows, reading.bad), limit))
    if samples:
        return samples
    if drop:
        raise DataError(
            f"`drop={drop}`: no row of {dataset!r} has a passage to leave out",
            hint="it needs rows that name gold passages which continue a document, as the bundled "
            "ones of musique, 2wikimqa and hotpotqa do",
        )
    bad = reading.bad.skipped
    hint = f"all were malformed, the first: {bad[0]}" if bad else "`data`, `limit`"
    raise DataError(f"{source.path}: no rows for {dataset!r}", hint=hint)


def _samples(how: _Rendering, rows: Iterable[DatasetRow], bad: BadRows) -> Iterator[Sample]:
    for row in rows:
        try:
            if sample := how.sample(row):
                yield sample
        except DataError as error:
            bad.reject(placed(row.source, error))


def _rendering(
    dataset: Dataset,
    tokenizer: Tokenizer,
    context: int | None,
    max_tokens: int | None,
    prompts: Path | None,
    chat: Chat | None,
) -> _Rendering:
    check_counts(max_tokens=max_tokens, context=context)
    template, from_file = dataset.template, None
    if prompts:
        template, from_file = read_prompt(prompts, dataset.name)
    length = max_tokens or from_file or dataset.max_tokens
    if context is not None and context <= length:
        raise ConfigError(
            f"a context of {context} tokens leaves none for the prompt beside {length} tokens "
            "of output",
            hint="lower `max_tokens` or raise `context`",
        )
    return _Rendering(dataset, template, length, tokenizer, Encoder(tokenizer), context, chat)


def _shuffle(rows: Iterator[DatasetRow], seed: int) -> Iterator[DatasetRow]:
    if not seed:
        return rows
    shuffled = list(rows)
    Random(seed).shuffle(shuffled)
    return iter(shuffled)


def _distinct(rows: Iterable[DatasetRow]) -> Iterator[DatasetRow]:
    """Make ids unique: the second row with an id gets the suffix ``~2``."""
    seen: Multiset[str] = Multiset()
    for row in rows:
        seen[row.id] += 1
        yield row if seen[row.id] == 1 else replace(row, id=f"{row.id}~{seen[row.id]}")
