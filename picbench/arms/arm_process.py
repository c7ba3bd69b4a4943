"""The child process of an arm: builds the engine and answers the parent until it disconnects.

Run as ``python -m picbench.arms.arm_process FD PARENT``; FD is the child's end of the connection,
PARENT the process id of the parent.
"""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from picbench.arms.messages import Call, Failure, Group, GroupResult
from picbench.engines.config import EngineConfig
from picbench.engines.request import Request, Result
from picbench.errors import EngineError, PicBenchError

if TYPE_CHECKING:
    from picbench.engines.engine import Engine

#: From linux/prctl.h: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1

Build = Callable[[], AbstractContextManager["Engine"]]


def open_engine(config: EngineConfig) -> AbstractContextManager["Engine"]:
    """The real engine; vLLM is imported here, hence only in the arm's process."""
    from picbench.engines.engine import Engine

    return Engine(config)


def serve(connection: Connection) -> None:
    """Build the engine, send its description, then answer every message.

    The first message builds the engine. A Group is answered by a GroupResult, a Call by what
    its function returns. An error of start-up crosses as a PicBenchError object. Ends on None or
    when the parent is gone.
    """
    try:
        build: Build = connection.recv()
        with build() as engine:
            _answer(engine, connection)
    except (EOFError, BrokenPipeError):
        return  # The parent is gone.
    except Exception as error:
        traceback.print_exc()
        with suppress(BrokenPipeError):
            connection.send(_portable(error))


def run_group(engine: "Engine", group: Group) -> GroupResult:
    """Run a group under a fresh ledger; after a failure, find out which requests fail."""
    engine.measure()
    engine.watch_compilations()
    before, times, evicted = engine.moved, engine.step_times, engine.evictions
    started = time.perf_counter()
    try:
        outcomes: Sequence[Result | Failure] = engine.generate(
            group.requests, concurrency=group.concurrency, arrivals=group.arrivals
        )
        clean = True
    except Exception as error:
        outcomes, clean = _isolate(engine, group.requests, error), False
    busy = time.perf_counter() - started
    moved = _since(before, engine.moved)
    return GroupResult(
        tuple(outcomes),
        busy,
        tuple(engine.memory),
        clean,
        moved,
        engine.step_times - times,
        tuple(engine.compilations),
        {kind: count - evicted[kind] for kind, count in engine.evictions.items()},
    )


def _since(
    before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    start = {name: before.get(name, (0, 0)) for name in now}
    return {n: (now[n][0] - start[n][0], now[n][1] - start[n][1]) for n in now}


def _answer(engine: "Engine", connection: Connection) -> None:
    engine.warm_up()
    engine.reset()
    connection.send(engine.describe())
    while (message := connection.recv()) is not None:
        connection.send(_reply(engine, message))


def _reply(engine: "Engine", message: Group | Call) -> Any:
    if isinstance(message, Group):
        return run_group(engine, message)
    try:
        return message.function(engine)
    except Exception as error:
        traceback.print_exc()
        return _portable(error)


def _isolate(
    engine: "Engine", requests: Sequence[Request], error: Exception
) -> list[Result | Failure]:
    if len(requests) == 1:
        return [_failure(error)]
    return [_alone(engine, request) for request in requests]


def _alone(engine: "Engine", request: Request) -> Result | Failure:
    try:
        return engine.generate([request], concurrency=1)[0]
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> Failure:
    traceback.print_exception(error)
    return Failure(str(_portable(error)))


def _portable(error: Exception) -> PicBenchError:
    """An error that another process can unpickle: foreign ones become EngineError."""
    if isinstance(error, PicBenchError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent is killed; Linux alone can.

    An engine that computes for no one holds memory and cores that the next one needs. `parent` is
    the parent's process id: it may be gone already.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
