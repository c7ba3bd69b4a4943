"""Workloads of a sweep, each loaded once for all cells that send the same requests."""

from collections import Counter
from collections.abc import Callable, Iterable

from picbench.inputs.workload import Workload
from picbench.run.config import RunConfig

#: Settings that no workload depends on: of engines, of the order of requests, of what is written.
UNREAD = frozenset(
    {
        "arm",
        "cache",
        "compile_order",
        "concurrency",
        "device",
        "dtype",
        "eager",
        "keys_without_rope",
        "kv_blocks",
        "max_running",
        "on_pressure",
        "output",
        "repeats",
        "same_engine",
        "self_check",
        "shared_decode",
        "slo",
        "tensor_parallel",
        "tiers",
    }
)

#: Prompt tokens that are kept at a time; a token takes about 40 bytes.
ROOM = 20_000_000


class SharedWorkloads:
    """Loads workloads for configurations that will ask for them, `uses` in all.

    A workload stays until its last use, as far as there is room; otherwise it is loaded again.
    """

    def __init__(
        self,
        load: Callable[[RunConfig], Workload],
        uses: Iterable[RunConfig],
        room: int = ROOM,
    ) -> None:
        self._load = load
        self._left = Counter(map(_decisive, uses))
        self._room = room
        self._kept: dict[str, Workload] = {}

    def load(self, config: RunConfig) -> Workload:
        """The workload of a configuration; raises what loading it raises."""
        key = _decisive(config)
        found = self._kept.get(key) or self._load(config)
        self._left[key] -= 1
        self._settle(key, found)
        return found

    def _settle(self, key: str, workload: Workload) -> None:
        """Keep a workload that is needed again, where there is room for it."""
        if self._left[key] <= 0:
            self._kept.pop(key, None)
        elif self._tokens(workload, *self._kept.values()) <= self._room:
            self._kept[key] = workload

    @staticmethod
    def _tokens(*workloads: Workload) -> int:
        return sum(sample.prompt_tokens for workload in workloads for sample in workload.samples)


def _decisive(config: RunConfig) -> str:
    return config.model_dump_json(exclude=set(UNREAD))
