"""Get an archive from the hub, or from the hub's cache on this machine."""

import hashlib
from pathlib import Path

from picbench.errors import ConfigError, DataError, PicBenchError
from picbench.workloads.sources.hub.archive import Archive

_KIND = "dataset"
_ELSEWHERE = "`data=bundled` has rows without a network, `data=DIR` takes files of your own"


def download(archive: Archive, *, offline: bool) -> Path:
    """Return the archive's path in the hub's cache; its folder is named by the commit.

    Nothing is asked of the network under `offline`, under the variable HF_HUB_OFFLINE, or when
    the archive's content is pinned and in the cache. Raises ConfigError where it cannot be had.
    """
    from huggingface_hub import hf_hub_download, is_offline_mode, try_to_load_from_cache

    alone = offline or is_offline_mode()
    try:
        cached = try_to_load_from_cache(
            archive.repository, archive.file, repo_type=_KIND, revision=archive.revision
        )
        if isinstance(cached, str) and (alone or archive.sha256):
            return Path(cached)
        if alone:
            raise _absent(archive, "`offline` or HF_HUB_OFFLINE forbids to fetch it")
        _ask(archive)
        found = hf_hub_download(
            archive.repository, archive.file, repo_type=_KIND, revision=archive.revision
        )
        return Path(found)
    except PicBenchError:
        raise
    # Errors of the HTTP library below huggingface_hub, which changed between its releases, too.
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(f"{_name(archive)}: {reason}", hint=_ELSEWHERE) from error


def _ask(archive: Archive) -> None:
    """Ask the hub for the file once; the download itself would try for 23 s without a network."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    url = hf_hub_url(archive.repository, archive.file, repo_type=_KIND, revision=archive.revision)
    try:
        get_hf_file_metadata(url)
    except HfHubHTTPError:
        raise
    except Exception as error:
        raise _absent(archive, "the hub cannot be reached") from error


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
