"""Where numbers come from, and what GitHub Actions is told."""

import io
import json
import subprocess
from pathlib import Path

import pytest

from picbench.store import provenance
from picbench.store.provenance import annotation, write_step_summary


def test_everything_is_json_and_no_secret_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "vllm_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = json.dumps(provenance.collect())
    assert "secret" not in text
    assert json.loads(text)["environment"]["OMP_NUM_THREADS"] == "2"


def test_a_folder_outside_any_checkout_has_no_commit(tmp_path: Path) -> None:
    assert provenance.git_state(tmp_path) is None
    assert provenance.git_state(tmp_path / "gone") is None


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a driver's tool on the path, and nothing else."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_every_gpu_has_a_name_a_driver_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It answers only what it is asked for.
    query = "--query-gpu=name,driver_version,memory.total --format=csv,noheader"
    rows = ("NVIDIA H200, 580.1, 143771 MiB", "NVIDIA L4, 580.1, 23034 MiB")
    lines = "; ".join(f"echo '{row}'" for row in rows)
    answer(tmp_path, monkeypatch, f'[ "$*" = "{query}" ] || exit 1; {lines}')
    assert provenance.gpus() == [
        {"name": "NVIDIA H200", "driver": "580.1", "memory": "143771 MiB"},
        {"name": "NVIDIA L4", "driver": "580.1", "memory": "23034 MiB"},
    ]
    assert provenance.collect()["gpus"] == provenance.gpus()


@pytest.mark.parametrize(
    "script",
    [
        "echo 'cannot communicate with the driver'; exit 9",
        "echo 'No devices were found'",
        "true",
    ],
)
def test_a_driver_that_does_not_answer_has_no_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    def hang(command: list[str], **options: float) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    answer(tmp_path, monkeypatch, script)
    assert provenance.gpus() == []
    assert provenance.facts("driver", device="cuda") == {"driver": "unknown"}
    monkeypatch.setattr(subprocess, "run", hang)
    assert provenance.gpus() == []


def test_facts_are_given_by_name_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "gpus", lambda: [{"name": "B", "driver": "1"}] * 2)
    names = ("gpu", "driver", "click", "commit")
    found = provenance.facts(*names, device="cuda", commit="abc")
    assert list(found) == list(names)
    assert (found["gpu"], found["driver"], found["commit"]) == ("B", "1", "abc")
    here = provenance.facts(*names)
    assert (here["gpu"], here["driver"]) == (provenance.cpu_model(), "none")
    assert here["commit"] == provenance.checkout()


def test_annotations_escape_what_ends_them() -> None:
    found = annotation("error", "mepic: a,b", "100 % of\nlines")
    assert found == "::error title=mepic%3A a%2Cb::100 %25 of%0Alines"


def test_a_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, stream = tmp_path / "summary", io.StringIO()
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    write_step_summary("a\n", stream)
    write_step_summary("b\n", stream)
    assert (file.read_text(), stream.getvalue()) == ("a\nb\n", "")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    write_step_summary("a\n", stream)
    assert stream.getvalue() == "a\n"


def test_a_summary_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "/dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        write_step_summary("a\n", io.StringIO())
    assert caught.value.filename == "/dev/full"
