"""Where numbers come from: environment, machine, versions and code; and what GitHub is told."""

import json
import os
import platform
import subprocess
import sys
import tokenize
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib import metadata, resources
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from picbench.files import naming, write_json
from picbench.plugins import version_of


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def arm_environment() -> dict[str, str]:
    """This process's environment, with defaults for what the user has not set.

    OpenMP threads wait asleep instead of spinning: measured on two cores with one busy neighbour,
    an arm of many small kernels takes 2.5 s instead of 32 s, and alone it takes no longer.

    Where vLLM's CPU attention divides a request's keys among threads, these spin until all of them
    have begun (`guard_counter` in csrc/cpu/cpu_attn_impl.hpp), whatever OpenMP is told: on two
    cores with busy neighbours a decode step takes 30 to 33 ms of CPU time instead of 18 to 19. Two
    threads have work enough without, as models have two KV heads or more.

    Files are text in UTF-8 whatever the locale is: torch reads some of its own as the locale says,
    and cannot be imported in one such as ja_JP.eucJP.
    """
    defaults = {"OMP_WAIT_POLICY": "passive", "PYTHONUTF8": "1"}
    if cores() <= 2:
        defaults["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    return defaults | dict(os.environ)


def quiet_engine() -> None:
    """For an engine in this process: leave the terminal to picbench, unless the user wants more."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name, value in arm_environment().items():
        os.environ.setdefault(name, value)


#: Packages whose version can change a number.
PACKAGES = (
    *("picbench", "vllm", "vllm-cpu", "torch", "triton", "transformers", "tokenizers", "numpy"),
    *("pandas", "datasets", "pyarrow"),
)

#: Variables that can change a number; an allow-list, because others may hold secrets.
VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "DNNL_MAX_CPU_ISA"),
    *("HF_HUB_OFFLINE", "LD_PRELOAD", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"),
    *("ONEDNN_MAX_CPU_ISA", "TORCHDYNAMO_DISABLE", "VLLM_ATTENTION_BACKEND"),
    *("VLLM_BATCH_INVARIANT", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_CPU_KVCACHE_SPACE"),
    *("VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_OMP_THREADS_BIND"),
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS"),
)


#: Facts on pages about an engine.
ENGINE = ("gpu", "driver", "torch", "vllm", "commit")

#: Facts of measurements that need a GPU.
GPU = ("gpu", "driver", "cuda", "python", "torch", "triton", "vllm", "commit")

#: What figures of a GPU are about: the plan of a prompt, what the worker does between a scheduled
#: step and its logits, and kernels. Apart are the scheduler and what is before it, which say when a
#: step comes rather than what it takes, and all that a CPU alone runs.
GPU_PATH = (
    *("engines/algorithms/base.py", "engines/algorithms/mepic.py", "engines/planning/*.py"),
    *("engines/vllm/transfer/*.py", "engines/vllm/worker/*.py", "engines/vllm/worker/cuda/*.py"),
    *("kernels/*.py", "kernels/cuda/**/*.py"),
)

#: Tokens that a statement may follow.
_BEGINS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def collect() -> dict[str, object]:
    """Everything about this process and machine that a reader of results may want, as JSON."""
    memory, cuda = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), gpus()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := version_of(name))},
        "cpu": {
            "model": cpu_model(),
            "cores": cores(),
            "memory_bytes": memory,
            "instructions": instructions(),
        },
        "gpus": cuda,
        "git": git_state(Path(__file__).parent),
        **({"code": gpu_code()} if cuda else {}),
        "environment": _variables(),
        "command": [_program(Path(sys.argv[0])), *sys.argv[1:]],
    }


def _program(file: Path) -> str:
    """A program by its name: where it is installed tells readers nothing."""
    return file.parent.name if file.name == "__main__.py" else file.name


def facts(*names: str, device: str = "cpu", commit: str | None = None) -> dict[str, Any]:
    """The named facts about a measurement on `device`, for its page and its file.

    A name is one of `_FACTS`, or a package, whose version is given. `commit` says what to call the
    code, by default what this checkout is; of the code of a GPU `write_code` can say more.
    """
    found = {n: _FACTS[n](device) if n in _FACTS else metadata.version(n) for n in names}
    if "commit" in names and device == "cuda":
        found["code"] = gpu_code()
    return found | {"commit": commit} if commit and "commit" in names else found


def gpu_code() -> str:
    """The hash of all lines of the GPU path, which names their record."""
    return blake2b(json.dumps(gpu_lines()).encode(), digest_size=6).hexdigest()


def write_code(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write the record of the lines that were measured, if `facts` are of a GPU.

    It needs no history: a checkout may have none, and commits may not be in it later.
    """
    code = facts.get("code")
    path = folder / f"code-{code}.json"
    if code and not path.exists():
        write_json(path, {"schema": 1, "files": gpu_lines()})


def gpu_lines() -> dict[str, str]:
    """A hash of each line of code of each file of the GPU path."""
    found: dict[str, str] = {}
    for package, _, pattern in (each.partition("/") for each in GPU_PATH):
        top = Path(str(resources.files(f"picbench.{package}")))
        for path in sorted(top.glob(pattern)):
            lines = code_lines(path.read_text(encoding="utf-8"))
            hashes = (b64encode(blake2b(each.encode(), digest_size=3).digest()) for each in lines)
            found[f"{package}/{path.relative_to(top).as_posix()}"] = b"".join(hashes).decode()
    return found


def code_lines(source: str) -> list[str]:
    """The lines of a program but for their indents, comments and docstrings, and empty ones."""
    lines, before = source.splitlines(), tokenize.NEWLINE
    for kind, _, (row, column), (end, _), _ in tokenize.generate_tokens(StringIO(source).readline):
        if kind == tokenize.COMMENT:
            lines[row - 1] = lines[row - 1][:column]
        elif kind != tokenize.NL:
            # A string where a statement begins.
            if kind == tokenize.STRING and before in _BEGINS:
                lines[row - 1 : end] = [""] * (end + 1 - row)
            before = kind
    return [text for line in lines if (text := line.strip())]


def checkout() -> str:
    """The checkout's commit, followed by ``-dirty`` if files differ from it."""
    found = _git(Path(__file__).parent, "describe", "--always", "--dirty", "--abbrev=40")
    return found or "none: not in a checkout"


def cpu_model() -> str:
    """The processor's name as Linux gives it; its architecture on other systems."""
    return _cpu_fact("model name") or platform.machine()


def instructions() -> list[str]:
    """The extensions by which libraries choose their arithmetic, so that sums round otherwise."""
    flags = (_cpu_fact("flags") or _cpu_fact("Features")).split()
    return sorted(f for f in flags if f.startswith(("avx", "fma", "amx", "asimd", "sve", "bf16")))


def _cpu_fact(name: str) -> str:
    """What Linux says of the first processor; empty where it does not."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = (line.partition(":") for line in lines)
    return next((value.strip() for field, _, value in facts if field.strip() == name), "")


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each NVIDIA GPU; none if its driver does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    names = ("name", "driver", "memory")
    rows = [line.split(", ") for line in (_output(query, 30) or "").splitlines()]
    # Anything else is a message, such as that there are no devices.
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def git_state(folder: Path) -> dict[str, object] | None:
    """Commit of the checkout that tracks `folder` and whether it was changed; None outside one.

    A folder that is merely installed somewhere below a checkout is not tracked by it.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or not _git(folder, "ls-files", "."):
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain"))}


def _git(folder: Path, *arguments: str) -> str | None:
    return _output(["git", "--no-optional-locks", *arguments], 10, folder)


def _output(command: Sequence[str], timeout: float, folder: Path | None = None) -> str | None:
    """What a command prints; None if it fails or takes more than `timeout` seconds."""
    kept: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout}
    try:
        done = subprocess.run(command, cwd=folder, **kept)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _variables() -> dict[str, str]:
    known = arm_environment()
    return {name: known[name] for name in VARIABLES if name in known}


def _gpu(fact: str, device: str) -> str | None:
    """A fact about the GPUs that a measurement on `device` may use; None on a CPU."""
    names = sorted({gpu[fact] for gpu in gpus()}) if device == "cuda" else []
    return " and ".join(names) or None


def _torch() -> Any:
    import torch  # Its own version names the build (+cpu, +cu130), its package's may not.

    return torch


#: Facts by name; each function takes the device.
_FACTS: dict[str, Callable[[str], Any]] = {
    "gpu": lambda device: _gpu("name", device) or cpu_model(),
    "driver": lambda device: _gpu("driver", device) or ("unknown" if device == "cuda" else "none"),
    "commit": lambda _: checkout(),
    "cuda": lambda _: _torch().version.cuda,
    "cpu": lambda _: cpu_model(),
    "cores": lambda _: os.cpu_count(),
    "threads": lambda _: _torch().get_num_threads(),
    "capability": lambda _: _torch().backends.cpu.get_cpu_capability(),
    "machine": lambda _: platform.machine(),
    "load": lambda _: list(os.getloadavg()),
    "python": lambda _: platform.python_version(),
    "torch": lambda _: _torch().__version__,
    "variables": lambda _: _variables(),
    "vllm": lambda _: version_of("vllm") or metadata.version("vllm-cpu"),
}


def write_step_summary(markdown: str, stream: TextIO) -> None:
    """Append Markdown to the summary of the step; to `stream` outside of GitHub Actions."""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        with naming(Path(path)), Path(path).open("a", encoding="utf-8") as file:
            file.write(markdown)
    else:
        stream.write(markdown)


def annotation(level: str, title: str, message: str) -> str:
    """A workflow command that annotates the run: `level` is error, warning or notice."""
    codes = {character: f"%{ord(character):02X}" for character in "%\r\n,:"}
    name = "".join(codes.get(c, c) for c in title)
    text = "".join(codes[c] if c in "%\r\n" else c for c in message)
    return f"::{level} title={name}::{text}"
