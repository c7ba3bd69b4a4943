"""Needle in a haystack: one sentence hidden in unrelated text."""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from pathlib import Path
from random import Random
from typing import ClassVar

from picbench.errors import DataError
from picbench.workloads.datasets.base import Dataset, Metric, Reading
from picbench.workloads.datasets.grid import EPIC, Grid
from picbench.workloads.metrics.abstention import abstains
from picbench.workloads.prompts.segmentation import before_in_sections, sentences
from picbench.workloads.prompts.template import Template
from picbench.workloads.sources.row import DatasetRow
from picbench.workloads.sources.source import RowSource, no_rows, read_texts, text_files

_HOTELS = ("Albatross", "Bellweather", "Cormorant", "Dovecote", "Eiderdown", "Foxglove", "Gable",
           "Harbour", "Isthmus", "Juniper", "Kestrel", "Lantern")  # fmt: skip
_COLOURS = ("amber", "blue", "crimson", "grey", "ivory", "green", "purple", "silver", "yellow")
_PLACES = ("umbrella stand", "piano stool", "bread tin", "grandfather clock", "teapot", "mailbox",
           "flower pot", "violin case", "coal bucket", "hat box")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Haystack:
    """Sentences of the texts in order, each with the white space after it.

    ``ends[i]`` is the number of tokens up to the end of sentence i.
    """

    sentences: tuple[str, ...]
    ends: tuple[int, ...]
    source: str

    def hide(self, needle: str, length: int, depth: float) -> str:
        """Return `length` tokens or a sentence more, with `needle` at `depth` from 0 to 1."""
        last = bisect_left(self.ends, length) + 1
        place = bisect_right(self.ends, depth * self.ends[last - 1])
        before, after = self.sentences[:place], self.sentences[place:last]
        return "".join([*before, needle, " ", *after])


class Needle(Dataset):
    """Needle in a haystack over any folder of text files, on EPIC's grid or another."""

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

    def before(
        self, chunks: Sequence[str], documents: Sequence[Hashable] = (), places: Sequence[int] = ()
    ) -> list[str]:
        """Sections are documents; text without sections is one, as far as the haystack goes."""
        return before_in_sections(chunks)

    def abstained(self, prediction: str) -> bool:
        """Whether the reply says that the text does not tell."""
        return abstains(prediction)

    def rows(self, data: RowSource, reading: Reading) -> Iterator[DatasetRow]:
        """Read ready-made rows where there are any, else hide needles in text files.

        Generated rows are shuffled by the seed, so that the first ones are spread over the grid.
        The longest haystack is limited by the room in the context and by the text.
        """
        if data.path.suffix != ".txt" and data.has_rows(self.name):
            return super().rows(data, reading)
        files = text_files(data.path, self.name)
        if not files:
            raise no_rows(data.path, self.name, "needle/**/*.txt, *.txt or needle/*.jsonl in it")
        return self._hidden(files, reading)

    def _hidden(self, files: list[Path], reading: Reading) -> Iterator[DatasetRow]:
        grid = (reading.grid or EPIC).within(reading.room)
        hay = _gather(files, reading, grid)
        cells = list(product(grid.sizes(hay.ends[-1]), grid.depth_shares))
        Random(reading.seed).shuffle(cells)
        for length, depth in cells:
            yield self._row(hay, length, depth, reading.seed)

    def _row(self, hay: Haystack, length: int, depth: float, seed: int) -> DatasetRow:
        name = f"{self.name}-{seed}-{length}-{round(100 * depth)}"
        draw = Random(name)
        hotel = f"Hotel {draw.choice(_HOTELS)}"
        place = f"in the {draw.choice(_COLOURS)} {draw.choice(_PLACES)}"
        remark = f"The night porter of {hotel} leaves the spare key {place}."
        return DatasetRow(
            id=name,
            dataset=self.name,
            input=f"Where does the night porter of {hotel} leave the spare key?",
            context=hay.hide(remark, length, depth),
            answers=(place,),
            source=hay.source,
        )


def _gather(files: list[Path], reading: Reading, grid: Grid) -> Haystack:
    """Concatenate texts until they are as long as the grid's longest haystack."""
    found: list[str] = []
    ends = [0]
    for text in read_texts(files, reading.bad):
        added = sentences(text)
        found += added
        ends += list(accumulate(reading.count(added), initial=ends[-1]))[1:]
        if ends[-1] >= grid.longest:
            break
    if ends[-1] < grid.shortest:
        raise DataError(
            f"{files[0].parent}: {ends[-1]} tokens of text, a haystack needs {grid.shortest}",
            hint="`data` names a folder with more text files, or `grid` a smaller haystack",
        )
    return Haystack(tuple(found), tuple(ends[1:]), f"{files[0]}:1")
