"""What a registry remembers of the specs that it parsed."""

from picbench.engines.algorithms import Registry
from picbench.engines.algorithms.registry import _REMEMBERED


def test_a_spec_is_parsed_once() -> None:
    registry = Registry()
    assert registry.parse("epic:k=8") is registry.parse("epic:k=8")


def test_specs_of_clients_do_not_fill_the_memory() -> None:
    registry = Registry()
    for k in range(3 * _REMEMBERED):
        assert registry.parse(f"epic:k={k}").spec == f"epic:k={k}"
        assert len(registry._parsed) <= _REMEMBERED
