"""A plug-in of vLLM that tells digests of all KV that a server's worker holds."""

import hashlib
import json
import os
import time
from pathlib import Path
from threading import Thread
from typing import Any

from server_plug_in import FOLDER

Digests = frozenset[str]


def register() -> None:
    """Have workers answer `held_kv`, by files, from a thread of their own."""
    from picbench.engines.vllm.transfer.tier_client import TierClient

    upstream = TierClient.register_kv_caches

    def registering(self: Any, layers: Any) -> None:
        upstream(self, layers)
        Thread(target=_answer, args=(self, Path(os.environ[FOLDER])), daemon=True).start()

    TierClient.register_kv_caches = registering  # type: ignore[method-assign]


def _answer(client: Any, folder: Path) -> None:
    while True:
        time.sleep(0.01)
        if (asked := folder / "asked").exists():
            asked.unlink()
            pool = [client.digest([block]).hex() for block in range(client._pool.blocks)]
            rows = client._chunks._memory
            memory = [] if rows is None else [_digest(row.numpy().tobytes()) for row in rows]
            (folder / "answer").write_text(json.dumps([pool, memory, client._pool.row_bytes]))
            (folder / "answer").rename(folder / "held")


def held_kv(folder: Path) -> tuple[Digests, Digests, int]:
    """What the blocks of a server's pool and the rows of its host memory hold, and their size."""
    (folder / "asked").touch()
    deadline = time.monotonic() + 60
    while not (folder / "held").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    pool, memory, size = json.loads((folder / "held").read_text())
    (folder / "held").unlink()
    return frozenset(pool), frozenset(memory), size


def pieces(value: bytes, size: int) -> Digests:
    """Digests of the blocks' KV in a value of a tier."""
    payload = value[64:]
    assert payload and len(payload) % size == 0
    return frozenset(_digest(payload[i : i + size]) for i in range(0, len(payload), size))


def _digest(row: bytes) -> str:
    return hashlib.sha256(row).hexdigest()
