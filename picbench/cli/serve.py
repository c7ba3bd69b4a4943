"""The commands that serve over HTTP: serve, route."""

from collections.abc import Sequence
from difflib import get_close_matches
from secrets import token_hex
from typing import Any

import click

from picbench.cli.guard import GuardedCommand
from picbench.cli.options import options_of

_SERVE = "picbench.settings:ServeConfig"


@click.command(cls=GuardedCommand, context_settings={"ignore_unknown_options": True})
@click.argument("model", metavar="MODEL")
@click.argument("flags", metavar="[VLLM_FLAG]...", nargs=-1, type=click.UNPROCESSED)
@options_of(_SERVE)
@options_of("picbench.settings:RunConfig", only=("tiers", "on_pressure", "compile_order", "device"))
@click.option(
    "--salts/--no-salts",
    default=None,
    help="Share KV only among clients of one API key; by default where the server has several.",
)
def serve(
    *,
    model: str,
    flags: tuple[str, ...],
    algo: str,
    marks: str | None,
    parts: str | None,
    show_command: bool,
    **given: Any,
) -> None:
    """Serve a model over HTTP: vLLM's own OpenAI server, with all that picbench needs set.

    MODEL is what picbench run --model takes. All other flags are vLLM's, such as --port 8001 or
    --max-model-len 2048; those that would replace a part of picbench are refused.
    """
    from picbench.engines.algorithms import parse
    from picbench.engines.vllm.serve import check_start, server_command
    from picbench.errors import ConfigError
    from picbench.workloads import models

    for word in (model, *flags[:1]):
        if word.startswith("-") is (word is model):
            raise click.UsageError(f"{word}: give MODEL first, then the flags of vLLM")
    _check_spelling(flags)
    try:
        parse(algo)
    except ConfigError as error:
        raise ConfigError(f"`algo`: {error.message}", hint=error.hint) from error
    given |= {"algorithm": algo, "marks": _marks(marks)}
    if parts is not None:
        secret = token_hex(8)
        given["parts"] = parts.split(",")
        given["marks"] = given["marks"] or [f"[[{secret}]]", f"[[/{secret}]]"]
    found = models.resolve(model)
    has_template = models.has_chat_template(found)
    command = server_command(str(found.path), model, flags, has_template=has_template, **given)
    if not show_command:
        check_start(given["device"], given["tiers"])
    for note in command.notes:
        click.echo(f"picbench: {note}", err=True)
    if show_command:
        click.echo(command.shell())
    else:
        command.run()


@click.command(cls=GuardedCommand, context_settings={"show_default": True})
@click.option(
    *("--server", "servers"),
    nargs=3,
    multiple=True,
    required=True,
    metavar="URL EVENTS REPLAY",
    help="A server, and the endpoint and replay_endpoint of its KV events; once for each server.",
)
@click.option("--indexer", default="http://localhost:8090", help="Where the indexer answers.")
@click.option("--host", default="127.0.0.1", help="The router's own address; all: 0.0.0.0.")
@click.option("--port", default=8080, type=click.IntRange(1, 65535), help="The router's own port.")
@options_of(_SERVE, only=("marks", "parts"))
def route(
    *, servers: Any, indexer: str, host: str, port: int, marks: str | None, parts: str | None
) -> None:
    """Pass each request on to the server that has most of its chunks in its cache.

    Servers have the same model, and publish KV events. Give --marks and --parts as they have them.
    The indexer is python -m dynamo.indexer of ai-dynamo-runtime.
    """
    import uvicorn

    from picbench.engines.vllm.marks import DocumentMarks
    from picbench.engines.vllm.parts import PartReader, read_kinds
    from picbench.engines.vllm.route import RoutedServer, Router

    found: Any = DocumentMarks.of(_marks(marks or "on"))
    reader = PartReader(found, read_kinds((parts or "documents").split(",")))
    fleet = [RoutedServer(url.rstrip("/"), *events) for url, *events in servers]
    app = Router(fleet, indexer, reader).app()
    uvicorn.run(app, host=host, port=port, server_header=False, date_header=False)


def _check_spelling(flags: Sequence[str]) -> None:
    """Refuse what looks like an option of this command, before vLLM has been imported to do so.

    Those of vLLM are less like them than the limit, but for ``--device-ids``.
    """
    options = {name: name for each in serve.params for name in each.opts if name.startswith("--")}
    known = {"--algorithm": "--algo", **options}
    for word in flags:
        flag = word.partition("=")[0].replace("_", "-")
        near = get_close_matches(flag.removeprefix("--"), [n[2:] for n in known], 1, 0.76)
        if word.startswith("--") and near and not flag.startswith("--device-"):
            hint = f"did you mean {known[f'--{near[0]}']!r}?"
            raise click.UsageError(f"no such option: {word.partition('=')[0]} ({hint})")


def _marks(given: str | None) -> bool | list[str] | None:
    """The setting for a value of ``--marks``. Raises ConfigError."""
    from picbench.engines.vllm.marks import DocumentMarks
    from picbench.errors import ConfigError

    found = given == "on" or (given.split(",") if given else None)
    try:
        DocumentMarks.of(found)
    except ConfigError as error:
        hint = "use on, or a pair of your own, such as '[[d81f]],[[/d81f]]'"
        said = error.message.replace(repr(found), repr(given))
        raise ConfigError(said, hint=hint) from error
    return found
