"""Cells of a sweep on a Ray cluster, each alone on a node or on the GPUs that it asks for.

A cell's run directory travels: to the node, if some of it was measured before, and back when the
cell has ended. Nodes need picbench with the same extras; models, data and `requests` files must be
where the settings say on every node. A cell whose node is lost runs again on another one.
"""

import io
import json
import socket
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from picbench.errors import ConfigError, EngineError, PicBenchError
from picbench.experiments.sweep import SweepCell, measure_cell
from picbench.files import write_json
from picbench.run.schedule import Progress
from picbench.run.session import Services
from picbench.settings import RunConfig
from picbench.store.writer import FINAL, MANIFEST

#: Seconds to wait for a cluster's answer.
_SECONDS = 10.0

#: How often a cell runs again whose node or process was lost.
_RETRIES = 3


def pack(folder: Path) -> bytes:
    """A run directory as it is; nothing if there is none."""
    if not (folder / MANIFEST).is_file():
        return b""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return packed.getvalue()


def unpack(packed: bytes, folder: Path) -> None:
    """Put a packed run directory into its place, whose manifest then names that place."""
    if not packed:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["config"]["output"] = str(folder)
    write_json(folder / MANIFEST, manifest)


def run_cell(
    config: RunConfig, before: bytes, services: Services
) -> tuple[bytes, str | None, list[str]]:
    """Run a cell here; its packed directory, why it failed, and what could not be made of it."""
    failure, lines = None, list[str]()
    with tempfile.TemporaryDirectory(prefix="picbench-") as folder:
        path = Path(folder) / Path(config.output or "cell").name
        unpack(before, path)
        try:
            here = config.model_copy(update={"output": str(path)})
            lines += measure_cell(here, services, Progress(0, None))
        except PicBenchError as error:
            failure = str(error)
        return pack(path), failure, lines


def run_on_ray(
    cells: Sequence[SweepCell], address: str, services: Services, say: Callable[[str], None]
) -> Iterator[SweepCell]:
    """Run the cells that have not ended on the cluster at `address`, and yield each as it ends.

    An `address` is Ray's: ``auto`` for the cluster that this machine is in, ``ray://HOST:10001``
    for one elsewhere. Raises ConfigError without such a cluster.
    """
    with _connected(address) as ray:
        size = _node_size(ray.nodes())
        under_way = {}
        for cell in cells:
            if cell.status in FINAL:
                yield cell
                continue
            task = ray.remote(max_retries=_RETRIES, **_wanted(cell.config, size))(run_cell)
            under_way[task.remote(cell.config, pack(cell.path), services)] = cell
        while under_way:
            [ended], _ = ray.wait(list(under_way))
            cell = under_way.pop(ended)
            try:
                packed, failure, lines = ray.get(ended)
                unpack(packed, cell.path)
            except ray.exceptions.RayError as error:
                failure, lines = f"{type(error).__name__}: lost {1 + _RETRIES} times", []
            cell.read(failure and " ".join(cell.places.put_into(failure).split()))
            for line in lines:
                say(f"{cell.name}: {line}")
            left = f"{len(cells) - len(under_way)} of {len(cells)} cells"
            say(f"{left}: {cell.name}: {cell.status}{f': {cell.reason}' if cell.reason else ''}")
            yield cell


def _node_size(nodes: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Cores and GPUs of the smallest node that runs tasks. Raises EngineError without one."""
    alive = [node["Resources"] for node in nodes if node["Alive"] and node["Resources"].get("CPU")]
    if not alive:
        raise EngineError("no node of the cluster runs tasks", hint="ray status shows its nodes")
    with_gpus = [node for node in alive if node.get("GPU")]
    cores, gpus = min((node["CPU"], node.get("GPU", 0)) for node in with_gpus or alive)
    return int(cores), int(gpus)


def _wanted(config: RunConfig, size: tuple[int, int]) -> dict[str, float]:
    """What a cell's task asks Ray for: a node's cores, or GPUs and their share of the cores."""
    cores, gpus = size
    wanted = 0 if config.device == "cpu" or not gpus else config.tensor_parallel
    return {"num_gpus": wanted, "num_cpus": max(1, cores * wanted // gpus) if wanted else cores}


@contextmanager
def _connected(address: str) -> Iterator[Any]:
    import ray

    try:
        if address != "auto":  # Where nothing listens, Ray tries for minutes and ends the process.
            where = urlsplit(address if "://" in address else f"ray://{address}")
            socket.create_connection((where.hostname, where.port or 10001), _SECONDS).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, ValueError) as error:
        hint = "ray start --head begins a cluster; `on` names it: auto, or ray://HOST:10001"
        raise ConfigError(f"`on={address}`: no such cluster", hint=hint) from error
    try:
        yield ray
    finally:
        ray.shutdown()
