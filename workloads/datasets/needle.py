"""Needle in a haystack: one sentence hidden in text that has nothing to do with it."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from random import Random
from typing import ClassVar

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets.base import Dataset, Metric, Reading
from picbench.workloads.prompt import Template
from picbench.workloads.row import Row
from picbench.workloads.segment import Counter, sentences
from picbench.workloads.source import no_rows, row_files, text_files

#: EPIC's grid: haystacks of 1,000 to 11,000 tokens, the needle at ten depths.
SHORTEST, LONGEST, LENGTHS, DEPTHS = 1_000, 11_000, 20, 10

_HOTELS = ("Albatross", "Bellweather", "Cormorant", "Dovecote", "Eiderdown", "Foxglove", "Gable",
           "Harbour", "Isthmus", "Juniper", "Kestrel", "Lantern")  # fmt: skip
_COLOURS = ("amber", "blue", "crimson", "grey", "ivory", "green", "purple", "silver", "yellow")
_PLACES = ("umbrella stand", "piano stool", "bread tin", "grandfather clock", "teapot", "mailbox",
           "flower pot", "violin case", "coal bucket", "hat box")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Haystack:
    """Sentences of the texts in order, each with the white space behind it.

    ``ends[i]`` is how many tokens the sentences up to and including i have.
    """

    sentences: tuple[str, ...]
    ends: tuple[int, ...]
    source: str

    def hide(self, needle: str, length: int, depth: float) -> str:
        """Return `length` tokens or a sentence more, with `needle` at `depth` from 0 to 1."""
        last = bisect_left(self.ends, length) + 1
        place = bisect_right(self.ends, depth * self.ends[last - 1])
        before, behind = self.sentences[:place], self.sentences[place:last]
        return "".join([*before, needle, " ", *behind])


class Needle(Dataset):
    """Needle in a haystack over any folder of text files, on EPIC's grid."""

    name: ClassVar[str] = "needle"
    summary: ClassVar[str] = "one hidden sentence, 20 lengths x 10 depths, over your text files"
    metric: ClassVar[Metric] = "f1"
    max_tokens: ClassVar[int] = 32
    template: ClassVar[Template] = Template(
        "A long text comes first. One remark in it does not belong there; a question about that "
        "remark follows.\n\n"
        "{context}\n\n"
        "The text is over. Reply with the few words of the remark that are asked for.\n\n"
        "Q: {input}\nShort reply:"
    )

    def rows(self, data: Path, reading: Reading) -> Iterator[Row]:
        """Read ready-made rows where there are any, else hide needles in text files.

        Made rows come in an order drawn from the seed, so that any first few of them spread over
        the grid. The longest haystack is bounded by the room in the context and by the text.
        """
        if data.suffix != ".txt" and row_files(data, self.name):
            return super().rows(data, reading)
        files = text_files(data, self.name)
        if not files:
            raise no_rows(data, self.name, "needle/**/*.txt, *.txt or needle/*.jsonl in it")
        return self._hidden(files, reading)

    def _hidden(self, files: list[Path], reading: Reading) -> Iterator[Row]:
        longest = min(LONGEST, LONGEST if reading.room is None else reading.room)
        if longest < SHORTEST:
            raise ConfigError(
                f"a needle needs a haystack of {SHORTEST} tokens, the context has room for "
                f"{max(0, longest)}",
                hint="raise --context, or take a model with a longer one",
            )
        hay = _gather(files, reading.count, longest)
        cells = list(product(_lengths(min(longest, hay.ends[-1])), range(DEPTHS)))
        Random(reading.seed).shuffle(cells)
        for length, step in cells:
            yield self._row(hay, length, step / (DEPTHS - 1), reading.seed)

    def _row(self, hay: Haystack, length: int, depth: float, seed: int) -> Row:
        name = f"{self.name}-{seed}-{length}-{round(100 * depth)}"
        draw = Random(name)
        hotel = f"Hotel {draw.choice(_HOTELS)}"
        place = f"in the {draw.choice(_COLOURS)} {draw.choice(_PLACES)}"
        remark = f"The night porter of {hotel} leaves the spare key {place}."
        return Row(
            id=name,
            dataset=self.name,
            input=f"Where does the night porter of {hotel} leave the spare key?",
            context=hay.hide(remark, length, depth),
            answers=(place,),
            source=hay.source,
        )


def _gather(files: list[Path], count: Counter, tokens: int) -> Haystack:
    """Put the texts one after another until there are at least `tokens` tokens."""
    found: list[str] = []
    ends = [0]
    for file in files:
        pieces = sentences(_read(file).strip() + "\n\n")
        found += pieces
        ends += list(accumulate(count(pieces), initial=ends[-1]))[1:]
        if ends[-1] >= tokens:
            break
    if ends[-1] < SHORTEST:
        raise DataError(
            f"{files[0].parent}: {ends[-1]} tokens of text, a haystack needs {SHORTEST}",
            hint="--data names a folder with more text files",
        )
    return Haystack(tuple(found), tuple(ends[1:]), f"{files[0]}:1")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: {error}", hint="text files must be readable UTF-8") from error


def _lengths(longest: int) -> list[int]:
    step = (longest - SHORTEST) / (LENGTHS - 1)
    return list(dict.fromkeys(round(SHORTEST + step * index) for index in range(LENGTHS)))
