"""vLLM's server, whose engine and worker are forked where their libraries are already loaded.

Run as ``python prefork.py MODULE FLAGS...``. With ``-m MODULE`` each of the three processes imports
vLLM anew, which takes nearly all of a start. What is forked has loaded libraries and nothing else:
the engine and the worker get their arguments, load the plug-in and build everything as spawned ones
do.
"""

import fcntl
import json
import os
import re
import runpy
import socket
import sys
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import spawn, util
from pathlib import Path
from typing import NoReturn

#: What an engine and a worker on a CPU import before they load plug-ins.
LIBRARIES = (
    "transformers",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
_SPAWNED = re.compile(r"spawn_main\(tracker_fd=(\d+), pipe_handle=(\d+)\)")

#: Above the descriptors that a process may be given.
_HIGH = 512


def main(module: str) -> None:
    """Become the server: the module with the arguments of this process."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    for library in (module, *LIBRARIES):
        import_module(library)
    # After each message a worker would wait for the next in a loop that takes a core, for 1 s.
    SpinCondition.__init__.__defaults__ = (0.01,)
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        raise RuntimeError("a library has started a thread: forks would lack it")
    sys.path[0] = str(Path.cwd())  # As with `python -m`.
    _prepare()
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    _end(0)


def _prepare() -> None:
    """Fork a child that waits to be what this process spawns first."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _wait(theirs)
    theirs.close()
    spawned, waiting = util.spawnv_passfds, [_raised(ours)]

    def spawnv_passfds(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
        found = next(filter(None, map(_SPAWNED.search, map(str, words))), None)
        if not (found and waiting):
            return int(spawned(path, words, passed))  # type: ignore[arg-type]
        told = json.dumps([*map(int, found.groups()), [*passed], dict(os.environ)])
        with waiting.pop() as child:
            socket.send_fds(child, [told.encode()], [*passed])
            return int.from_bytes(child.recv(8), "big")

    util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


def _wait(parent: socket.socket) -> None:
    """Be what is spawned, with its descriptors and variables; end with the parent."""
    told, found, _, _ = socket.recv_fds(parent, 1 << 20, 64)
    if not told:
        os._exit(0)
    tracker, pipe, passed, variables = json.loads(told)
    parent.send(os.getpid().to_bytes(8, "big"))
    parent.close()
    raised = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH) for descriptor in found]
    for descriptor in found:
        os.close(descriptor)
    _prepare()
    for descriptor, number in zip(raised, passed, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = ["-c", "--multiprocessing-fork"]
    try:
        spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)  # type: ignore[no-untyped-call]
    except SystemExit as end:
        _end(int(end.code or 0))


def _end(code: int) -> NoReturn:
    """End as forked processes do: to free a million objects of libraries first takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _raised(end: socket.socket) -> socket.socket:
    """The same end of a connection, with a descriptor that is given to no process."""
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH))


if __name__ == "__main__":
    main(sys.argv[1])
