"""An arm: one of the things that a run compares."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from picbench.arms.elsewhere.endpoint import Endpoint
from picbench.engines.algorithms import Registry, Reuse
from picbench.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Arm:
    """An algorithm and the engine that it runs on.

    `name` is the algorithm's label, `algorithm` its canonical spec (``"epic:k=16"``), `served` the
    spec that the engine serves, `stock` says whether vLLM runs without any part of picbench in it,
    `reuse` what of earlier requests may be reused, `documents` whether chunks are compiled after
    the text of their documents, `reorders` whether prompts are sent with their chunks in another
    order, each once.

    An arm with an `endpoint` is a server elsewhere: its `algorithm` is where that is, and nothing
    is known of what it reuses, so that nothing is asked of it.
    """

    name: str
    algorithm: str
    served: str
    stock: bool
    reuse: Reuse
    documents: bool = False
    reorders: bool = False
    endpoint: Endpoint | None = None


def parse_arms(specs: Iterable[str], *, same_engine: bool = False) -> tuple[Arm, ...]:
    """Arms from values of `algo`, each one spec or several with commas between them.

    Algorithms that compile no chunks run on stock vLLM unless `same_engine`. Raises ConfigError
    for unknown names and options, for an arm given twice and for none at all.
    """
    wanted = [spec.strip() for value in specs for spec in value.split(",")]
    if not any(wanted):
        raise ConfigError("`algo`: no algorithm given", hint="see picbench list algorithms")
    registry = Registry()
    arms = [_arm(spec, same_engine, registry) for spec in wanted]
    _refuse_duplicates(arms)
    return tuple(arms)


def arms_elsewhere(endpoints: Mapping[str, Endpoint]) -> tuple[Arm, ...]:
    """The arms that are servers elsewhere, by their names."""
    return tuple(
        Arm(name, endpoint.spec, "", stock=False, reuse=Reuse.NOTHING, endpoint=endpoint)
        for name, endpoint in endpoints.items()
    )


def _arm(spec: str, same_engine: bool, registry: Registry) -> Arm:
    if not spec:
        raise ConfigError("`algo`: an empty name between commas", hint="write full,prefix,mepic")
    try:
        algorithm = registry.parse(spec)
    except ConfigError as error:
        raise ConfigError(f"`algo`: {error.message}", hint=error.hint) from error
    stock = algorithm.reuse is not Reuse.CHUNKS and not same_engine
    return Arm(
        name=algorithm.label,
        algorithm=algorithm.spec,
        served=algorithm.served,
        stock=stock,
        reuse=algorithm.reuse,
        documents=algorithm.documents,
        reorders=algorithm.reorders,
    )


def _refuse_duplicates(arms: Iterable[Arm]) -> None:
    seen: set[str] = set()
    for arm in arms:
        if arm.name in seen:
            raise ConfigError(f"`algo`: {arm.name} is given twice", hint="name each arm once")
        seen.add(arm.name)
