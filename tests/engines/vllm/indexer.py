"""An indexer with the interface of ``python -m dynamo.indexer``, which tests use in its place.

It subscribes to vLLM's own publisher, decodes with vLLM's own types, asks for what it has missed,
and finds prefixes. Run as a program, it serves on the port that is its argument.
"""

import asyncio
import sys
from pathlib import Path

import msgspec
import uvicorn
import zmq
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from vllm.distributed.kv_events import KVEventBatch

sys.path.insert(0, str(Path(__file__).parents[2]))

from kv_index import KvIndex


class Indexer:
    """What it knows of each server, by its number and its model."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.known: dict[tuple[int, str], KvIndex] = {}
        self.tasks: dict[tuple[int, str], asyncio.Task[None]] = {}

    async def listen(self, index: KvIndex, events: str, replay: str) -> None:
        decode, expected = msgspec.msgpack.Decoder(KVEventBatch).decode, 0
        with self.context.socket(zmq.SUB) as socket:
            socket.connect(events)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            while True:
                _, number, batch = await socket.recv_multipart()
                if int.from_bytes(number, "big") > expected:
                    for missed in await self.missed(replay, expected, number):
                        index.apply(decode(missed).events)
                expected = int.from_bytes(number, "big") + 1
                index.apply(decode(batch).events)

    async def missed(self, replay: str, first: int, number: bytes) -> list[bytes]:
        """The batches from `first` to the one before `number`, which vLLM's publisher repeats."""
        found = list[bytes]()
        with self.context.socket(zmq.DEALER) as socket:
            socket.connect(replay)
            await socket.send_multipart((b"", first.to_bytes(8, "big")))
            while True:
                *_, at, batch = await socket.recv_multipart()
                if not batch:
                    return found
                if at < number:
                    found.append(batch)

    async def register(self, request: Request) -> JSONResponse:
        asked = await request.json()
        key = asked["instance_id"], asked["model_name"]
        assert asked["block_size"] == 16
        self.known[key] = KvIndex()
        listening = self.listen(self.known[key], asked["endpoint"], asked["replay_endpoint"])
        self.tasks[key] = asyncio.create_task(listening)
        return JSONResponse({"status": "ok"}, 201)

    async def unregister(self, request: Request) -> JSONResponse:
        asked = await request.json()
        key = asked["instance_id"], asked["model_name"]
        self.tasks.pop(key).cancel()
        del self.known[key]
        return JSONResponse({"status": "ok"})

    async def workers(self, request: Request) -> JSONResponse:
        return JSONResponse([{"instance_id": n, "model_name": model} for n, model in self.known])

    async def query(self, request: Request) -> JSONResponse:
        asked = await request.json()
        scores = {
            str(number): {"0": 16 * found}
            for (number, model), index in self.known.items()
            if model == asked["model_name"] and (found := index.found(asked["token_ids"]))
        }
        return JSONResponse({"scores": scores})


if __name__ == "__main__":
    indexer = Indexer()
    routes = [
        Route("/register", indexer.register, methods=["POST"]),
        Route("/unregister", indexer.unregister, methods=["POST"]),
        Route("/workers", indexer.workers),
        Route("/query", indexer.query, methods=["POST"]),
    ]
    uvicorn.run(Starlette(routes=routes), port=int(sys.argv[1]))
