"""Engines that are up at once, each in a process of its own, and measured in turns.

Whatever drifts (clock, temperature, neighbours) hits all of them alike, and one engine computes
while the others wait.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.errors import EngineError, PicBenchError

#: Seconds that an engine gets to end, once it is asked to and once it is told to.
GRACE, OBEY = 60.0, 10.0

#: Takes an engine and a name that no other turn has; gives figures by name. A function of a
#: module, for it crosses to the engine's process.
Measure = Callable[[Engine, str], Mapping[str, float]]

#: Figures by arm and name, turn by turn.
Found = dict[str, dict[str, list[float]]]


def compete(
    arms: Mapping[str, EngineConfig], measures: Mapping[str, Measure], repeats: int
) -> Found:
    """All measurements of all arms, measure by measure; each one's first turn is for warming up.

    Raises the error of an engine that cannot start or fails.
    """
    found: Found = {name: {} for name in arms}
    with _started(arms) as pipes:
        for label, measure in measures.items():
            print(label, flush=True)
            for turn in range(repeats + 1):
                for name, pipe in pipes.items():
                    figures = _answer(name, pipe, (measure, f"{label} {turn}"))
                    if turn:
                        _note(found[name], figures)
    return found


@contextmanager
def _started(arms: Mapping[str, EngineConfig]) -> Iterator[Mapping[str, Any]]:
    context = get_context("spawn")
    pipes: dict[str, Any] = {}
    processes = []
    try:
        for name, config in arms.items():
            pipes[name], theirs = context.Pipe()
            # No daemon: an engine of several GPUs has processes of its own.
            processes.append(context.Process(target=_serve, args=(theirs, config)))
            processes[-1].start()
            theirs.close()
        for name, pipe in pipes.items():
            print(name, _answer(name, pipe), flush=True)
        yield pipes
        for pipe in pipes.values():
            pipe.send(None)
        for process in processes:
            process.join(GRACE)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(OBEY)
            process.kill()
            process.join()


def _serve(pipe: Any, config: EngineConfig) -> None:
    """An arm's process: measure what is asked for until nothing is."""
    try:
        with Engine(config) as engine:
            pipe.send(engine.describe())
            while (asked := pipe.recv()) is not None:
                measure, name = asked
                pipe.send(measure(engine, name))
    except PicBenchError as error:
        pipe.send(error)


def _answer(name: str, pipe: Any, question: Any = None) -> Any:
    try:
        if question is not None:
            pipe.send(question)
        answer = pipe.recv()
    except (EOFError, ConnectionError):
        raise EngineError(f"{name}: the engine's process ended", hint="see its log above") from None
    if isinstance(answer, PicBenchError):
        raise answer
    return answer


def _note(found: dict[str, list[float]], figures: Mapping[str, float]) -> None:
    for key, value in figures.items():
        found.setdefault(key, []).append(value)
