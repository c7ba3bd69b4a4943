"""An arm over HTTP beside the same algorithm in process; threads and cores of servers."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from http_server import HttpServer, http_server

from picbench.cli import main
from picbench.engines.vllm.device import cpu_shares, reserve_cores
from picbench.engines.vllm.settings import CPU_WORKER, PicSettings
from picbench.run.remote import Endpoint, RemoteServer
from picbench.store.reader import read_run
from picbench.workloads.testbed import model_path

RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    settings = PicSettings(bos_token=0, pad_token=2)
    limits = {"max-model-len": 4096, "num-gpu-blocks-override": 2000}
    folder = tmp_path_factory.mktemp("server")
    with http_server(model_path(), folder, settings, **limits) as server:
        yield server


def test_an_arm_over_http_gives_the_replies_and_the_reuse_of_the_arm_in_process(
    server: HttpServer, tmp_path: Path
) -> None:
    """Times are not judged here: see results/cpu/http-arm.md."""
    output, url = tmp_path / "run", f"{str(server.client.base_url).rstrip('/')}/v1"
    given = ("--dataset", "musique", "--limit", "6", "--concurrency", "1", "--dtype", "float32")
    arms = ("--algo", "mepic", "--arm", f"http={url},algo=mepic", "--output", str(output))
    result = CliRunner().invoke(main, ["run", *given, *arms])
    assert result.exit_code == 0, result.output
    rows = read_run(output).rows
    ours, theirs = ([row for row in rows if row.arm == arm] for arm in ("mepic", "http"))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.sample, one.text, one.score) == (other.sample, other.text, other.score)
        assert one.tokens.reused == other.tokens.reused
        assert (one.output_tokens, one.finish_reason) == (other.output_tokens, other.finish_reason)
    assert sum(row.tokens.reused or 0 for row in theirs) > 0
    engines = [
        arm["engine"] for arm in json.loads((output / "manifest.json").read_text())["arms"].values()
    ]
    assert engines[0]["vllm"] == engines[1]["vllm"]
    assert all(engine["threads"] and engine["reserved_cores"] is not None for engine in engines)


def test_a_server_leaves_the_cores_that_stock_vllm_leaves(server: HttpServer) -> None:
    endpoint = Endpoint(f"{str(server.client.base_url).rstrip('/')}/v1")
    with closing(RemoteServer("http", endpoint, lambda: None)) as remote:
        told = remote.ready()
    assert {name: told[name] for name in ("threads", "reserved_cores")} == cpu_shares(stock())


def stock(connector: object = None) -> SimpleNamespace:
    """What vLLM's manager of threads asks of a configuration."""
    parallel = SimpleNamespace(
        distributed_executor_backend="mp",
        local_world_size=1,
        data_parallel_rank_local=None,
        _api_process_count=1,
        assigned_physical_gpu_ids=None,  # of 0.33.0
        worker_cls=CPU_WORKER if connector else "auto",
    )
    device = SimpleNamespace(device_type="cpu")
    return SimpleNamespace(
        device_config=device, parallel_config=parallel, kv_transfer_config=connector
    )


@pytest.mark.parametrize(("chosen", "found"), [(None, "1"), ("2", "2"), ("0", "0")])
def test_a_number_of_reserved_cores_that_the_user_chose_stays(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, found: str
) -> None:
    monkeypatch.setenv(RESERVED, chosen or "")
    if chosen is None:
        monkeypatch.delenv(RESERVED)
    reserve_cores(stock(connector=object()))
    assert os.environ[RESERVED] == found


def test_other_workers_keep_what_vllm_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RESERVED, raising=False)
    reserve_cores(stock())
    assert RESERVED not in os.environ
