"""The row file of one data set out of an archive."""

import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from picbench.errors import ConfigError, DataError
from picbench.workloads.sources.cache_files import cache_directory, write_whole
from picbench.workloads.sources.hub.archive import Archive
from picbench.workloads.sources.hub.download import checksum, download

_TEXT = "`data=DIR` with text files makes needle's rows, `data=bundled` has some"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where rows from the hub came from, for the manifest.

    `revision` is the commit that was read, `sha256` the hash of `file`, and `pinned` says that
    picbench knew the hash beforehand.
    """

    repository: str
    revision: str
    file: str
    sha256: str
    pinned: bool


def hub_rows(archive: Archive, dataset: str, *, offline: bool) -> tuple[Path, Origin]:
    """Return a file with the rows of `dataset`, in LongBench's schema, and where they are from.

    The file is unpacked once, into the user's cache. Raises ConfigError where the archive cannot
    be had or has no such data set, DataError where its content is wrong.
    """
    if dataset == "needle":
        raise ConfigError("`data=hub`: the hub has no rows for 'needle'", hint=_TEXT)
    path = download(archive, offline=offline)
    sha256 = checksum(archive, path)
    file = cache_directory("hub") / sha256[:16] / f"{dataset}.jsonl"
    if not file.exists():
        write_whole(file, _member(path, dataset))
    revision = path.parent.name  # The hub's cache has a folder for every commit.
    return file, Origin(archive.repository, revision, archive.file, sha256, bool(archive.sha256))


def _member(path: Path, dataset: str) -> bytes:
    wanted = f"{dataset}.jsonl"
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if PurePosixPath(name).name == wanted]
            if not names:
                raise ConfigError(
                    f"`data=hub`: {path} has no {wanted}", hint="`data=bundled` or `data=DIR`"
                )
            return archive.read(names[0])
    except zipfile.BadZipFile as error:
        raise DataError(
            f"{path}: {error}", hint=f"delete {path.parents[2]} to download it again"
        ) from error
