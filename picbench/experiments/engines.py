"""Engines that are up at once, each in a process of its own, for as long as they are measured."""

import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.run.server import Server, launch

#: Starts the process of an engine: its name, its settings, its log.
Launcher = Callable[[str, EngineConfig, Path], Server]


@contextmanager
def started_engines(
    configs: Mapping[str, EngineConfig], launcher: Launcher | None = None
) -> Iterator[tuple[Mapping[str, Server], Mapping[str, Mapping[str, object]]]]:
    """The engines and what each says of itself, by name; they end when the context does.

    Raises the error of an engine that cannot start.
    """
    engines: dict[str, Server] = {}
    end = "kill"
    with TemporaryDirectory(prefix="picbench-") as logs:
        try:
            for name, config in configs.items():
                engines[name] = (launcher or launch)(name, config, Path(logs) / f"{name}.log")
            yield engines, {name: engine.ready() for name, engine in engines.items()}
            end = "close"
        finally:
            # Each takes seconds to end.
            with ThreadPoolExecutor() as threads:
                list(threads.map(methodcaller(end), engines.values()))


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


def random_tokens(count: int, name: str, vocabulary: int = 1000) -> tuple[int, ...]:
    """`count` tokens that belong to `name`.

    The first 16 of the vocabulary, which are often special, are left out.
    """
    source = random.Random(name)
    return tuple(source.randrange(16, vocabulary) for _ in range(count))
