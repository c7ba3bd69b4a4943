"""Far tiers whose answers a test gives."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from picbench.engines.chunk_cache.tiers.stack import Fetched, Ticket


class FarTiers:
    """A stack whose answers come when a test gives them, by default as they should be."""

    def __init__(self, *, answering: bool = True) -> None:
        self.answering = answering
        self.values: dict[bytes, bytes] = {}
        self.asked: list[tuple[Future[Any], Callable[[], Any]]] = []

    def __len__(self) -> int:
        return 1

    def store(self, items: Sequence[tuple[bytes, Any]], *, copy: bool) -> Ticket[Any]:
        def put() -> list[Any]:
            self.values |= {name: b"".join(parts) for name, parts in items}
            return [("far",)] * len(items)

        return self._ticket(len(items), (), put)

    def fetch(self, wanted: Sequence[tuple[bytes, int]]) -> Ticket[Any]:
        def get() -> list[Any]:
            found = [self.values.get(name) for name, _ in wanted]
            return [Fetched(memoryview(v), "far") if v is not None else None for v in found]

        return self._ticket(len(wanted), None, get)

    def lookup(self, names: Sequence[bytes]) -> Ticket[Any]:
        return self._ticket(
            len(names), None, lambda: ["far" if n in self.values else None for n in names]
        )

    def delete(self, names: Sequence[bytes]) -> Ticket[Any]:
        def remove() -> list[Any]:
            return [self.values.pop(name, None) for name in names]

        return self._ticket(len(names), None, remove)

    def answer(self, index: int = 0, error: Exception | None = None) -> None:
        future, call = self.asked.pop(index)
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(call())

    def close(self) -> None:
        pass

    def _ticket(self, size: int, nothing: Any, call: Callable[[], Any]) -> Ticket[Any]:
        future: Future[list[Any]] = Future()
        self.asked.append((future, call))
        if self.answering:
            self.answer()
        return Ticket(size, nothing, [(range(size), future)])
