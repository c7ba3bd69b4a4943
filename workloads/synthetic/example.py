"""An example: a row of LongBench's schema, and the reply that the testbed model is taught."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

from picbench.workloads.synthetic.names import Split
from picbench.workloads.synthetic.passages import Manner


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question about a context, and the reply."""

    input: str
    reply: str


@dataclass(frozen=True, slots=True)
class Example:
    """A context, the question of a row with its reply, and further ones for training.

    `gold` are the passages (from 0) that the answer needs; `kind` is the sort of question.
    `documents` numbers for each passage the account or story that it belongs to.
    """

    context: str
    exchange: Exchange
    answer: str
    kind: str
    gold: tuple[int, ...] = ()
    more: tuple[Exchange, ...] = ()
    documents: tuple[int, ...] = ()

    def row(self, dataset: str, name: str) -> dict[str, Any]:
        """The row for a JSON lines file, in LongBench's schema with three more fields."""
        return {
            "input": self.exchange.input,
            "context": self.context,
            "answers": [self.answer],
            "length": len(self.context.split()) + len(self.exchange.input.split()),
            "dataset": dataset,
            "language": "en",
            "all_classes": None,
            "_id": name,
            "gold_passages": list(self.gold),
            "qtype": self.kind,
            "documents": list(self.documents),
        }


@dataclass(frozen=True, slots=True)
class Level:
    """How hard an example is.

    `scale`, from 0 to 1, limits the size of the context; `more` is the number of further
    exchanges, `simple` the share of those about a single fact; `even` makes all sorts of
    questions equally likely. Rows of the benchmark have the default level.
    """

    scale: float = 1.0
    more: int = 0
    simple: float = 0.0
    even: bool = False
    manner: Manner = field(default_factory=Manner)

    def count(self, rng: Random, low: int, high: int) -> int:
        """Draw the number of passages of a context, from `low` to `high` at full scale."""
        most = round(2 + (high - 2) * self.scale)
        return rng.randint(min(low, most), most)


class Make(Protocol):
    """Makes example `index` of a data set."""

    def __call__(self, rng: Random, split: Split, index: int, level: Level) -> Example:
        """Draw everything from `rng`; `index` decides only what must be spread evenly."""
