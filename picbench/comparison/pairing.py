"""Samples that two arms both answered."""

from collections.abc import Sequence
from math import isqrt
from typing import TypeVar

from picbench.comparison.measured_arm import MeasuredArm
from picbench.errors import IncomparableRuns

Value = TypeVar("Value")


class Pairs:
    """The samples that both arms answered, in the order of the first.

    Raises IncomparableRuns where there is none.
    """

    def __init__(self, before: MeasuredArm, after: MeasuredArm) -> None:
        places = {sample: place for place, sample in enumerate(after.samples)}
        self.before, self.after = before, after
        self.samples = [sample for sample in before.samples if sample in places]
        self._first = [p for p, sample in enumerate(before.samples) if sample in places]
        self._second = [places[sample] for sample in self.samples]
        if not self.samples:
            raise IncomparableRuns(
                f"{before.name} and {after.name} have no answered sample in common",
                hint="compare runs of the same workload",
            )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def unpaired(self) -> int:
        """Samples that one arm alone answered."""
        return len({*self.before.samples} ^ {*self.after.samples})

    def of(
        self, before: Sequence[Value], after: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Values of the pairs, from a column of each arm."""
        return [before[i] for i in self._first], [after[i] for i in self._second]

    def check_prompts(self) -> None:
        """Raise IncomparableRuns where samples of one name have different prompts."""
        prompts = zip(self.samples, *self.of(self.before.prompts, self.after.prompts), strict=True)
        differ = [sample for sample, first, second in prompts if first != second]
        if differ:
            raise IncomparableRuns(
                f"{len(differ)} of {len(self)} samples have other prompts, the first: {differ[0]}",
                hint="compare runs of the same workload and tokenizer",
            )

    @property
    def documents(self) -> list[str]:
        """What is independent in scores: sets of documents."""
        return [self.before.clusters[i] for i in self._first]

    @property
    def rounds(self) -> list[int]:
        """What is nearly independent in times: groups of requests that waited for each other.

        Where there is a single one (an open loop), batches of neighbours. A round of all repeats is
        one: these are the same requests, and relate to each other as they did before.
        """
        rounds = [self.before.rounds[i] for i in self._first]
        return rounds if len(set(rounds)) > 1 else self.batches

    @property
    def repeats(self) -> list[int]:
        """The repeat of each: what lasts for minutes is the same for all requests of one."""
        return [self.before.repeats[i] for i in self._first]

    @property
    def interleaved(self) -> bool:
        """Whether two arms of one run took turns within a repeat, so that drift hit both alike.

        With a single round, as in an open loop, one served everything and then the other did.
        """
        return len(set(self.before.rounds)) > 1

    @property
    def batches(self) -> list[int]:
        """Batches of neighbouring rounds, or requests, as many as each has of these.

        What slows a machine down lasts longer than a round, so that rounds of separate runs are not
        independent: neighbours had correlations of 0.6 (batch means, as for any time series).
        """
        numbers = [self.before.rounds[i] for i in self._first]
        if len(set(numbers)) == 1:
            numbers = [self.before.places[i] for i in self._first]
        known = sorted(set(numbers))
        size = isqrt(len(known))
        batches = {number: place // size for place, number in enumerate(known)}
        return [batches[number] for number in numbers]
