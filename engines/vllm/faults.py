"""Faults: exceptions of picbench's own that end one request instead of the engine."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import TypeVar

T = TypeVar("T")
Blamed = str | Callable[[], str | None] | None

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Faults:
    """The requests that faults are going to end, with the line that their users get.

    Whoever calls code that may raise on behalf of a request calls it through `attempt`; whoever can
    end requests ends those of `take`. `concerned` names the requests that end with a request.
    """

    concerned: Callable[[str], Iterable[str]] = lambda request_id: (request_id,)
    _reasons: dict[str, str] = field(default_factory=dict)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._reasons

    def attempt(self, doing: str, blamed: Blamed, call: Callable[[], T], otherwise: T) -> T:
        """Return what `call` returns; if it raises, blame the request and return `otherwise`.

        `blamed` is its id, or finds it after a fault; without one the exception is only logged.
        """
        try:
            return call()
        except Exception as error:
            request_id = blamed() if callable(blamed) else blamed
            reason = _describe(doing, error)
            _LOG.error("%s: %s", request_id or "no request", reason)
            _LOG.debug("the exception", exc_info=error)
            if request_id is not None:
                self.blame(request_id, reason)
            return otherwise

    def succeeds(self, doing: str, blamed: Blamed, call: Callable[[], object]) -> bool:
        """Whether `call` returns; if it raises, blame the request."""

        def run() -> bool:
            call()
            return True

        return self.attempt(doing, blamed, run, False)

    def blame(self, request_id: str, reason: str) -> None:
        """End a request and those that end with it; the first fault is the one reported."""
        for name in self.concerned(request_id):
            self._reasons.setdefault(name, reason)

    def take(self) -> dict[str, str]:
        """The requests to end and their reasons, once."""
        taken, self._reasons = self._reasons, {}
        return taken


def _describe(doing: str, error: Exception) -> str:
    """One line: what was done, the exception, and the line of code that raised it."""
    message = " ".join(str(error).split()) or "no message"
    trace = extract_tb(error.__traceback__)
    place = f" ({Path(trace[-1].filename).name}:{trace[-1].lineno})"
    return f"picbench failed to {doing}: {type(error).__name__}: {message}{place}"
