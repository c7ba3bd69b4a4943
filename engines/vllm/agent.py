"""A worker's own KV connector.

vLLM keeps the worker's connector in a global of the process
(vllm/distributed/kv_transfer/kv_transfer_state.py). Several engines may live in one process, with
and without picbench, so a worker puts its connector there for as long as it works, and no longer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state as state


@dataclass(slots=True)
class Agent:
    """The connector of one worker, once the worker has made it."""

    connector: Any = None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Stand in vLLM's global; what others put there comes back afterwards."""
        before, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, self.connector
        try:
            yield
        finally:
            self.connector, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, before
