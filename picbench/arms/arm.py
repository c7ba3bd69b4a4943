"""An arm: one of the things that a run compares."""

from collections.abc import Iterable
from dataclasses import dataclass

from picbench.engines import algorithms
from picbench.engines.algorithms import Reuse
from picbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arm:
    """An algorithm and the engine that it runs on.

    `name` is the algorithm's label, `algorithm` its canonical spec (``"epic:k=16"``), `stock` says
    whether vLLM runs without any part of picbench in it, `reuse` what of earlier requests may be
    reused, `documents` whether chunks are compiled after the text of their documents.
    """

    name: str
    algorithm: str
    stock: bool
    reuse: Reuse
    documents: bool = False


def parse_arms(specs: Iterable[str], *, same_engine: bool = False) -> tuple[Arm, ...]:
    """Arms from values of `algo`, each one spec or several with commas between them.

    Algorithms that compile no chunks run on stock vLLM unless `same_engine`. Raises ConfigError
    for unknown names and options, for an arm given twice and for none at all.
    """
    wanted = [spec.strip() for value in specs for spec in value.split(",")]
    if not any(wanted):
        raise ConfigError("`algo`: no algorithm given", hint="see picbench list algorithms")
    arms = [_arm(spec, same_engine) for spec in wanted]
    _refuse_duplicates(arms)
    return tuple(arms)


def _arm(spec: str, same_engine: bool) -> Arm:
    if not spec:
        raise ConfigError("`algo`: an empty name between commas", hint="write full,prefix,mepic")
    try:
        algorithm = algorithms.parse(spec)
    except ConfigError as error:
        raise ConfigError(f"`algo`: {error.message}", hint=error.hint) from error
    stock = algorithm.reuse is not Reuse.CHUNKS and not same_engine
    return Arm(algorithm.label, algorithm.spec, stock, algorithm.reuse, algorithm.documents)


def _refuse_duplicates(arms: Iterable[Arm]) -> None:
    seen: set[str] = set()
    for arm in arms:
        if arm.name in seen:
            raise ConfigError(f"`algo`: {arm.name} is given twice", hint="name each arm once")
        seen.add(arm.name)
