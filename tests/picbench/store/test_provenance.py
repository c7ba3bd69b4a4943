"""Where numbers come from, and what GitHub Actions is told."""

import io
import json
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_code import changed_lines

from picbench.run.runner import RoundsRecord
from picbench.store import provenance
from picbench.store.provenance import (
    annotation,
    code_lines,
    gpu_code,
    write_code,
    write_step_summary,
)
from picbench.tables.page import save


def test_everything_is_json_and_no_secret_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("VLLM_API_KEY", "vllm_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    text = json.dumps(provenance.collect())
    assert "secret" not in text
    assert json.loads(text)["environment"]["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("file", ["/home/me/env/bin/picbench", "/home/me/picbench/__main__.py"])
def test_a_command_does_not_say_where_its_program_is(
    monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr("sys.argv", [file, "run", "--algo", "mepic"])
    assert provenance.collect()["command"] == ["picbench", "run", "--algo", "mepic"]


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
    assert list(found) == [*names, "code"]
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


SOURCE = '''"""What it is about.

In two paragraphs.
"""

# A comment.
def add(one: int, other: int) -> int:  # Another.
    """Their sum."""
    text = "# none"
    return (
        one
        + other  # The sum.
    )


class Sum:
    """One."""

    value = 1
    """A docstring of a field."""
'''


def test_lines_of_code_are_those_that_do_something() -> None:
    head = "def add(one: int, other: int) -> int:"
    found = code_lines(SOURCE)
    assert found == [
        *(head, 'text = "# none"', "return (", "one", "+ other", ")", "class Sum:", "value = 1"),
    ]
    indented = "if True:\n" + "".join(f"    {line}\n" for line in SOURCE.splitlines()[6:])
    assert code_lines(indented)[1:] == found
    assert code_lines("") == code_lines('"""Only this."""') == []


@given(st.lists(st.sampled_from(["a = 1", "b = 2", "", "# c", "if a: b"]), max_size=12))
def test_comments_and_empty_lines_change_nothing(lines: list[str]) -> None:
    code = [line for line in lines if line and not line.startswith("#")]
    assert code_lines("\n".join(lines)) == code


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The GPU path's packages, with two files of it and two that are not of it."""
    for name, source in {
        "engines/planning/plan.py": SOURCE,
        "kernels/cuda/decode/attention.py": "first = 1\nsecond = 2\n",
        "kernels/cpu/attention.py": "cpu = 1\n",
        "engines/vllm/scheduler/pool.py": "scheduled = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)

    def files(package: str) -> Path:
        return tmp_path / package.removeprefix("picbench.")

    monkeypatch.setattr(resources, "files", files)
    return tmp_path


def test_a_record_of_code_counts_the_lines_that_changed(packages: Path) -> None:
    facts = provenance.facts("commit", device="cuda", commit="abc")
    write_code(packages, facts)
    record = packages / f"code-{facts['code']}.json"
    files = json.loads(record.read_bytes())["files"]
    assert {name: len(text) // 4 for name, text in files.items()} == {
        "engines/planning/plan.py": 8,
        "kernels/cuda/decode/attention.py": 2,
    }
    kernel, plan = packages / "kernels/cuda/decode/attention.py", "engines/planning/plan.py"
    for changed, text in (
        (0, "first = 1  # One.\n\nsecond = 2\n"),
        (1, "first = 1\n"),
        (2, "first = 1\nsecond = 3\n"),
        (3, "first = 1\nsecond = 2\n" + "third = 3\n" * 3),
    ):
        kernel.write_text(text)
        assert changed_lines(packages, facts) == changed
    # What moves is not counted; what a CPU alone runs, and the scheduler, are not of the path.
    kernel.rename(packages / "kernels/cuda/other.py")
    (packages / "kernels/cpu/attention.py").write_text("cpu = 2\n")
    (packages / "engines/vllm/scheduler/pool.py").write_text("scheduled = 2\n")
    assert changed_lines(packages, facts) == 3
    (packages / plan).unlink()
    assert changed_lines(packages, facts) == 11
    assert gpu_code() != facts["code"]


def test_without_a_record_the_lines_that_changed_are_unknown(packages: Path) -> None:
    assert changed_lines(packages, {}) is None
    assert changed_lines(packages, {"code": "c0de"}) is None
    write_code(packages, provenance.facts("commit", commit="abc"))  # Of a CPU.
    assert list(packages.glob("*.json")) == []


def test_the_gpu_path_has_files_of_every_pattern() -> None:
    top = Path(provenance.__file__).parents[2]
    assert [pattern for pattern in provenance.GPU_PATH if not list(top.glob(pattern))] == []


def test_what_is_measured_on_a_gpu_leaves_its_code_beside_it(packages: Path) -> None:
    for folder, device in (("gpu", "cuda"), ("cpu", "cpu")):
        about = provenance.facts("commit", device=device, commit="abc")
        save(packages / folder / "kernels", {"provenance": about}, "page")
        RoundsRecord(packages / folder / "load.json", about).write()
        records = [f"code-{gpu_code()}.json"] if device == "cuda" else []
        assert [path.name for path in (packages / folder).glob("code-*")] == records
