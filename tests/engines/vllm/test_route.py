"""`picbench route` before two servers, with an indexer of their events.

The indexer is that of ai-dynamo-runtime where it is installed, else one that reads the same events.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from http_server import MODEL, HttpServer, free_port, plain_command, running

from picbench.engines.vllm.marks import DocumentMarks
from picbench.engines.vllm.parts import PartReader, read_kinds
from picbench.engines.vllm.route import RoutedServer, Router
from picbench.engines.vllm.serve import TEMPLATE
from picbench.workloads.testbed import model_path

DOCUMENTS = [
    f"The keeper of lighthouse {n} wrote a letter to the harbour master every evening of the year, "
    f"and {n} ships of the town of Arden passed the light in the {n}th winter of the long war."
    for n in range(8)
]

INDEXER = (
    ["-m", "dynamo.indexer", "--port"]
    if find_spec("dynamo")
    else [str(Path(__file__).with_name("indexer.py"))]
)


@dataclass(slots=True)
class Fleet:
    """Two servers, their processes, an indexer's port and process, and routers with and without."""

    servers: list[HttpServer]
    processes: list["subprocess.Popen[bytes]"]
    port: int
    indexer: "subprocess.Popen[bytes]"
    client: httpx.Client
    without: httpx.Client

    def ask(self, *documents: str, client: httpx.Client | None = None, **more: Any) -> Any:
        """The answer to a chat about documents between marks."""
        marked = "\n".join(f"<<doc>>{one}<</doc>>" for one in documents)
        messages = [{"role": "user", "content": f"{marked}\nWho wrote?"}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 2, **more}
        return (client or self.client).post("/v1/chat/completions", json=asked)

    def known(self, text: str) -> bool:
        """Whether the indexer knows of a server with a text."""
        asked = {"model": MODEL, "prompt": text, "add_special_tokens": False}
        tokens = self.servers[1].client.post("/tokenize", json=asked).json()["tokens"]
        query = {"token_ids": tokens, "model_name": "picbench"}
        url = f"http://127.0.0.1:{self.port}/query"
        return bool(httpx.post(url, json=query, timeout=60).json()["scores"])


@contextmanager
def started(*words: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *words], stdout=output, stderr=output)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).is_success
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder, given, contexts = tmp_path_factory.mktemp("fleet"), list[str](), []
    for number in range(2):
        (folder / str(number)).mkdir()
        port, *events = (free_port() for _ in range(3))
        # An endpoint without an asterisk is one that vLLM connects to.
        bound = zip(("endpoint", "replay_endpoint"), events, strict=True)
        places = {name: f"tcp://*:{at}" for name, at in bound}
        told = json.dumps({"enable_kv_cache_events": True, **places})
        pic = json.dumps({"pic": {"marks": True, "bos_token": 0}})
        flags = (
            "--additional-config",
            pic,
            "--kv-events-config",
            told,
            "--chat-template",
            TEMPLATE,
        )
        command = plain_command(model_path(), port, *flags, "--enable-prompt-tokens-details")
        contexts.append(running(command, folder / str(number), port))
        given += ["--server", f"http://127.0.0.1:{port}"]
        given += [f"tcp://127.0.0.1:{at}" for at in events]
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda context: context.__enter__(), contexts))
        for context in contexts:
            stack.push(context.__exit__)
        indexer, clients = free_port(), []
        process = stack.enter_context(started(*INDEXER, str(indexer), log=folder / "indexer.log"))
        for asked in (indexer, 1):
            port = free_port()
            words = ("route", *given, "--indexer", f"http://127.0.0.1:{asked}", "--port", str(port))
            log = folder / f"router {asked}.log"
            stack.enter_context(started("-m", "picbench", *words, log=log))
            url = f"http://127.0.0.1:{port}"
            clients.append(stack.enter_context(httpx.Client(base_url=url, timeout=60)))
            until(lambda: answers(clients[-1], "/health"))
        servers, processes = zip(*found, strict=True)
        made = Fleet([*servers], [*processes], indexer, process, *clients)
        until(lambda: registered(made) == 2)
        yield made
        made.indexer.kill()


def registered(fleet: Fleet) -> int:
    """How many servers the indexer listens to."""
    try:
        return len(httpx.get(f"http://127.0.0.1:{fleet.port}/workers").json())
    except httpx.TransportError:
        return 0


def test_documents_go_where_they_are(fleet: Fleet) -> None:
    first = [fleet.ask(document) for document in DOCUMENTS]
    until(lambda: all(map(fleet.known, DOCUMENTS)))
    places = [answer.headers["x-pic-server"] for answer in first]
    assert set(places) == {"0", "1"}
    again = [fleet.ask(document, max_tokens=3) for document in DOCUMENTS]
    assert [answer.headers["x-pic-server"] for answer in again] == places
    assert all(cached(answer) > 0 for answer in again)
    # Two documents go where the longer one is.
    longer = 3 * f"All of {DOCUMENTS[0]} "
    here = fleet.ask(longer).headers["x-pic-server"]
    other = DOCUMENTS[next(n for n, place in enumerate(places) if place != here)]
    until(lambda: fleet.known(longer))
    assert fleet.ask(other, longer).headers["x-pic-server"] == here
    # Parts, and a prompt without chunks.
    part = [{"type": "document", "text": DOCUMENTS[1]}, {"type": "text", "text": "Who?"}]
    messages = [{"role": "user", "content": part}]
    assert fleet.ask(messages=messages).headers["x-pic-server"] == places[1]
    plain = {"prompt": " ".join(DOCUMENTS[:3]), "max_tokens": 2, "model": MODEL}
    plain["add_special_tokens"] = False
    one = fleet.client.post("/v1/completions", json=plain)
    until(lambda: fleet.known(plain["prompt"]))
    for _ in range(3):
        same = fleet.client.post("/v1/completions", json=plain)
        assert same.headers["x-pic-server"] == one.headers["x-pic-server"]
        assert cached(same) > 0


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_answers_pass_as_they_are(fleet: Fleet) -> None:
    asked = {"model": MODEL, "prompt": "The keeper", "max_tokens": 8, "temperature": 0}
    straight = fleet.servers[0].client.post("/v1/completions", json=asked).json()
    routed = fleet.client.post("/v1/completions", json=asked)
    assert routed.json()["choices"] == straight["choices"]
    with fleet.client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 4
    refused = fleet.ask(vllm_xargs={"pic_span": [0, 3]})
    assert refused.status_code == 400
    assert "did you mean 'pic_spans'" in refused.json()["error"]["message"]
    assert fleet.client.post("/v1/completions", content=b"{").status_code == 400
    assert fleet.client.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert fleet.client.get("/nothing?a=b").status_code == 404


def test_a_client_that_leaves_ends_its_request(fleet: Fleet) -> None:
    asked = {"model": MODEL, "prompt": "The keeper", "max_tokens": 400, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        fleet.client.post("/v1/completions", json=asked, timeout=0.3)
    for server in fleet.servers:
        until(lambda server=server: server.metric("num_requests_running") == 0)  # type: ignore[misc]


def test_without_an_indexer_servers_take_turns(fleet: Fleet) -> None:
    found = [fleet.ask(DOCUMENTS[0], client=fleet.without) for _ in range(4)]
    places = [answer.headers["x-pic-server"] for answer in found]
    assert places in (["0", "1"] * 2, ["1", "0"] * 2)


def test_an_indexer_that_died_and_is_back_knows_what_was_before(
    fleet: Fleet, tmp_path: Path
) -> None:
    assert fleet.ask(DOCUMENTS[5]).status_code == 200
    fleet.indexer.kill()
    fleet.indexer.wait()
    assert all(fleet.ask(document).status_code == 200 for document in DOCUMENTS)
    with started(*INDEXER, str(fleet.port), log=tmp_path / "indexer.log") as fleet.indexer:
        until(lambda: registered(fleet) == 2)
        # The next events of both tell that some were missed.
        for server in fleet.servers:
            server.post("/v1/completions", prompt="Some new text. " * 20, max_tokens=2)
        until(lambda: fleet.known(DOCUMENTS[5]))
        found = [fleet.ask(DOCUMENTS[5], max_tokens=3) for _ in range(3)]
        assert all(cached(answer) > 0 for answer in found)
        dead_server(fleet)


def dead_server(fleet: Fleet) -> None:
    """Nothing fails but what it was answering, and all goes to the other one."""
    gone = 0
    process = psutil.Process(fleet.processes[gone].pid)
    # Its engine outlives a server that is killed alone.
    for each in (process, *process.children(recursive=True)):
        each.kill()
    fleet.processes[gone].wait()
    found = [fleet.ask(document) for document in DOCUMENTS * 2]
    assert {(a.status_code, a.headers["x-pic-server"]) for a in found} == {(200, "1")}
    assert fleet.ask(DOCUMENTS[0], client=fleet.without).status_code == 200
    until(lambda: registered(fleet) == 1)


def router(*servers: RoutedServer) -> Router:
    marks = DocumentMarks.of(True)
    assert marks is not None
    return Router(servers, "", PartReader(marks, read_kinds(["documents"])), indexed=True)


def test_what_was_just_sent_counts_as_a_hit() -> None:
    """Until the request has ended, when the server has told of it."""

    class Index:
        async def post(self, path: str, json: Any) -> httpx.Response:
            known = {"0": {"0": 16}} if json["token_ids"] == (1,) * 16 else {}
            request = httpx.Request("POST", "http://index")
            return httpx.Response(200, json={"scores": known}, request=request)

    found = router(server(), server())
    found._index = Index()
    found._sent = {(1,) * 16: 1, (2,) * 40: 1}
    chunks = [(1,) * 16, (2,) * 40, (3,) * 20]
    assert asyncio.run(found._hits(chunks)) == {0: 16, 1: 40}


def server(**given: Any) -> RoutedServer:
    return RoutedServer("http://a", "tcp://a:1", "tcp://a:2", up=True, **given)


@pytest.mark.parametrize(
    ("servers", "hits", "first"),
    [
        ([server(), server()], {1: 16}, 1),
        ([server(), server()], {0: 32, 1: 16}, 0),
        # As many tokens: the one with less to do, of late or now.
        ([server(in_flight=2), server(in_flight=1)], {0: 16, 1: 16}, 1),
        ([server(missed=90), server(missed=10)], {}, 1),
        # Twice as busy as the other is not too busy, with many more in flight it is.
        ([server(in_flight=4), server(in_flight=2)], {0: 16}, 0),
        ([server(in_flight=20), server(in_flight=2)], {0: 16}, 1),
    ],
)
def test_hits_count_more_than_load_up_to_a_point(
    servers: list[RoutedServer], hits: dict[int, int], first: int
) -> None:
    from collections import Counter

    assert router(*servers)._order(Counter(hits))[0] == first


def test_an_answer_that_breaks_off_before_it_began_is_502() -> None:
    """In the form of vLLM's own errors; a server that refuses connections is passed over."""

    async def ask(port: int) -> httpx.Response:
        found = router(RoutedServer(f"http://127.0.0.1:{port}", "", "", up=True))
        found.indexed = False
        transport = httpx.ASGITransport(found)
        async with (
            httpx.AsyncClient() as found._client,
            httpx.AsyncClient(transport=transport, base_url="http://router") as client,
        ):
            return await client.get("/v1/models")

    async def breaking() -> list[httpx.Response]:
        async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.close()

        async with await asyncio.start_server(leave, "127.0.0.1", 0) as broken:
            return [await ask(broken.sockets[0].getsockname()[1]), await ask(1)]

    broken, refused = asyncio.run(breaking())
    assert (broken.status_code, refused.status_code) == (502, 503)
    assert broken.json()["error"] == {
        **{"message": "the server broke off", "type": "BadGatewayError"},
        **{"code": 502, "param": None},
    }
    assert refused.json()["error"]["message"] == "no server is up"
