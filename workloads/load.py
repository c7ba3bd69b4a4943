"""From a data set's name to the samples of a run."""

from collections import Counter as Multiset
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets import Dataset, Reading, find
from picbench.workloads.prompt import Template, read_prompts
from picbench.workloads.row import BadRows, Row
from picbench.workloads.sample import Part, Sample
from picbench.workloads.source import locate
from picbench.workloads.tokens import Tokenizer, encode, start_tokens
from picbench.workloads.truncate import truncate

#: Tokens that a data set which makes its rows leaves free: the question, the end of a sentence.
_QUESTION = 128


@dataclass(frozen=True, slots=True)
class _Rendering:
    """How the rows of one data set become samples."""

    dataset: Dataset
    template: Template
    max_tokens: int
    tokenizer: Tokenizer
    context: int | None

    def count(self, texts: Iterable[str]) -> list[int]:
        return [len(ids) for ids in encode(self.tokenizer, list(texts))]

    @property
    def budget(self) -> int | None:
        """How many tokens a prompt may have; None without a bound."""
        return None if self.context is None else self.context - self.max_tokens

    @property
    def room(self) -> int | None:
        """How many tokens of a prompt are left for the context, roughly."""
        if self.budget is None:
            return None
        return self.budget - sum(self.count(self.template.render(""))) - _QUESTION

    def sample(self, row: Row) -> Sample:
        parts = self._parts(row)
        whole = Sample(row.id, row.dataset, parts, row.answers, self.max_tokens, row.source)
        if self.budget is None or whole.prompt_tokens <= self.budget:
            return whole
        return replace(whole, parts=truncate(parts, self.budget, self.tokenizer), truncated=True)

    def _parts(self, row: Row) -> tuple[Part, ...]:
        head, tail = self.template.render(row.input)
        texts = [head, *self.dataset.split(row.context, self.count), tail]
        ids = encode(self.tokenizer, texts)
        ids[0] = start_tokens(self.tokenizer) + ids[0]
        last = len(texts) - 1
        return tuple(
            Part("text" if index in (0, last) else "chunk", text, tokens)
            for index, (text, tokens) in enumerate(zip(texts, ids, strict=True))
            if tokens
        )


def load_samples(
    dataset: str,
    data: str,
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    seed: int = 0,
    context: int | None = None,
    max_tokens: int | None = None,
    prompts: Path | None = None,
    on_bad_row: BadRows = "stop",
) -> list[Sample]:
    """Read the rows of `dataset`, render them and tokenize every part of the prompt alone.

    `data` is a folder, a file or ``bundled`` (`source.py` says where rows are looked for). The
    first `limit` rows are taken; a `seed` other than 0 shuffles all rows before.
    A prompt with more than `context - max_tokens` tokens loses its middle and is marked as
    truncated. `max_tokens` overrides what the prompt file, or else the data set, says. A
    beginning-of-sequence token stands at the very start where the tokenizer wants one.

    Raises ConfigError for a name, a path, a template or a number that is wrong, DataError for a
    malformed row (`on_bad_row` ``"skip"`` logs and leaves it out) or when no row is left.
    """
    how = _rendering(find(dataset), tokenizer, context, max_tokens, prompts)
    reading = Reading(how.count, seed, how.room, on_bad_row)
    rows = _pick(how.dataset.rows(locate(data, dataset), reading), limit, seed)
    samples = [how.sample(row) for row in _distinct(rows)]
    if not samples:
        raise DataError(f"--data {data}: no rows for {dataset!r}", hint="--data, --limit")
    return samples


def _rendering(
    dataset: Dataset,
    tokenizer: Tokenizer,
    context: int | None,
    max_tokens: int | None,
    prompts: Path | None,
) -> _Rendering:
    file = read_prompts(prompts) if prompts else None
    template = file.template(dataset.name) if file else dataset.template
    from_file = file.max_tokens.get(dataset.name) if file else None
    length = max_tokens or from_file or dataset.max_tokens
    if context is not None and context <= length:
        raise ConfigError(
            f"a context of {context} tokens leaves none for the prompt beside {length} tokens "
            "of output",
            hint="lower --max-tokens or raise --context",
        )
    return _Rendering(dataset, template, length, tokenizer, context)


def _pick(rows: Iterator[Row], limit: int | None, seed: int) -> Iterator[Row]:
    if seed:
        shuffled = list(rows)
        Random(seed).shuffle(shuffled)
        rows = iter(shuffled)
    return islice(rows, limit)


def _distinct(rows: Iterable[Row]) -> Iterator[Row]:
    """Give rows with the same id ids of their own: the second one ends in ``~2``."""
    seen: Multiset[str] = Multiset()
    for row in rows:
        seen[row.id] += 1
        yield row if seen[row.id] == 1 else replace(row, id=f"{row.id}~{seen[row.id]}")
