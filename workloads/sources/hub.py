"""Rows of the real data sets from the Hugging Face hub, at a revision that is pinned."""

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from picbench.errors import ConfigError, DataError, PicBenchError
from picbench.files import write_whole
from picbench.workloads.sources.cache_files import cache_directory

HUB = "hub"

_PREFIX = HUB + ":"
_KIND = "dataset"
_ELSEWHERE = "`data=bundled` has rows without a network, `data=DIR` takes files of your own"
_TEXT = "`data=DIR` with text files makes needle's rows, `data=bundled` has some"


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file with LongBench's row files in a data set repository of the hub.

    `revision` is a commit, a branch or a tag. `sha256` is what the file's content must hash to;
    None where it is not pinned.
    """

    repository: str
    revision: str
    file: str = "data.zip"
    sha256: str | None = None


#: LongBench v1 (its second version holds other tasks); 200 rows for each data set here.
LONGBENCH = Archive(
    repository="zai-org/LongBench",
    revision="5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
    sha256="cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64",
)


def is_hub(data: str) -> bool:
    """Whether `data` is the hub rather than a folder or a file."""
    return data == HUB or data.startswith(_PREFIX)


def parse(data: str) -> Archive:
    """Read ``hub``, LongBench at its pinned revision, or ``hub:OWNER/NAME[@REVISION]``.

    The second form takes another repository with a ``data.zip`` like LongBench's, whose content
    is not verified. Raises ConfigError where no repository is named.
    """
    if data == HUB:
        return LONGBENCH
    repository, _, revision = data.removeprefix(_PREFIX).partition("@")
    owner, _, name = repository.partition("/")
    if not owner or not name or "/" in name:
        raise ConfigError(
            f"`data` {data}: no such form", hint="`data=hub` or hub:OWNER/NAME[@REVISION]"
        )
    return Archive(repository, revision or "main")


def download(archive: Archive, *, offline: bool) -> Path:
    """Return the archive's path in the hub's cache; its folder is named by the commit.

    The network is not used with `offline`, with the variable HF_HUB_OFFLINE, or when the
    archive is pinned and in the cache. Raises ConfigError where it is not available.
    """
    from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache

    local, place = offline or is_offline_mode(), (archive.repository, archive.file)
    kind: dict[str, Any] = {"repo_type": _KIND, "revision": archive.revision}
    try:
        cached = try_to_load_from_cache(*place, **kind)
        if isinstance(cached, str) and (local or archive.sha256):
            return Path(cached)
        if local:
            raise _absent(archive, "`offline` or HF_HUB_OFFLINE forbids to fetch it")
        _reach(archive)
        return Path(hf_hub_download(*place, **kind))
    except PicBenchError:
        raise
    # Also errors of the HTTP library under huggingface_hub, which differs between releases.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(f"{_name(archive)}: {reason}", hint=_ELSEWHERE) from error


def reach(url: str) -> None:
    """Request a file's metadata once; ConnectionError where no hub can be reached.

    Downloads would retry for 23 s without a network, and the library of models for a minute.
    """
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(url)
    except HfHubHTTPError:
        pass  # The hub answered; what it says of the file is for the download to tell.
    # Errors of the HTTP library under huggingface_hub, as above.
    except Exception as error:
        raise ConnectionError("the hub cannot be reached") from error


def _reach(archive: Archive) -> None:
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(archive.repository, archive.file, repo_type=_KIND, revision=archive.revision)
    try:
        reach(url)
    except ConnectionError as error:
        raise _absent(archive, str(error)) from error


def checksum(archive: Archive, path: Path) -> str:
    """Return the SHA-256 of the file in hex; DataError unless it is the archive's own."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if archive.sha256 not in (None, found):
        raise DataError(
            f"{path}: its SHA-256 is {found}, {archive.repository} is pinned to {archive.sha256}",
            hint=f"delete {path.parents[2]} to download it again",
        )
    return found


def _absent(archive: Archive, why: str) -> ConfigError:
    return ConfigError(
        f"{_name(archive)} is not in the hub's cache on this machine, and {why}", hint=_ELSEWHERE
    )


def _name(archive: Archive) -> str:
    return f"`data=hub`: {archive.file} of {archive.repository} at {archive.revision[:12]}"


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of rows from the hub, for the manifest.

    `revision` is the commit that was read. `file` is LongBench's archive, with its `sha256`, which
    was verified if `pinned`; or a subset and split, ``CONFIG/SPLIT``, without a hash, `pinned` if
    the user named the commit.
    """

    repository: str
    revision: str
    file: str
    sha256: str | None
    pinned: bool


def hub_rows(archive: Archive, dataset: str, *, offline: bool) -> tuple[Path, Origin]:
    """Return a file with the rows of `dataset`, in LongBench's schema, and their origin.

    The file is unpacked once, into the user's cache. Raises ConfigError where the archive is not
    available or has no such data set, DataError where its content is wrong.
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
