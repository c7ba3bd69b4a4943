"""The engine against the oracle with scaled, partial and interleaved rotary embeddings.

The default one, llama3's, and what is only interleaved are rows of the table of architectures.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from small_engine import small_config
from tiny_llama import write_model

from picbench.engines.engine import Engine
from picbench.engines.oracle import Blend, Oracle, Rule, full, mepic, naive
from picbench.engines.request import Chunk, Request, Text

TOLERANCE = 1e-3
APART = 0.05

RULES: dict[str, Rule | Blend] = {
    "naive": naive(),
    "mepic": mepic(),
    "cacheblend:r=0.2:deviation=k": Blend(0.2, "k"),
    "full": full(),
}


class Kind(NamedTuple):
    """A model's architecture in Hugging Face's words, and its rotary parameters."""

    architecture: str
    parameters: dict[str, Any]
    keys_without_rope: bool = False


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "linear": Kind("llama", {"rope_type": "linear", "factor": 4.0}),
    "dynamic": Kind("llama", {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": Kind("llama", _YARN),
    "yarn, keys without RoPE": Kind("llama", _YARN, keys_without_rope=True),
    "partial": Kind("phi3", {"rope_type": "default", "partial_rotary_factor": 0.75}),
    "GLM-4, keys without RoPE": Kind(
        "glm4", {"rope_type": "default", "partial_rotary_factor": 0.5}, keys_without_rope=True
    ),
}


class Served(NamedTuple):
    """An engine, and the oracle of its model."""

    engine: Engine
    oracle: Oracle


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    kind: Kind = request.param
    folder = write_model(
        kind.architecture,
        tmp_path_factory.mktemp(kind.architecture),
        num_hidden_layers=3,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10_000.0} | kind.parameters,
    )
    with Engine(
        small_config(folder, 200, 256, tiers="", keys_without_rope=kind.keys_without_rope)
    ) as engine:
        yield Served(engine, Oracle(folder))


@pytest.mark.parametrize("algorithm", list(RULES))
def test_chunks_at_any_position(served: Served, draw: Any, deviation: Any, algorithm: str) -> None:
    """Each chunk is computed at one position and read at two others."""
    chunks = {name: Chunk(tokens=draw(n, n)) for name, n in (("A", 70), ("B", 17), ("C", 40))}
    for order in ("CAB", "BCA"):
        segments = [Text(tokens=draw(20, 1)), *(chunks[c] for c in order), Text(tokens=draw(9, 2))]
        request = Request(segments, algorithm=algorithm)
        [result] = served.engine.generate([request], max_tokens=6, logprobs=8, ignore_eos=True)
        assert deviation(served.oracle, RULES[algorithm], request, result) < TOLERANCE
        if algorithm != "full":
            assert deviation(served.oracle, full(), request, result) > APART
