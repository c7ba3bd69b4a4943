"""A redis-server on a free port of this machine, in memory only."""

import socket
import subprocess
import time
from pathlib import Path

import redis


class RedisProcess:
    """Starts and kills one server; every start is empty, on the same port."""

    def __init__(self, binary: str, folder: Path, *options: str) -> None:
        self._binary = binary
        self._options = options
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        # A node of a cluster also listens on the port that is 10,000 higher.
        self.port = 65_535
        while self.port > 55_535:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.port = int(probe.getsockname()[1])

    @property
    def address(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *self._options]
        self._process = subprocess.Popen(
            [self._binary, "--port", str(self.port), "--dir", str(self._folder), *options],
            stdout=subprocess.DEVNULL,
        )
        with self.client() as client:
            while not _answers(client):
                if self._process.poll() is not None:
                    raise RuntimeError(f"{self._binary} ended with {self._process.returncode}")
                time.sleep(0.01)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def client(self) -> redis.Redis:
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
