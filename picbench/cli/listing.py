"""`picbench list`: the names that `picbench run` takes."""

from collections.abc import Iterable, Mapping

import click


@click.group(name="list")
def listing() -> None:
    """List algorithms, datasets, columns, models, tiers or traffic with their options."""


@listing.command()
def algorithms() -> None:
    """Algorithms and their options, for --algo."""
    from picbench.engines import algorithms as known

    _print(known.describe())


@listing.command()
def datasets() -> None:
    """Data sets, for --dataset."""
    from picbench.workloads import datasets as known

    _print(known.describe().items())


@listing.command()
def columns() -> None:
    """Fields of rows and mappings by name, for --columns."""
    from picbench.workloads.sources import columns as known

    _print(known.FIELDS.items())
    click.echo("Mappings by name:")
    _print(known.NAMED.items())


@listing.command()
def models() -> None:
    """Built-in models, for --model, and architectures: which were checked, which are refused."""
    from picbench.workloads import models as known
    from picbench.workloads.models import architectures

    _print(known.describe().items())
    click.echo("Architectures, checked against the oracle with tiny models of random weights:")
    _print(architectures.rows())


@listing.command()
def tiers() -> None:
    """Kinds of storage below the KV pool, for --tiers."""
    from picbench.engines.chunk_cache.tiers.kinds import describe_tiers

    _print(describe_tiers())


@listing.command()
def traffic() -> None:
    """Papers' workloads, for picbench traffic --preset."""
    from picbench.papers.paper_settings import presets

    _print((name, _settings(values)) for name, values in presets().items())


def _settings(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _print(rows: Iterable[tuple[str, ...]]) -> None:
    entries = list(rows)
    width = max((len(entry[0]) for entry in entries), default=0)
    for name, *texts in entries:
        click.echo(f"{name:<{width}}  {'  '.join(text for text in texts if text)}".rstrip())
