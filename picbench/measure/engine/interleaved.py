"""Engines that are up at once and measured in alternation.

Whatever drifts (clock, temperature, neighbours) affects all of them alike, and one engine computes
while the others wait.
"""

from collections.abc import Callable, Mapping
from functools import partial

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.measure.started_engines import started_engines

#: From an engine and a name that no other repeat has to figures by name. It runs in the
#: engine's process, so it must be a function of a module.
Measure = Callable[[Engine, str], Mapping[str, float]]

#: Figures by arm and name, repeat by repeat.
ArmFigures = dict[str, dict[str, list[float]]]


def _always(label: str) -> bool:
    return True


def run_interleaved(
    arms: Mapping[str, EngineConfig],
    measures: Mapping[str, Measure],
    repeats: int | Mapping[str, int],
    *,
    warm_up: bool = True,
    keep: Callable[[str, ArmFigures], None] | None = None,
    go_on: Callable[[str], bool] = _always,
) -> ArmFigures:
    """All measurements of all arms, measure by measure; `repeats` of each, or by its name.

    Before the repeats of each there is one that is not kept, unless they need no `warm_up`. `keep`
    is called after each measure with its name and all that was found so far. The first measure for
    which `go_on` says no ends them all. Raises the error of an engine that cannot start or fails.
    """
    found: ArmFigures = {name: {} for name in arms}
    with started_engines(arms) as (engines, described):
        for name, what in described.items():
            print(name, what, flush=True)
        for label, measure in measures.items():
            if not go_on(label):
                break
            print(label, flush=True)
            count = repeats if isinstance(repeats, int) else repeats[label]
            for repeat in range(0 if warm_up else 1, count + 1):
                for name, engine in engines.items():
                    figures = engine.call(partial(_apply, measure, f"{label} {repeat}"))
                    if repeat:
                        _note(found[name], figures)
            if keep is not None:
                keep(label, found)
    return found


def _apply(measure: Measure, name: str, engine: Engine) -> Mapping[str, float]:
    return measure(engine, name)


def _note(found: dict[str, list[float]], figures: Mapping[str, float]) -> None:
    for key, value in figures.items():
        found.setdefault(key, []).append(value)
