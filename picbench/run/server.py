"""The child process of an arm: builds the engine and answers the parent until it disconnects.

Run as ``python -m picbench.run.server FD PARENT``; FD is the child's end of the connection,
PARENT the process id of the parent.
"""

import ctypes
import functools
import operator
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picbench.engines.config import EngineConfig
from picbench.engines.request import Request, Result
from picbench.errors import EngineError, PicBenchError
from picbench.store.provenance import arm_environment
from picbench.store.records import Call, Failure, Group, GroupResult

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


#: Seconds that an engine has to end by itself, and a process to react to a signal.
GRACE, REACTION = 20.0, 5.0

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Server:
    """The parent's side of an arm's process, whose output goes to `log`.

    The process leads a session: the terminal's Ctrl-C reaches the parent alone, and the parent
    can end the engine together with every process that it started.
    """

    def __init__(self, name: str, build: Build, log: Path) -> None:
        self._name = name
        self._log = log
        self._connection, theirs = Pipe()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "picbench.run.server",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=arm_environment(),
            )
        self._send(build)

    def ready(self) -> Mapping[str, object]:
        """Wait until the engine is up; return what it is. Raises EngineError if it cannot start."""
        description: Mapping[str, object] = self._receive()
        return description

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """Run a group, at most `concurrency` at a time. Raises EngineError when the engine is gone.

        With `arrivals`, each request is sent so many seconds after the group's start.
        """
        times = None if arrivals is None else tuple(arrivals)
        self._send(Group(tuple(requests), concurrency, times))
        result: GroupResult = self._receive()
        return result

    def reset(self) -> None:
        """Drop all cached KV. Raises EngineError when the engine is gone."""
        self.call(operator.methodcaller("reset"))

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the engine, in the engine's process."""
        self._send(Call(function))
        return self._receive()

    def close(self) -> None:
        """Let the engine finish and end."""
        with suppress(EngineError):
            self._send(None)
        self._wait(GRACE)
        self.kill()

    def kill(self) -> None:
        """End the engine at once."""
        if self._connection.closed:
            return
        self._signal(signal.SIGTERM)
        self._wait(REACTION)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._died() from None

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._died() from None
        if isinstance(answer, PicBenchError):
            raise self._with_log(
                type(answer)(f"arm {self._name}: {answer.message}", hint=answer.hint)
            )
        return answer

    def _died(self) -> PicBenchError:
        end = _describe_exit(self._wait(GRACE))
        tail = log_tail(self._log, lines=1)
        message = f"arm {self._name}: the engine's process {end}"
        return self._with_log(EngineError(f"{message}: {tail}" if tail else message, hint=_ADVICE))

    def _with_log(self, error: PicBenchError) -> PicBenchError:
        error.add_note(log_tail(self._log, lines=30))
        return error


def launch(name: str, config: EngineConfig, log: Path) -> Server:
    """Start the process of an arm called `name`; see Server."""
    return Server(name, functools.partial(open_engine, config), log)


def log_tail(log: Path, lines: int) -> str:
    """The last lines of a log that are not blank, without colours; empty if there is no log."""
    try:
        text = _COLOUR.sub("", log.read_text(errors="replace"))
    except FileNotFoundError:
        return ""
    return "\n".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])


_ADVICE = (
    "if memory ran out, use fewer arms at once or a smaller `kv_blocks`; `debug` shows its log"
)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "closed its connection"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
