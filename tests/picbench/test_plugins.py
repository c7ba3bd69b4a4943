"""Mistakes of packages that add classes: each is one line that names the package."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest

from picbench.engines.algorithms import Algorithm, ChunkAlgorithm, Registry, describe, option, parse
from picbench.engines.chunk_cache.tiers.notation import describe_tiers
from picbench.engines.planning.policy import ChunkPolicy
from picbench.errors import ConfigError
from picbench.plugins import installed, load_class

Register = Callable[[str, str, str], None]


class Unnamed(ChunkAlgorithm):
    summary: ClassVar[str] = "no name"

    def plan_chunk(self, index: int, length: int) -> ChunkPolicy:
        return ChunkPolicy()


class Wordless(Unnamed):
    name: ClassVar[str] = "wordless"
    summary: ClassVar[str] = None  # type: ignore[assignment]


class Named(Unnamed):
    name: ClassVar[str] = "named"


class Undecorated(Named):
    name: ClassVar[str] = "undecorated"
    n: int = option(8, "tokens", (8, 16))


@dataclass(frozen=True)
class FieldWithoutOption(Named):
    name: ClassVar[str] = "plain"
    n: int = 8


class OneArgument(Named):
    name: ClassVar[str] = "one-argument"

    def plan_chunk(self, length: int) -> ChunkPolicy:  # type: ignore[override]
        return ChunkPolicy()


class Abstract(ChunkAlgorithm):
    name: ClassVar[str] = "abstract"
    summary: ClassVar[str] = "no plan_chunk"


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("unnamed", "Unnamed", "has no `name`"),
        ("wordless", "Wordless", "has no `summary`"),
        ("another", "Named", "has the name 'named', which its entry point must have"),
        ("undecorated", "Undecorated", r"put @dataclass\(frozen=True\) before it"),
        ("plain", "FieldWithoutOption", "'n' is not made by `option`"),
        ("one-argument", "OneArgument", "must take the index and the length of a chunk"),
        ("abstract", "Abstract", "lacks plan_chunk"),
        ("path", "Path", "is no subclass of Algorithm"),
        ("absent", "Absent", "cannot be loaded: AttributeError"),
    ],
)
def test_a_mistaken_algorithm_is_refused_and_the_others_are_listed(
    register: Register, name: str, kind: str, message: str
) -> None:
    register("picbench.algorithms", name, f"{__name__}:{kind}")
    with pytest.raises(ConfigError, match=message):
        parse(name)
    assert parse("mepic").spec == "mepic"
    listed = {found: text for found, text, _ in describe()}
    assert f"{__name__}:{kind}" in listed[name]
    assert listed["mepic"].startswith("MEPIC")


def test_a_name_of_two_packages_is_refused(register: Register) -> None:
    register("picbench.algorithms", "mepic", f"{__name__}:Named")
    with pytest.raises(ConfigError, match=r"'mepic' is .* of stranger"):
        Registry().parse("naive")


def test_the_package_of_a_module_that_fails_is_named(register: Register) -> None:
    register("picbench.algorithms", "nowhere", "pic_nowhere:Nowhere")
    point = installed("picbench.algorithms")["nowhere"]
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError.*pic_nowhere:Nowhere of stranger"):
        load_class(point, Algorithm)  # type: ignore[type-abstract]
    with pytest.raises(ConfigError, match="an unknown package"):
        load_class(EntryPoint("a", "pic_nowhere:B", "c"), Path)


def test_a_mistaken_tier_leaves_the_others_listed(register: Register) -> None:
    register("picbench.tiers", "mine", "pathlib:Path")
    listed = {name: text for name, text, _ in describe_tiers()}
    assert "no subclass of Tier" in listed["mine"]
    assert "memory of this machine" in listed["host"]
