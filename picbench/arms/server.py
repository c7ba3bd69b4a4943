"""The engine of an arm, in a process of its own."""

import functools
import operator
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from picbench.arms.arm_process import Build, open_engine
from picbench.arms.environment import arm_environment
from picbench.arms.messages import Call, Group, GroupResult
from picbench.engines.config import EngineConfig
from picbench.engines.request import Request
from picbench.errors import EngineError, PicBenchError

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
                    "picbench.arms.arm_process",
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
        """Wait until the engine is up and return what it is; EngineError if it never will be."""
        description: Mapping[str, object] = self._receive()
        return description

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """Run a group, at most `concurrency` at a time; EngineError when the engine is gone.

        With `arrivals`, each request is sent so many seconds after the group's start.
        """
        times = None if arrivals is None else tuple(arrivals)
        self._send(Group(tuple(requests), concurrency, times))
        result: GroupResult = self._receive()
        return result

    def reset(self) -> None:
        """Drop all cached KV; EngineError when the engine is gone."""
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
