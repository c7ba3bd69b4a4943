"""Which Triton kernels a worker compiles, from some time on.

A kernel that is compiled while requests are served delays all of them by seconds. vLLM warns of it
(vllm/utils/jit_monitor.py of vLLM 0.32.0); here they are counted, in the worker's process.
"""

from importlib.util import find_spec
from typing import Any


class CompilationLog:
    """Takes the place of Triton's hook after compilations, and calls the one that was there.

    Upstream: `jit_post_compile_hook` in triton/knobs.py of Triton 3.6 to 3.9. It is called for a
    kernel whose arguments differ from all before in what may be assumed of them, even if a binary
    is found in Triton's cache on disk. `kernels` are their dotted names, in order.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        self.kernels: list[str] = []

    def __call__(self, **event: Any) -> Any:
        """A kernel was compiled."""
        function = event["fn"]
        self.kernels.append(f"{function.module}.{function.name}")
        return None if self.before is None else self.before(**event)


def watch_compilations(worker: Any) -> None:
    """Begin to note the compilations of a worker's process, or begin again.

    A function for `collective_rpc`, which calls it with each worker, where that is.
    """
    del worker
    if find_spec("triton") is None:
        return
    from triton import knobs

    hook = knobs.runtime.jit_post_compile_hook
    before = hook.before if isinstance(hook, CompilationLog) else hook
    knobs.runtime.jit_post_compile_hook = CompilationLog(before)


def compiled_kernels(worker: Any) -> list[str]:
    """The kernels that were compiled since `watch_compilations`; none before it."""
    del worker
    if find_spec("triton") is None:
        return []
    from triton import knobs

    hook = knobs.runtime.jit_post_compile_hook
    return list(hook.kernels) if isinstance(hook, CompilationLog) else []
