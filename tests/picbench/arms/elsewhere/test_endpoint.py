import pytest

from picbench.errors import ConfigError
from picbench.run.remote import TIMEOUT, Endpoint, parse_endpoints


def test_a_server_has_a_name_an_address_and_options() -> None:
    found = parse_endpoints(
        [
            "a=http://h:1/v1/",
            "b=https://h/v1,timeout=2.5,model=org/m",
            "c=http://h/v1,simulated=yes",
            "d=http://h/v1,simulated=no",
        ],
        ["full"],
    )
    assert found == {
        "a": Endpoint("http://h:1/v1", None, TIMEOUT),
        "b": Endpoint("https://h/v1", "org/m", 2.5),
        "c": Endpoint("http://h/v1", simulated=True),
        "d": Endpoint("http://h/v1"),
    }
    assert found["c"].spec == "http://h/v1 simulated"


@pytest.mark.parametrize(
    "value",
    [
        "http://h/v1",
        "=http://h/v1",
        "a/b=http://h/v1",
        "a=h:80/v1",
        "a=http://",
        "a=http://h:port/v1",
        "a=http://h/v1,models=m",
        "a=http://h/v1,model=",
        "a=http://h/v1,timeout=0",
        "a=http://h/v1,timeout=soon",
        "a=http://h/v1,simulated=1",
        "full=http://h/v1",
        "ours=http://h/v1",
    ],
)
def test_anything_else_is_refused_by_the_fields_name(value: str) -> None:
    with pytest.raises(ConfigError, match="`arm`"):
        parse_endpoints([value], ["ours"])


@pytest.mark.parametrize(
    "url", ["http://me:secret@h/v1", "http://secret@h/v1", "http://h/v1?key=secret"]
)
def test_secrets_in_an_address_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as error:
        parse_endpoints([f"a={url}"], [])
    assert "secret" not in str(error.value)


def test_two_servers_need_two_names() -> None:
    with pytest.raises(ConfigError, match="another arm"):
        parse_endpoints(["a=http://h/v1", "a=http://i/v1"], [])
