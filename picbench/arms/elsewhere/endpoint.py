"""Where a server is that is an arm, as users write it."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from picbench.engines import algorithms
from picbench.errors import ConfigError

#: Seconds that a server has for a whole reply.
TIMEOUT = 600.0

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FORM = (
    "write NAME=http://host:port/v1, or NAME=http://host:port/v1,model=ID,timeout=SECONDS,"
    "simulated=yes"
)

_OPTIONS = ("model", "timeout", "simulated")
_ANSWERS = {"yes": True, "no": False}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An OpenAI-compatible server: `url` has no credentials and ends before ``/completions``.

    `model` is its name of the model, None for the only one that it serves; `timeout` is in seconds.
    A `simulated` server computes nothing: its times are those of a model of an engine.
    """

    url: str
    model: str | None = None
    timeout: float = TIMEOUT
    simulated: bool = False

    @property
    def spec(self) -> str:
        """What tells this endpoint from others, on one line."""
        parts = (self.url, self.model or "", "simulated" if self.simulated else "")
        return " ".join(filter(None, parts))


def parse_endpoints(values: Iterable[str], taken: Collection[str]) -> dict[str, Endpoint]:
    """Servers by the names of their arms, from values of `arm`.

    Names that are `taken`, or are those of algorithms, would be mistaken for engines of picbench.
    Raises ConfigError for what is no ``NAME=URL``.
    """
    found: dict[str, Endpoint] = {}
    for value in values:
        name, equals, rest = value.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError("`arm`: needs a name and the address of a server", hint=_FORM)
        if name in found or name in taken or name in algorithms.names():
            raise ConfigError(
                f"`arm` {name}: the name is that of another arm or of an algorithm",
                hint="choose another name",
            )
        url, *options = rest.split(",")
        found[name] = _endpoint(name, url, options)
    return found


def _endpoint(name: str, url: str, options: Iterable[str]) -> Endpoint:
    settings: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        if key not in _OPTIONS or not value or key in settings:
            raise ConfigError(f"`arm` {name}: {option!r} is no option of a server", hint=_FORM)
        settings[key] = value
    return Endpoint(
        _checked_url(name, url),
        settings.get("model"),
        _seconds(name, settings.get("timeout")),
        _answer(name, settings.get("simulated", "no")),
    )


def _checked_url(name: str, url: str) -> str:
    """The address without a slash at its end; nothing in it may be a secret."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise ConfigError(f"`arm` {name}: the address is not one of HTTP", hint=_FORM)
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"`arm` {name}: the address has more than host, port and path",
            hint="put the key into the environment, as OPENAI_API_KEY",
        )
    return url.rstrip("/")


def _answer(name: str, value: str) -> bool:
    if value not in _ANSWERS:
        raise ConfigError(f"`arm` {name}: simulated is yes or no, not {value!r}", hint=_FORM)
    return _ANSWERS[value]


def _seconds(name: str, value: str | None) -> float:
    if value is None:
        return TIMEOUT
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"`arm` {name}: timeout {value!r} is no number of seconds", hint=_FORM)
    return seconds
