"""Tasks after RULER's description (arXiv 2404.06654), made from a seed in picbench's own words."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, product
from operator import add
from random import Random
from string import ascii_uppercase
from typing import ClassVar

from picbench.errors import ConfigError, DataError
from picbench.workloads.datasets.base import Metric, Reading
from picbench.workloads.datasets.grid import Grid
from picbench.workloads.datasets.qa import PassageQA
from picbench.workloads.prompts.segmentation import sentences
from picbench.workloads.prompts.template import Template
from picbench.workloads.sources.bundled import BUNDLED
from picbench.workloads.sources.row import DatasetRow
from picbench.workloads.sources.source import RowSource, no_rows, read_texts, text_files
from picbench.workloads.synthetic.passages import aside
from picbench.workloads.yaml_data import read_data

#: Sentences of a passage, about 12 tokens each, and lines of one with a list, about 6 each.
_SENTENCES, _LINES = 8, 16
_HINT = "other lengths in `grid`, or a longer `context`"
_GRID = Grid(3_072, 4_096, 2, 50)

#: Sentences of filler by passage; a question with the texts that a right reply has, in their order;
#: these, all passages, and the numbers of those that the answer needs.
_Hay = Sequence[list[str]]
_Asked = tuple[str, Sequence[str]]
_Task = tuple[_Asked, list[str], Sequence[int]]


class Ruler(PassageQA):
    """Facts in filler: four codes of `keys` keys, `asked` of which are asked for.

    A grid has lengths of prompts, without a chat template, and depths of one fact of the answer.
    """

    name: ClassVar[str] = "ruler:multiquery"
    summary: ClassVar[str] = "RULER-like, made from the seed: the codes of 4 keys"
    metric: ClassVar[Metric] = "string-match"
    max_tokens: ClassVar[int] = 128
    generated: ClassVar[bool] = True
    keys: ClassVar[int] = 4
    asked: ClassVar[int] = 4
    #: Whether facts are in filler, which may be of text files.
    filled: ClassVar[bool] = True
    template: ClassVar[Template] = Template(
        "Notes come first, then a question. Few of the notes matter; remember what those state. "
        "Reply with nothing but what is asked for, and put commas between several.\n{context}\n\n"
        "The notes are over.\n\nQ: {input}\nShort reply:"
    )

    def rows(self, data: RowSource, reading: Reading) -> Iterator[DatasetRow]:
        """Make a grid's rows, shuffled by the seed, in sentences of their own or of text files.

        Raises ConfigError for other data or wrong lengths, DataError for too little text.
        """
        seed, around = reading.seed, sum(reading.count(self.template.render("")))
        most = None if reading.room is None else reading.room + around
        grid = (reading.grid or _GRID).within(most, whole=reading.grid is not None)
        sizes, hay = grid.sizes(grid.longest), self._hay(data, reading, grid.longest)
        self._task(Random(0), reading, sizes[0], 0.0, hay)  # If too short, it is refused at once.
        cells = list(product(sizes, enumerate(grid.depth_shares)))
        Random(seed).shuffle(cells)
        for length, (number, depth) in cells:
            name = f"{self.name}-{seed}-{length}-{number}"
            (asked, wanted), texts, gold = self._task(Random(name), reading, length, depth, hay)
            row = (name, self.name, asked, "".join(texts), (", ".join(wanted),), name, tuple(gold))
            yield DatasetRow(*row, passages=tuple(texts))

    def _hay(self, data: RowSource, reading: Reading, longest: int) -> _Hay:
        begins, draw = "\n".ljust(_SENTENCES), Random(f"ruler-{reading.seed}")
        if str(data.path) == BUNDLED:
            # More than there is room for: a passage has about 100 tokens.
            return [[begin + aside(draw) for begin in begins] for _ in range(longest // 60)]
        files = text_files(data.path, self.name) if self.filled else []
        if not files:
            wanted = "*.txt in it, or `data` left out" if self.filled else "no `data`"
            raise no_rows(data.path, self.name, wanted)
        found, tokens = [], 0
        texts = read_texts(files, reading.bad)
        said = (" ".join(one.split()) for text in texts for one in sentences(text) if one.strip())
        while tokens < longest and (passage := [*islice(said, _SENTENCES)]):
            found.append(list(map(add, begins, passage)))
            tokens += sum(reading.count(found[-1]))
        if tokens < longest:
            problem = f"{data.path}: {tokens} tokens of text, the longest prompt has {longest}"
            raise DataError(problem, hint="give more text files, or a smaller `grid`")
        return found

    def _facts(self, draw: Random) -> tuple[list[list[str]], list[_Asked]]:
        """Groups of facts, and what may be asked of the first group: all of it, or each fact."""
        known = list(product(["the"], *read_data("synthetic", "words")["title"].values()))
        keys = list(map(" ".join, draw.sample(known, self.keys))) * (4 // self.keys)
        codes = list(map(str, draw.sample(range(10**6, 10**7), 4)))
        facts = [f" The entry code of {k} is {code}." for k, code in zip(keys, codes, strict=True)]
        parts = [slice(n, n + self.asked) for n in range(0, 4, self.asked)]
        of = [(", of ".join(dict.fromkeys(keys[part])), codes[part]) for part in parts]
        what = "What is the entry code" if self.asked == 1 else "What are the four entry codes"
        return [facts], [(f"{what} of {some}?", wanted) for some, wanted in of]

    def _task(self, draw: Random, by: Reading, length: int, depth: float, hay: _Hay) -> _Task:
        """Facts of a group are in different passages, in their order; none begins a passage."""
        groups, asked = self._facts(draw)
        taken = by.count([*self.template.render(asked[0][0]), *chain(*groups)])
        order = list(chain(*draw.sample(hay, len(hay))))
        fits = bisect_right(list(accumulate(by.count(order))), length - sum(taken))
        found = [order[n : min(n + _SENTENCES, fits)] for n in range(0, fits, _SENTENCES)]
        if len(found) < (least := max(map(len, groups))):
            raise ConfigError(f"`grid` {length}: {self.name} needs {least} passages", hint=_HINT)
        places, at = range(len(found)), round(depth * (len(found) - 1))
        first = sorted([at, *draw.sample([n for n in places if n != at], len(groups[0]) - 1)])
        others = (sorted(draw.sample(places, len(group))) for group in groups[1:])
        for fact, place in zip(chain(*groups), chain(first, *others), strict=True):
            found[place].insert(draw.randint(1, len(found[place])), fact)
        gold = first if len(asked) == 1 else [at]
        return asked[first.index(at) % len(asked)], list(map("".join, found)), gold


class MultiKey(Ruler):
    """Codes of four keys, one of which is asked for."""

    name: ClassVar[str] = "ruler:multikey"
    summary: ClassVar[str] = "RULER-like, made from the seed: the code of one of 4 keys"
    asked: ClassVar[int] = 1


class MultiValue(Ruler):
    """Four codes of one key."""

    name: ClassVar[str] = "ruler:multivalue"
    summary: ClassVar[str] = "RULER-like, made from the seed: the 4 codes of one key"
    keys: ClassVar[int] = 1


class VariableTracking(Ruler):
    """Three chains of variables, four hops each, one of which is asked for."""

    name: ClassVar[str] = "ruler:vt"
    summary: ClassVar[str] = "RULER-like, made from the seed: variables with a value, over 4 hops"

    def _facts(self, draw: Random) -> tuple[list[list[str]], list[_Asked]]:
        drawn, values = draw.sample(range(26**5), 15), draw.sample(range(10**4, 10**5), 3)
        names = ["".join(ascii_uppercase[n // 26**i % 26] for i in range(5)) for n in drawn]
        right = [f"VAR {names[n - 1]}" if n % 5 else values[n // 5] for n in range(15)]
        facts = [f" VAR {name} = {value}." for name, value in zip(names, right, strict=True)]
        question = f"Which five variables (VAR) are {values[0]}, directly or through others?"
        return [facts[:5], facts[5:10], facts[10:]], [(question, names[:5])]


class CommonWords(Ruler):
    """A list in which ten words occur 30 times each and others three times; a depth is a draw."""

    name: ClassVar[str] = "ruler:cwe"
    summary: ClassVar[str] = "RULER-like, made from the seed: the 10 most frequent words of a list"
    filled: ClassVar[bool] = False

    def _task(self, draw: Random, by: Reading, length: int, depth: float, hay: _Hay) -> _Task:
        question = "Which ten words occur most often in the list?"
        room = length - sum(by.count(self.template.render(question)))
        adjectives, things, people, *_ = read_data("synthetic", "words")["filler"].values()
        pairs = list(map("-".join, product(adjectives, [*things, *people])))
        single = sorted([*adjectives, *things, *people], key=lambda word: draw.random())
        words = [w for w in single if sum(w in other for other in single) == 1]
        common, known = words[:10], [*words[10:], *draw.sample(pairs, len(pairs))]
        rare = [word for word in known if not any(one in word for one in common)]
        said = [*common * 30, *(word for word in rare for _ in range(3))]
        listed = list(enumerate(said[: max(0, room)], start=1))
        words, numbers = [f" {word}\n" for _, word in listed], [f"{n}." for n, _ in listed]
        tokens = map(sum, zip(by.count(words), by.count(numbers), strict=True))
        fits = bisect_right(list(accumulate(tokens)), room) // 3 * 3
        if not 330 <= fits < len(said):
            raise ConfigError(f"`grid` {length}: {self.name} has 330-{len(said)} words", hint=_HINT)
        said = draw.sample(said[:fits], fits)
        lines = [f"{number}. {word}\n" for number, word in enumerate(said, start=1)]
        texts = ["".join(lines[n : n + _LINES]) for n in range(0, fits, _LINES)]
        return (question, sorted(common, key=said.index)), texts, ()
