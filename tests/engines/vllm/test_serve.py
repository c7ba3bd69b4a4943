"""The command of `picbench serve`, and the server that it becomes."""

import json
import shlex
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import free_port, plain_command, refused_start, running
from hypothesis import given
from hypothesis import strategies as st
from serving_document import bodies

from picbench.engines.vllm.serve import TEMPLATE, ServerCommand, check_start, server_command
from picbench.engines.vllm.settings import (
    CACHE_MIDDLEWARE,
    CONNECTOR,
    MIDDLEWARE,
    USAGE_MIDDLEWARE,
)
from picbench.errors import ConfigError
from picbench.workloads.testbed import model_path

MODEL = str(model_path())
VARIABLES = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def command(*flags: str, device: str = "cpu", **settings: Any) -> ServerCommand:
    """The command for the testbed, whose type is not looked at."""
    given = {"algorithm": "mepic", **settings}
    flags = flags if any("dtype" in flag for flag in flags) else (*flags, "--dtype=float32")
    return server_command(MODEL, "testbed", flags, device=device, **given)


def values(made: ServerCommand) -> dict[str, str]:
    """Flags with their values, those of the user apart."""
    return {flag[0]: " ".join(flag[1:]) for flag in made.flags[:-1]}


def test_servers_that_read_marks_read_parts() -> None:
    wanted = ("--middleware", MIDDLEWARE)
    assert wanted in command(marks=True).flags
    for each in (USAGE_MIDDLEWARE, CACHE_MIDDLEWARE):
        assert ("--middleware", each) in command(marks=True).flags
    assert wanted not in command().flags
    own = command("--middleware", "mine.Own", marks=True)
    assert wanted in own.flags
    assert own.flags[-1][:2] == ("--middleware", "mine.Own")
    for path in (MIDDLEWARE, USAGE_MIDDLEWARE, CACHE_MIDDLEWARE):
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(import_module(module), name), type)


def test_a_cpu_server_has_all_that_it_needs() -> None:
    made = command()
    assert made.start == (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry")
    assert made.variables == VARIABLES
    found = values(made)
    assert found["--model"] == MODEL
    assert found["--served-model-name"] == "testbed"
    assert found["--block-size"] == "16"
    assert found["--shutdown-timeout"] == "60"
    assert json.loads(found["--kv-transfer-config"])["kv_connector"] == CONNECTOR
    switches = {"--no-async-scheduling", "--enforce-eager", "--enable-prefix-caching"}
    assert switches | {"--enable-prompt-tokens-details"} <= found.keys()


def test_a_gpu_server_has_all_that_it_needs() -> None:
    made = command(device="cuda")
    assert made.start[0].endswith("vllm")
    assert made.start[1:] == ("serve", MODEL)
    assert not made.variables
    found = values(made)
    assert found["--attention-backend"] == "CUSTOM"
    assert "PicAsyncScheduler" in found["--scheduler-cls"]
    assert "PicGPUWorker" in found["--worker-cls"]
    assert "--async-scheduling" in found
    assert not {"--model", "--enforce-eager"} & found.keys()


def test_settings_are_those_of_the_model_and_the_user() -> None:
    found = values(command(algorithm="epic:k=4", tiers="", on_pressure="reject"))
    assert json.loads(found["--additional-config"]) == {
        "pic": {
            **{"algorithm": "epic:k=4", "tiers": "", "on_pressure": "reject"},
            **{"pad_token": 2, "bos_token": 0},
        }
    }


@pytest.mark.parametrize(
    "flag",
    [
        "--served-model-name mine yours",
        "--shutdown-timeout=5",
        "--shutdown_timeout 5",
        "--chat-template mine.jinja",
        "--block-size 16",
        "--enable-prefix-caching",
        "--dtype bfloat16",
    ],
)
def test_flags_that_the_user_gives_instead(flag: str) -> None:
    made = server_command(MODEL, "testbed", (*flag.split(), "--dtype", "float32"), algorithm="full")
    base = "--" + flag.replace("=", " ").replace("_", "-").split()[0].removeprefix("--")
    assert not {base, base.replace("--no-", "--")} & values(made).keys()
    assert made.flags[-1] == (*flag.split(), "--dtype", "float32")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "flag",
    [
        "--scheduler-cls mine",
        "--worker_cls=mine",
        "--block-size 32",
        "--block-size=32",
        "--block 32",
        "--no-enable-prefix-caching",
        "--kv-transfer-config {}",
        "--kv-transfer-config.kv_role kv_consumer",
        "--additional-config.pic.algorithm naive",
        "--model mine",
    ],
)
def test_flags_that_would_break_the_engine_are_refused(flag: str, device: str) -> None:
    with pytest.raises(ConfigError) as caught:
        command(*flag.split(), device=device)
    assert str(caught.value).startswith(flag.replace("_", "-").replace("=", " ").split()[0])
    assert "\n" not in str(caught.value)


def test_scheduling_and_compilation_are_those_of_the_device() -> None:
    for device, flag in (
        ("cpu", "--async-scheduling"),
        ("cpu", "--no-enforce-eager"),
        ("cuda", "--no-async-scheduling"),
    ):
        with pytest.raises(ConfigError, match=f"^{flag}: "):
            command(flag, device=device)


OTHERS = [
    "--port=1",
    "--port",
    "-tp",
    "2",
    "--max-model-len",
    "a b",
    "$x",
    "--seed",
    "'",
    '"',
    "-q",
]


@given(st.lists(st.sampled_from(OTHERS), min_size=1), st.sampled_from(["cpu", "cuda"]))
def test_other_flags_are_vllms_and_the_text_is_the_command(flags: list[str], device: str) -> None:
    made = command(*flags, device=device)
    assert made.flags[-1] == (*flags, "--dtype=float32")
    shown = shlex.split(made.shell().replace(" \\\n", " "))
    variables = [f"{name}={value}" for name, value in made.variables.items()]
    assert shown == [*variables, *made.start, *(word for flag in made.flags for word in flag)]


@pytest.mark.parametrize(
    ("flag", "variable"),
    [
        ("-tp 2", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
        ("--tensor-parallel-size=2", "VLLM_CPU_NUM_OF_RESERVED_CPU"),
        ("--kv-cache-memory-bytes 2G", "VLLM_CPU_KVCACHE_SPACE"),
        ("--gpu-memory-utilization 0.5", "VLLM_CPU_KVCACHE_SPACE"),
    ],
)
def test_variables_that_flags_stand_for(flag: str, variable: str) -> None:
    left = command(*flag.split()).variables
    assert left == {name: value for name, value in VARIABLES.items() if name != variable}


def test_variables_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert command().variables["VLLM_CPU_KVCACHE_SPACE"] == "7"


def test_the_pool_holds_two_contexts_in_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot of the testbed takes 8 KiB in float32."""
    monkeypatch.setattr("picbench.engines.vllm.device.physical_memory", lambda: 9 << 30)
    name = "VLLM_CPU_KVCACHE_SPACE"
    assert command("--max-model-len", "131072").variables[name] == "2"
    assert command("--max-model-len=131073").variables[name] == "3"
    assert command("--max-model-len=999999999").variables[name] == "4"
    assert command("--max-model-len", "4k").variables[name] == "1"


def test_what_the_model_lacks_is_made_up_for_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop = {"architecture": "x86_64", "avx2": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: laptop)
    (tmp_path / "config.json").write_bytes((model_path() / "config.json").read_bytes())
    made = server_command(
        str(tmp_path), "m", ("--port", "1"), device="cpu", has_template=False, algorithm="mepic"
    )
    found = values(made)
    assert found["--load-format"] == "dummy"
    assert found["--dtype"] == "float32"
    assert found["--chat-template"] == TEMPLATE
    assert [note.partition(":")[0] for note in made.notes] == [
        *("the model has no weights", "the model is served in float32"),
        "the model has no chat template",
    ]


def test_what_cannot_start_here() -> None:
    with pytest.raises(ConfigError, match="runs on cpu here, not on cuda"):
        check_start("cuda", None)
    with pytest.raises(ConfigError, match="`tiers` disk:/proc/x"):
        check_start("auto", "disk:/proc/x:1GiB")


def test_the_testbed_is_served_until_all_is_answered(tmp_path: Path) -> None:
    port = free_port()
    words = ("testbed", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32")
    started = [sys.executable, "-m", "picbench", "serve", *words]
    completion, chat = bodies()
    with running(started, tmp_path, port) as (server, process):
        spans, prompt = completion["vllm_xargs"]["pic_spans"], completion["prompt"]
        assert spans == [0, 17, 17, 34]
        other = [*prompt[17:34], *prompt[:17], *prompt[34:]]
        counts = []
        for tokens in (prompt, other):
            body = completion | {"prompt": tokens}
            status, answer = server.post("/v1/completions", **body)
            assert status == 200, answer
            counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert counts[0] == 0 < counts[1]
        arguments = {"pic_spans": spans, "pic_algorithm": "naive:anchor=passage"}
        after = [server.post("/v1/completions", **body | {"vllm_xargs": arguments}) for _ in "ab"]
        assert [status for status, _ in after] == [200, 200], after
        assert after[1][1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
        status, answer = server.post("/v1/chat/completions", **chat)
        assert status == 200, answer
        events = server.stream("/v1/completions", prompt=prompt, max_tokens=300, ignore_eos=True)
        first = next(events)
        process.send_signal(signal.SIGTERM)
        choices = [event["choices"][0] for event in (first, *events)]
        assert choices[-1]["finish_reason"] == "length"
        process.wait(60)
    assert "the model has no chat template" in (tmp_path / "server.log").read_text()


#: What Python runs at its start, so that an environment seems to have another release of vLLM.
_OTHER_RELEASE = """
from importlib import metadata

found = metadata.version
metadata.version = lambda name: found(name).replace("0.32.0", "0.34.0")
"""


def test_settings_alone_make_a_pic_server(tmp_path: Path) -> None:
    """Of a command that names none of picbench's parts."""
    port = free_port()
    completion, _ = bodies()
    pic = ("--additional-config", '{"pic": {"marks": true}}')
    command, chosen = plain_command(model_path(), port, *pic), {"VLLM_CPU_KVCACHE_SPACE": ""}
    with running(command, tmp_path, port, chosen) as (server, _):
        answers = [server.post("/v1/completions", **completion)[1] for _ in range(2)]
        marked = "<<doc>>The old bridge was closed.<</doc>> Who?"
        status, answer = server.post("/v1/completions", prompt=marked, max_tokens=1)
        refused, error = server.post("/v1/completions", prompt=marked + "<<doc>>", max_tokens=1)
        metrics = server.client.get("/metrics").text
    counts = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert counts[0] == 0 < counts[1]
    assert status == 200, answer
    assert refused == 400, error
    assert f'kv_cache_memory_bytes="{1 << 30}"' in metrics


def test_servers_of_another_release_are_stock_unless_they_ask(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(_OTHER_RELEASE)
    other, port = {"PYTHONPATH": str(tmp_path)}, free_port()
    command = plain_command(model_path(), port, "--enforce-eager")
    with running(command, tmp_path, port, other) as (server, _):
        body = {"prompt": "The old bridge was", "max_tokens": 2}
        status, answer = server.post("/v1/completions", **body)
        assert status == 200, answer
        assert "picbench" not in server.client.get("/metrics").text
    assert "picbench " not in (tmp_path / "server.log").read_text()
    code, said = refused_start([*command, "--additional-config", '{"pic": {}}'], other)
    assert code == 1
    assert said[-1].startswith("picbench: picbench needs vLLM 0.32.0 or 0.33.0, found 0.34.0 (")
    assert not any("Traceback" in line for line in said)
