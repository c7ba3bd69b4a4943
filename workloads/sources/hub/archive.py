"""Which archive of which repository `data=hub` means."""

from dataclasses import dataclass

from picbench.errors import ConfigError

HUB = "hub"

_PREFIX = HUB + ":"


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip file with LongBench's row files in a data set repository of the hub.

    `revision` is a commit, a branch or a tag. `sha256` is what the file's content must hash to;
    None where that is not known beforehand.
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
    """Tell whether `data` names the hub rather than a folder or a file."""
    return data == HUB or data.startswith(_PREFIX)


def parse(data: str) -> Archive:
    """Read ``hub``, LongBench at its pinned revision, or ``hub:OWNER/NAME[@REVISION]``.

    The second form takes another repository with a ``data.zip`` like LongBench's, whose content
    nobody vouches for. Raises ConfigError where no repository is named.
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
