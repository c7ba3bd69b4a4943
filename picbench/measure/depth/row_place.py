"""Where in each row's prompt lies what the answer needs, in chunks and tokens."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from picbench.errors import DataError
from picbench.measure.algorithms.scored_part import Case
from picbench.measure.algorithms.serve_arms import load_case
from picbench.measure.depth.needle_place import find_needle
from picbench.workloads import datasets, models
from picbench.workloads.datasets.base import Reading
from picbench.workloads.prompts.drop import leads
from picbench.workloads.prompts.tokens import Tokenizer, encode
from picbench.workloads.sample import Sample
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.row import DatasetRow
from picbench.workloads.sources.source import locate

#: What is known of rows, by the data sets whose generated rows say it.
QUESTIONS = ("musique", "2wikimqa", "hotpotqa")
NEEDLE = "needle"


@dataclass(frozen=True, slots=True)
class RowPlace:
    """What is known of a row; None where it does not apply.

    Questions over passages: `hops` are the passages that the answer needs, `leads` those that are
    before one of them in its document without stating a fact of the answer; `chunks_apart` is how
    many chunks after the first one the last one is, `tokens_apart` is what lies between them.
    Needles: `length` of the context in tokens, `depth` of the remark in it from 0 to 1, its
    distance from the start of its chunk in tokens (`into_chunk`), and that from the heading which
    says whom it is about, in chunks (`heading_apart`).
    """

    prompt: int
    hops: int | None = None
    leads: int | None = None
    chunks_apart: int | None = None
    tokens_apart: int | None = None
    length: int | None = None
    depth: float | None = None
    into_chunk: int | None = None
    heading_apart: int | None = None


def bundled_places(dataset: str, model: str, rows: int) -> list[RowPlace]:
    """The places of the first bundled rows of a data set, as `model` tokenizes them.

    Raises DataError for a row whose needle is not found.
    """
    samples = load_case(Case(model, dataset), ("full",), rows).samples
    tokenizer = models.load_tokenizer(models.resolve(model))
    found = {row.id: row for row in _rows(dataset, tokenizer)}
    place = _KINDS[dataset]
    return [place(found[sample.id], sample, tokenizer) for sample in samples]


def _rows(dataset: str, tokenizer: Tokenizer) -> list[DatasetRow]:
    reading = Reading(lambda texts: [len(ids) for ids in encode(tokenizer, list(texts))])
    return list(datasets.find(dataset).rows(locate(BUNDLED, dataset), reading))


def _questions(row: DatasetRow, sample: Sample, _: Tokenizer) -> RowPlace:
    first, last = min(row.gold), max(row.gold)
    if len(sample.chunks) != len(row.documents):
        raise DataError(f"{row.source}: {len(sample.chunks)} chunks, not {len(row.documents)}")
    between = sample.chunks[first + 1 : last]
    return RowPlace(
        sample.prompt_tokens,
        hops=len(row.gold),
        leads=len(leads(row.documents, row.gold)),
        chunks_apart=last - first,
        tokens_apart=sum(len(chunk.tokens) for chunk in between),
    )


def _needle(row: DatasetRow, sample: Sample, tokenizer: Tokenizer) -> RowPlace:
    texts = [chunk.text for chunk in sample.chunks]
    ends = list(accumulate(map(len, texts)))
    if "".join(texts) != row.context:
        raise DataError(f"{row.source}: its chunks are not its context")
    place = find_needle(row)

    def at(character: int) -> tuple[int, int]:
        """Chunk, and tokens before the character in it."""
        chunk = bisect_right(ends, character)
        before = texts[chunk][: character - ends[chunk] + len(texts[chunk])]
        [tokens] = encode(tokenizer, [before])
        return chunk, len(tokens)

    starts = [0, *accumulate(len(chunk.tokens) for chunk in sample.chunks)]
    (chunk, into), (head, _) = at(place.remark), at(place.heading)
    where = starts[chunk] + into
    return RowPlace(
        sample.prompt_tokens,
        length=starts[-1],
        depth=where / starts[-1],
        into_chunk=into,
        heading_apart=chunk - head,
    )


_KINDS: Mapping[str, Callable[[DatasetRow, Sample, Tokenizer], RowPlace]] = {
    **dict.fromkeys(QUESTIONS, _questions),
    NEEDLE: _needle,
}


def check_same(places: Sequence[RowPlace], prompts: Sequence[int], name: str) -> None:
    """Raise DataError unless scores were measured on prompts of the same lengths."""
    if [place.prompt for place in places] != list(prompts):
        raise DataError(
            f"{name}: measured on other rows than those that are bundled now",
            hint="measure the scores again",
        )
