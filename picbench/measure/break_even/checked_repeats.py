"""What engines took for traces that were predicted: the file that repeats are added to."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from picbench.errors import ConfigError, IncomparableRuns
from picbench.grid.measured_grid import ArmCell, GridFacts, GridPoint
from picbench.measure.break_even.same_engines import refuse_other_engines
from picbench.output.json_file import locked, write_json
from picbench.validation import first_refusal

SCHEMA = 1

#: What traces are drawn with where nothing else is asked for, or said.
SEED = 77

#: The point of a control, and what an arm took there.
ControlCell = tuple[GridPoint, ArmCell]


@dataclass(frozen=True, slots=True)
class CheckedServing:
    """What an arm took in one repeat of a trace, alone and together; before each, of a control."""

    alone: ArmCell
    together: ArmCell
    controls: tuple[ControlCell, ControlCell]


@dataclass(frozen=True, slots=True)
class CheckedRepeat:
    """What each arm took for each trace in the repeat of this number, which begin at 0."""

    number: int
    traces: Mapping[str, Mapping[str, CheckedServing]]


@dataclass(frozen=True, slots=True)
class CheckedRepeats:
    """All repeats of engines that `facts` describe, in the order of their numbers.

    Their traces were drawn with `seed`.
    """

    facts: GridFacts
    repeats: Sequence[CheckedRepeat]
    seed: int = SEED


def read_repeats(path: Path) -> CheckedRepeats | None:
    """The repeats in a file, None if there is no file; ConfigError for what is no such file."""
    if not path.exists():
        return None
    try:
        found: object = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.pop("schema", None) != SCHEMA:
            raise ValueError(f"no repeats of schema {SCHEMA}")
        return TypeAdapter(CheckedRepeats).validate_python(found)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {_reason(error)}", hint="name another `output`") from error


def read_own_repeats(path: Path, facts: GridFacts, seed: int = SEED) -> CheckedRepeats:
    """Those of engines that `facts` are of, none of them if there is no file.

    Raises IncomparableRuns for those of others, and of traces that were drawn with another seed.
    """
    found = read_repeats(path) or CheckedRepeats(facts, (), seed)
    refuse_other_engines(path, found.facts, facts)
    refuse_other_traces(path, found, seed)
    return found


def refuse_other_traces(path: Path, found: CheckedRepeats, seed: int) -> None:
    """Raise IncomparableRuns for repeats of traces that were drawn with another seed."""
    if found.seed != seed:
        raise IncomparableRuns(
            f"{path}: its traces were drawn with seed {found.seed}, not {seed}",
            hint="name another `output`, or that `seed`",
        )


def add_repeat(
    path: Path, facts: GridFacts, repeat: CheckedRepeat, seed: int = SEED
) -> CheckedRepeats:
    """Add to a file that other processes may add to, too; all repeats that it has then."""
    with locked(path):
        known = {one.number: one for one in read_own_repeats(path, facts, seed).repeats}
        joined = {repeat.number: repeat} | known
        found = CheckedRepeats(facts, [joined[number] for number in sorted(joined)], seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"schema": SCHEMA} | asdict(found))
    return found


def _reason(error: Exception) -> str:
    return str(first_refusal(error) if isinstance(error, ValidationError) else error)
