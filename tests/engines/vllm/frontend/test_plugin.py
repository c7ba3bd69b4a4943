"""What the plug-in does in processes of vLLM, of which most have nothing to do with picbench."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from picbench.engines.vllm.frontend import plugin
from picbench.workloads.testbed import model_path

_LIGHT = """
import sys
from picbench.engines.vllm.frontend.plugin import register
register()
register()
print(sorted({name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names))
"""

#: A process in which plug-ins are loaded before anything of an engine is imported.
_STOCK_AND_OURS = f"""
import sys
from vllm.plugins import load_general_plugins
load_general_plugins()
assert "vllm.engine.arg_utils" not in sys.modules
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import core
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
own = {{name for name in sys.modules if name.startswith("picbench.")}}
def extended():
    methods = InputProcessor.process_inputs, InputProcessor.__init__, AsyncLLM.generate
    return [hasattr(m, "__wrapped__") for m in (*methods, core.EngineCore.preprocess_add_request)]
stock = EngineArgs({str(model_path())!r}, dtype="float32").create_engine_config()
assert stock.additional_config == {{}} and stock.scheduler_config.scheduler_cls is None
assert own == {{name for name in sys.modules if name.startswith("picbench.")}}
print(sorted(own), extended())
pic = {{"pic": {{}}}}
config = EngineArgs(stock.model_config.model, additional_config=pic).create_engine_config()
print(config.additional_config["pic_checked"], extended())
"""


def output(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    return done.stdout.decode().splitlines()


def test_nothing_but_python_is_imported() -> None:
    [found] = output(_LIGHT)
    assert set(eval(found)) - {"sitecustomize"} <= {"picbench", "__main__"} | _of_environment()


def _of_environment() -> set[str]:
    """What Python itself imports here, such as the finders of editable installations."""
    names = "{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names"
    [found] = output(f"import sys; print(sorted({names}))")
    return set(eval(found))


def test_engines_that_do_not_ask_are_stock() -> None:
    stock, ours = output(_STOCK_AND_OURS)[-2:]
    modules = [f"picbench.engines{rest}" for rest in ("", ".vllm", ".vllm.frontend")]
    assert stock == f"{[*modules, plugin.__name__]} {[False] * 4}"
    # Engine cores extend their own methods when they make their scheduler.
    assert ours == f"True {[True, True, True, False]}"


@pytest.mark.parametrize("kind", [None, SimpleNamespace(), SimpleNamespace(from_cli_args=print)])
def test_a_release_with_other_arguments_is_left_alone(kind: Any) -> None:
    module = SimpleNamespace(EngineArgs=kind)
    before = dict(vars(kind)) if kind else {}
    plugin._extend(module)
    assert module.EngineArgs is kind
    assert before == (dict(vars(kind)) if kind else {})


def test_what_does_not_ask_is_passed_on() -> None:
    class EngineArgs:
        additional_config: Any = None

        def create_engine_config(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

        @classmethod
        def from_cli_args(cls, args: Any) -> Any:
            made = cls()
            made.additional_config = args
            return made

    module = SimpleNamespace(EngineArgs=EngineArgs)
    plugin._extend(module)
    extended = EngineArgs.create_engine_config
    plugin._extend(module)
    assert EngineArgs.create_engine_config is extended

    class Derived(EngineArgs):
        """As AsyncEngineArgs is."""

    for additional in (None, {}, {"picture": 1}, "pic", 5):
        made = Derived.from_cli_args(additional)
        assert type(made) is Derived
        assert made.create_engine_config(1, a=2) == ((1,), {"a": 2})
