"""What a run needs of an arm's server, wherever its engine is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from picbench.arms.messages import GroupResult
from picbench.engines.request import Request


class ArmServer(Protocol):
    """Serves the requests of one arm; EngineError when its engine is gone."""

    def ready(self) -> Mapping[str, object]:
        """Wait until it is up and return what it is."""

    def run(
        self,
        requests: Sequence[Request],
        concurrency: int | None,
        arrivals: Sequence[float] | None = None,
    ) -> GroupResult:
        """Run a group, at most `concurrency` at a time, or at `arrivals` (seconds)."""

    def reset(self) -> None:
        """Drop all cached KV."""

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the engine; EngineError also where there is no way to it."""

    def close(self) -> None:
        """Let what runs finish, and end."""

    def kill(self) -> None:
        """End at once."""
