"""Mistakes of packages that add data sets: each is one line, and the others stay usable."""

from collections.abc import Callable
from pathlib import Path

import pytest

from picbench.errors import ConfigError
from picbench.workloads import datasets

GROUP = "picbench.datasets"

Register = Callable[[str, str, str], None]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("pathlib:Path", "is no subclass of Dataset"),
        ("picbench.workloads.datasets.base:Dataset", "has no `name`"),
        ("picbench.workloads.datasets.qa:MuSiQue", "has the name 'musique'"),
        ("operator:nothing", "cannot be loaded: AttributeError"),
    ],
)
def test_a_mistaken_data_set_leaves_the_others_listed(
    register: Register, value: str, message: str
) -> None:
    register(GROUP, "mine", value)
    with pytest.raises(ConfigError, match=message):
        datasets.find("mine")
    listed = datasets.describe()
    assert message in listed["mine"]
    assert "hops" in listed["musique"]


def test_an_unknown_metric_is_refused(register: Register, tmp_path: Path) -> None:
    (tmp_path / "pic_bleu.py").write_text(
        "from picbench.workloads.datasets.qa import MuSiQue\n"
        "class Bleu(MuSiQue):\n    name, metric = 'bleu', 'bleu'\n"
    )
    register(GROUP, "bleu", "pic_bleu:Bleu")
    with pytest.raises(
        ConfigError, match=r"no metric is called 'bleu' \(there are: f1, rouge-l, string-match\)"
    ):
        datasets.find("bleu")


def test_a_data_set_of_two_packages_is_refused(register: Register) -> None:
    register(GROUP, "musique", "pathlib:Path")
    with pytest.raises(ConfigError, match=r"'musique' is .* and .* in the group picbench.datasets"):
        datasets.names()
