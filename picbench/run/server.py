"""The process of an arm's engine: the parent's side, and the child that runs this module.

Run as ``python -m picbench.run.server FD PARENT``; FD is the child's end of the connection,
PARENT the process id of the parent.
"""

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import methodcaller
from pathlib import Path
from typing import Any, ClassVar

from picbench.engines.chunk_cache.tiers.notation import probe_tiers
from picbench.engines.config import EngineConfig
from picbench.engines.engine import Engine
from picbench.engines.footprint import GpuFootprint
from picbench.engines.model_config import read_model_config
from picbench.engines.request import Request, Result
from picbench.engines.vllm.device import CUDA, find
from picbench.errors import EngineError, PicBenchError
from picbench.store.provenance import arm_environment
from picbench.store.records import Failure, GroupResult

#: When requests are sent, in seconds from their group's start; None: as soon as there is room.
Arrivals = Sequence[float] | None

#: Seconds that an engine has to end by itself.
_GRACE = 20.0


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError where an engine cannot have its device or its tiers here and now."""
    if config.device == CUDA.name:
        find(config.device)
    known = config.tiers and Path(config.model).is_dir()
    footprint = GpuFootprint.of(config, read_model_config(config.model)) if known else None
    probe_tiers(config.tiers or "", footprint.block if footprint else 0)


class Server:
    """The parent's side of an arm's process, which builds an `engine`; its output goes to `log`.

    The process leads a session: the terminal's Ctrl-C reaches the parent alone, and the parent
    can end the engine together with every process that it started. All methods raise EngineError
    when the engine is gone. It also goes when it cannot measure a group or drop its cache: nothing
    is known of what it would compute next.
    """

    engine: ClassVar[type[Engine]] = Engine

    def __init__(self, name: str, config: EngineConfig, log: Path) -> None:
        check_engine(config)  # Before another process loads vLLM.
        self._name, self._log = name, log
        self._connection, theirs = Pipe()
        ends = str(theirs.fileno()), str(os.getpid())
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "picbench.run.server", *ends],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=arm_environment(),
            )
        self._send(partial(self.engine, config))

    def ready(self) -> Mapping[str, object]:
        """Wait until the engine is up; return what it is. Raises EngineError if it cannot start."""
        description: Mapping[str, object] = self._receive()
        return description

    def run(
        self, requests: Sequence[Request], concurrency: int | None, arrivals: Arrivals = None
    ) -> GroupResult:
        """Run a group; see `run_group`."""
        group = partial(run_group, requests, concurrency, arrivals)
        result: GroupResult = self._call_or_end(group)
        return result

    def reset(self) -> None:
        """Drop all cached KV."""
        self._call_or_end(methodcaller("reset"))

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the engine, in the engine's process; its error is raised here."""
        self._send(function)
        return self._receive()

    def close(self) -> None:
        """Let the engine finish and end."""
        self._send(None)
        self._wait(_GRACE)
        self.kill()

    def kill(self) -> None:
        """End the engine at once."""
        if self._connection.closed:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self._wait(5.0)
        self._process.wait()
        self._connection.close()

    def _call_or_end(self, function: Callable[[Any], Any]) -> Any:
        try:
            return self.call(function)
        except PicBenchError:
            self._send(None)
            raise

    def _wait(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def _send(self, message: object) -> None:
        # Where the process is gone, its answer tells.
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            answer = self._how_it_ended()
        if isinstance(answer, PicBenchError):
            error = type(answer)(f"arm {self._name}: {answer.message}", hint=answer.hint)
            error.add_note(log_tail(self._log, lines=30))
            raise error
        return answer

    def _how_it_ended(self) -> EngineError:
        code = self._wait(_GRACE)
        if code is None:
            end = "closed its connection"
        elif code < 0:
            end = f"was ended by {signal.Signals(-code).name}"
        else:
            end = f"ended with exit code {code}"
        words = filter(None, (f"the engine's process {end}", log_tail(self._log, lines=1)))
        hint = "if memory ran out, use fewer arms at once or a smaller `kv_blocks`"
        return EngineError(": ".join(words), hint=f"{hint}; `debug` shows its log")


def log_tail(log: Path, lines: int) -> str:
    """The last lines of a log that are not blank, without colours; empty if there is no log."""
    if not log.exists():
        return ""
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    return "\n".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])


def run_group(
    requests: Sequence[Request], concurrency: int | None, arrivals: Arrivals, engine: Engine
) -> GroupResult:
    """Run a group under a fresh ledger, at most `concurrency` at a time or at `arrivals` (seconds).

    After a failure, each request is run again alone, to find out which ones fail.
    """

    def serve(some: Sequence[Request], **pace: Any) -> Sequence[Result | Failure]:
        try:
            return engine.generate(some, **pace)
        except Exception as error:
            return [Failure(str(_portable(error)))] * len(some)

    engine.measure()
    engine.watch_compilations()
    before, times, evicted = engine.moved, engine.step_times, engine.evictions
    started = time.perf_counter()
    outcomes = serve(requests, concurrency=concurrency, arrivals=arrivals)
    clean = not any(isinstance(outcome, Failure) for outcome in outcomes)
    if not clean and len(requests) > 1:
        outcomes = [serve([request], concurrency=1)[0] for request in requests]
    busy = time.perf_counter() - started
    moved = {}
    for tier, (loaded, stored) in engine.moved.items():
        earlier = before.get(tier, (0, 0))
        moved[tier] = loaded - earlier[0], stored - earlier[1]
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


def _portable(error: Exception) -> PicBenchError:
    """Log an error; what another process can unpickle of it: foreign ones become EngineError."""
    traceback.print_exception(error)
    if isinstance(error, PicBenchError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


def _end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent, of that process id, is killed; on Linux.

    An engine that computes for no one holds memory and cores that the next one needs.
    """
    if sys.platform != "linux":
        return
    pr_set_pdeathsig = 1  # From linux/prctl.h.
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # It is gone already.
        os.kill(os.getpid(), signal.SIGKILL)


def _serve(connection: Connection) -> None:
    """Build the engine by the first message, describe it, then call each function that comes.

    Errors cross as PicBenchError objects. Ends on None or when the parent is gone.
    """
    try:
        with connection.recv()() as engine:
            engine.warm_up()
            engine.reset()
            answer = engine.describe()
            while True:
                connection.send(answer)
                function = connection.recv()
                if function is None:
                    return
                try:
                    answer = function(engine)
                except Exception as error:
                    answer = _portable(error)
    except (EOFError, BrokenPipeError):
        return  # The parent is gone.
    except Exception as error:
        with suppress(BrokenPipeError):
            connection.send(_portable(error))


if __name__ == "__main__":
    _end_with_parent(int(sys.argv[2]))
    _serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    # The engine has ended. Python would first free the objects of its libraries, for seconds.
    os._exit(0)
