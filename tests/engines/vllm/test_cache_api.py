"""Two servers on one redis: their cache API, what they share, and what they do not tell."""

import hashlib
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from held_kv import held_kv, pieces
from http_server import HttpServer, http_server, series
from server_plug_in import environment

from picbench.engines.chunk_cache.tiers.envelope import HEADER_BYTES, seal
from picbench.engines.vllm.settings import PicSettings
from picbench.workloads.testbed import model_path

COMPLETIONS, CHUNKS = "/v1/completions", "/pic/chunks"

KEY = "key-of-the-cache-api"

#: What nothing may show; the values of files, and of variables, of the servers.
SECRETS = {
    "PICBENCH_CACHE_KEY": KEY,
    "PICBENCH_REDIS_PASSWORD": "password-of-redis",
    "PICBENCH_HMAC_KEY": "key-of-the-seals",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Servers that store in host memory, a folder or none, and one redis."""

    one: HttpServer
    other: HttpServer
    redis: Any
    disk: Path


@pytest.fixture(scope="module")
def pair(redis_process: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    limits = {"max-model-len": 512, "num-gpu-blocks-override": 120, "max-num-seqs": 8}
    disk = tmp_path_factory.mktemp("disk")
    far = redis_process.address.replace("//", "//picbench@")
    tiers = (f"host:8MiB,disk:{disk}:64MiB,{far}", far)
    require_password(redis_process)
    # One of them has its secrets in files.
    files = {name: disk.parent / name for name in SECRETS}
    for name, path in files.items():
        path.write_text(f"{SECRETS[name]}\n")
    given = ({f"{name}_FILE": str(path) for name, path in files.items()}, SECRETS)
    shown = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "1"}
    with ExitStack() as stack:
        servers = []
        for each, secrets in zip(tiers, given, strict=True):
            settings = PicSettings(tiers=each, pad_token=2, bos_token=0, marks=True, salts=True)
            folder = tmp_path_factory.mktemp("server")
            added = {**shown, **secrets, **environment(folder, "held_kv")}
            server = http_server(model_path(), folder, settings, added, **limits)
            servers.append(stack.enter_context(server))
        yield Pair(servers[0], servers[1], redis_process, disk)


def require_password(redis: Any) -> None:
    """Have a user that needs one; tests need none."""
    password = SECRETS["PICBENCH_REDIS_PASSWORD"]
    with redis.client() as client:
        client.execute_command("ACL", "SETUSER", "picbench", "on", f">{password}", "~*", "+@all")


def call(server: HttpServer, method: str, path: str, body: Any = None, key: str = KEY) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return server.client.request(method, path, json=body, headers=headers)


def warm(server: HttpServer, *texts: str, **more: Any) -> list[dict[str, Any]]:
    answer = call(server, "POST", CHUNKS, {"chunks": [{"text": t} for t in texts], **more})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["chunks"]
    return found


def listed(server: HttpServer, document: str | None = None) -> list[dict[str, Any]]:
    answer = call(server, "GET", CHUNKS)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert sum(found["counts"].values()) == len(found["chunks"])
    return [c for c in found["chunks"] if document is None or document in c["documents"]]


def text(name: str) -> str:
    return " ".join(f"{name} sold the door of house {number}." for number in range(20))


def asked(server: HttpServer, *texts: str, **more: Any) -> dict[str, Any]:
    """What becomes of a prompt of documents."""
    prompt = "\n".join(f"<<doc>>{one}<</doc>>" for one in texts)
    xargs = {"pic_usage": True, "pic_algorithm": "naive"}
    body = {"prompt": f"{prompt}\nWho?", "max_tokens": 1, "vllm_xargs": xargs, **more}
    status, answer = server.post(COMPLETIONS, **body)
    assert status == 200, answer
    found: dict[str, Any] = answer["usage"]["pic"]
    return found


def states(report: dict[str, Any]) -> list[str]:
    return [chunk["state"] for chunk in report["chunks"]]


def test_without_its_key_there_is_no_api(pair):
    for key in ("x", "other", KEY[:-1]):
        assert call(pair.one, "GET", CHUNKS, key=key).status_code == 401
        assert call(pair.one, "DELETE", "/pic/documents/a", key=key).status_code == 401
    assert call(pair.one, "GET", "/pic/nothing").status_code == 404
    assert call(pair.one, "PUT", CHUNKS).status_code == 404


def test_chunks_are_warmed_pinned_and_listed(pair):
    body = {"document": "ada", "pin": True, "algorithm": "naive"}
    (first,) = warm(pair.one, text("Ada"), **body)
    assert (first["state"], first["pinned"]) == ("compiled", True)
    (again,) = warm(pair.one, text("Ada"), **body)
    assert again == first | {"state": "hit"}
    (found,) = listed(pair.one, "ada")
    assert found["tokens"] == first["tokens"]
    assert (found["state"], found["tier"], found["pinned"]) == ("resident", "pool", True)
    assert states(asked(pair.one, text("Ada"))) == ["hit"]
    answer = call(pair.one, "DELETE", "/pic/documents/ada")
    assert (answer.status_code, answer.json()) == (200, {"document": "ada", "chunks": 1})
    assert listed(pair.one, "ada") == []
    assert states(asked(pair.one, text("Ada"))) == ["compiled"]


def test_what_a_prompt_names_is_erased(pair):
    """The ids in marks are those of documents, whoever sends them."""
    prompt = f"<<doc id=hal>>{text('Hal')}<</doc>> and <<doc id=ida>>{text('Ida')}<</doc>>Who?"
    body = {"prompt": prompt, "max_tokens": 1, "vllm_xargs": {"pic_algorithm": "naive"}}
    assert pair.one.post(COMPLETIONS, **body)[0] == 200
    assert len(listed(pair.one, "hal")) == len(listed(pair.one, "ida")) == 1
    assert call(pair.one, "DELETE", "/pic/documents/hal").json()["chunks"] == 1
    assert states(asked(pair.one, text("Hal"), text("Ida"))) == ["compiled", "hit"]


WRONG: list[tuple[Any, str]] = [
    ([], "Input should be an object (send "),
    ({}, "chunks: Field required (send "),
    ({"chunks": []}, "chunks: List should have at least 1 item"),
    ({"chunks": "text"}, "chunks: Input should be a valid array"),
    ({"chunks": [{"text": "a"}] * 257}, "chunks: List should have at most 256 items"),
    ({"chunks": [{"text": ""}]}, "chunks[0] has no text and no tokens"),
    ({"chunks": [{"text": "a", "tokens": [1]}]}, "chunks[0] has no text and no tokens"),
    ({"chunks": [{"tokens": [5, -1]}]}, "chunks[0] has no text and no tokens"),
    ({"chunks": [{"tokens": [5, 1 << 40]}]}, "chunks[0] has no text and no tokens"),
    ({"chunks": [{"tokens": [True]}]}, "chunks.0.tokens.0: Input should be a valid integer"),
    ({"chunks": [{"text": "a"}], "documents": "a"}, "documents: Extra inputs are not permitted"),
    ({"chunks": [{"text": "a"}], "document": 5}, "document: Input should be a valid string"),
    ({"chunks": [{"text": "a"}], "document": "a" * 201}, "document: String should have at most"),
    ({"chunks": [{"text": "a"}], "pin": 1}, "pin: Input should be a valid boolean"),
    ({"chunks": [{"text": "a"}], "algorithm": "mepik"}, "did you mean 'mepic'"),
    ({"chunks": [{"tokens": [5] * 600}]}, "512"),
]


@pytest.mark.parametrize(("body", "reason"), WRONG)
def test_what_is_wrong_gets_400_and_a_reason(pair, body, reason):
    answer = call(pair.one, "POST", CHUNKS, body)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]


def test_bodies_that_are_no_json_or_too_large_get_400(pair):
    headers = {"Authorization": f"Bearer {KEY}"}
    for content, reason in ((b"{", "Invalid JSON"), (b" " * (33 << 20), "more than 32 MiB")):
        answer = pair.one.client.post(CHUNKS, content=content, headers=headers)
        assert answer.status_code == 400, answer.text
        assert reason in answer.json()["error"]["message"]
    answer = call(pair.one, "DELETE", f"/pic/documents/{'a' * 201}")
    assert answer.status_code == 400


def test_clients_share_nothing_with_those_of_another_key(pair):
    document = text("Gus")
    found = []
    for key in ("first", "second", "first", "second"):
        pair.one.client.headers["Authorization"] = f"Bearer {key}"
        found += states(asked(pair.one, document))
    del pair.one.client.headers["Authorization"]
    assert found == ["compiled", "compiled", "hit", "hit"]
    salt = f"sha256:{hashlib.sha256(b'first').hexdigest()}"
    (chunk,) = warm(pair.one, document, salt=salt, algorithm="naive")
    assert chunk["state"] == "hit"


@pytest.mark.parametrize("sent", ["one", "other"])
def test_an_erased_document_is_nowhere_within_a_second(pair, sent):
    """Sent to one server, used on both under two salts, erased by the other; others stay."""
    servers = [pair.one, pair.other] if sent == "one" else [pair.other, pair.one]
    gone, kept = text(f"Bo{sent}"), text(f"Cy{sent}")
    with pair.redis.client() as client:

        def values() -> set[bytes]:
            return set(client.scan_iter("picbench:v:*"))

        def held() -> tuple[set[bytes], list[int]]:
            return values(), [len(listed(server)) for server in servers]

        # What was asked for beside an erasure is erased once more, soon after the answer.
        before, listed_before = held()
        while time.sleep(1) or held() != (before, listed_before):
            before, listed_before = held()
        warm(servers[0], gone, document="bo", algorithm="naive")
        warm(servers[0], kept, document="cy", algorithm="naive")
        assert wait_until(lambda: len(values() - before) == 2)
        for server in servers:
            for salt in ({}, {"cache_salt": "tenant"}):
                asked(server, gone, kept, **salt)
        assert wait_until(lambda: len(values() - before) == 4)
        assert [len(listed(server)) for server in servers] == [n + 4 for n in listed_before]
        answer = call(servers[1], "DELETE", "/pic/documents/bo")
        began = time.monotonic()
        assert (answer.status_code, answer.json()["document"]) == (200, "bo")

        def is_gone() -> bool:
            found, left = held()
            return len(found - before) == 2 and left == [n + 2 for n in listed_before]

        assert wait_until(is_gone, 10)
        assert time.monotonic() - began < 1
        assert states(asked(servers[0], gone, kept)) == ["compiled", "hit"]
        assert call(servers[0], "DELETE", "/pic/documents/bo").status_code == 200
        assert states(asked(servers[1], gone, kept, cache_salt="tenant")) == ["compiled", "hit"]


PLACES = ("one's pool", "one's host memory", "disk", "redis", "other's pool")


def places(pair: Pair) -> dict[str, frozenset[str]]:
    """Digests of the KV in each block that is held somewhere."""
    (pool, memory, size), (other, nothing, _) = (
        held_kv(server.folder) for server in (pair.one, pair.other)
    )
    assert not nothing
    files = list[bytes]()
    for path in pair.disk.glob("values/*/*"):
        with suppress(FileNotFoundError):  # erased meanwhile
            files.append(path.read_bytes())
    with pair.redis.client() as client:
        values = client.mget([*client.scan_iter("picbench:v:*")])
    disk, redis = (
        frozenset[str]().union(*(pieces(value, size) for value in found if value))
        for found in (files, values)
    )
    return dict(zip(PLACES, (pool, memory, disk, redis, other), strict=True))


@pytest.mark.parametrize("asked_by", ["one", "other"])
def test_no_digest_of_an_erased_document_is_left_within_a_second(pair, asked_by):
    """Of its KV in pools, host memory, a folder and redis; all of another document's stays."""
    empty = places(pair)
    documents = {name: text(f"{name}{asked_by}") for name in ("Jo", "Kay")}
    secret = dict[str, frozenset[str]]()
    for name, document in documents.items():
        before = places(pair)
        warm(pair.one, document, document=name, algorithm="naive")
        assert wait_until(lambda before=before: places(pair)["redis"] > before["redis"])
        secret[name] = places(pair)["redis"] - before["redis"]
        asked(pair.other, document)
    assert not any(found & secret["Jo"] | found & secret["Kay"] for found in empty.values())
    assert len(secret["Jo"]) > 5 < len(secret["Kay"])
    assert wait_until(lambda: all(secret["Jo"] <= found for found in places(pair).values()))
    server = {"one": pair.one, "other": pair.other}[asked_by]
    began = time.monotonic()
    assert call(server, "DELETE", "/pic/documents/Jo").status_code == 200
    assert wait_until(lambda: not any(secret["Jo"] & found for found in places(pair).values()))
    assert time.monotonic() - began < 1
    assert [place for place, found in places(pair).items() if not secret["Kay"] <= found] == []
    for reusing in (pair.other, pair.one):
        report = asked(reusing, *documents.values())
        assert states(report) == ["compiled", "hit"]
        # What was sent without its name is no document's, so it is named and erased once more.
        warm(reusing, documents["Jo"], document="Jo", algorithm="naive")
        assert call(reusing, "DELETE", "/pic/documents/Jo").status_code == 200
        assert wait_until(lambda: not any(secret["Jo"] & found for found in places(pair).values()))


def test_no_secret_is_shown(pair):
    """By logs, settings, series, errors and lists of processes, or by the names in redis."""
    shown = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
    for server in (pair.one, pair.other):
        shown.append((server.folder / "server.log").read_bytes())
        errors = [call(server, "POST", CHUNKS, {"chunks": 5}), call(server, "GET", CHUNKS, key="x")]
        pages = ("/server_info", "/server_info?config_format=json", "/metrics", "/version")
        for answer in (*errors, call(server, "GET", CHUNKS), *map(server.client.get, pages)):
            assert answer.content, answer
            shown.append(answer.content)
    with pair.redis.client() as client:
        shown += [*client.scan_iter(), *client.scan_iter("picbench:d:*")]
    for secret in SECRETS.values():
        assert not any(secret.encode() in one for one in shown), secret


def readable(path: Path) -> bool:
    """Processes may have ended meanwhile."""
    return path.exists()


def test_what_others_write_to_redis_is_not_served(pair):
    """A value with a checksum that fits it, under a chunk's key: it is a miss, and is replaced."""
    document = text("Fay")
    with pair.redis.client() as client:
        held = set(client.scan_iter("picbench:v:*"))
        asked(pair.one, document)
        assert wait_until(lambda: len({*client.scan_iter("picbench:v:*")} - held) == 1)
        (name,) = {*client.scan_iter("picbench:v:*")} - held
        value = client.get(name)
        assert isinstance(value, bytes)
        forged = seal(name.removeprefix(b"picbench:v:"), bytes(len(value) - HEADER_BYTES))
        client.set(name, bytes(forged))
        assert states(asked(pair.other, document)) == ["compiled"]
        assert wait_until(lambda: client.get(name) == value)


def by_source(server: HttpServer) -> dict[str, float]:
    """The cached tokens that vLLM counts for each place that holds them."""
    lines = server.client.get("/metrics").text.splitlines()
    name = "vllm:prompt_tokens_cached_by_source_total{"
    counted = (line.rsplit(maxsplit=1) for line in lines if line.startswith(name))
    return {labels.split('source="')[1].split('"')[0]: float(count) for labels, count in counted}


def wait_until(what: Any, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(what())


def test_what_another_server_put_into_redis_is_external(pair):
    with pair.redis.client() as client:
        held = client.dbsize()
        first = asked(pair.one, text("Eve"))
        assert wait_until(lambda: client.dbsize() > held)
    before = by_source(pair.other)
    second = asked(pair.other, text("Eve"))
    assert (states(first), states(second)) == (["compiled"], [f"loaded:{pair.redis.address}"])
    rose = {name: count - before.get(name, 0) for name, count in by_source(pair.other).items()}
    loaded = {name: count for name, count in rose.items() if count}
    assert loaded == {"external_unspecified": first["compiled_tokens"]}


def test_an_outage_of_redis_is_in_a_series_and_in_the_log(pair):
    """One that is killed and comes back; the last test, since its values are gone then."""
    server, name = pair.other, pair.redis.address
    faults = f"pic_tier_faults_total|error|{name}"
    assert series(server)[faults] == 0

    def said(words: str) -> list[str]:
        lines = (server.folder / "server.log").read_text().splitlines()
        return [line for line in lines if f"tier {name} {words}" in line]

    pair.redis.kill()
    asked(server, text("Eve"), cache_salt="gone")
    assert series(server)[faults] > 0
    [line] = said("fails: ")
    assert re.match(r"^\(\w+ pid=\d+\) WARNING ", line), line
    pair.redis.start()
    require_password(pair.redis)

    def answers() -> bool:
        asked(server, text("Eve"), cache_salt=f"back {time.monotonic()}")
        return bool(said("answers again"))

    assert wait_until(answers, 60)
    assert len(said("answers again")) == len(said("fails: ")) == 1
