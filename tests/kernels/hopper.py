"""Compiles kernels for Hopper, where there need be no GPU."""

import subprocess
import sys
from collections.abc import Mapping

import pytest

_COMPILE = """
import sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

types, fixed, options = {types!r}, {fixed!r}, {options!r}
kernel = getattr(import_module("picbench.kernels.cuda." + {module!r}), {name!r})
names = kernel.arg_names
types = {{name: types.get(name, "*i32") for name in names if name not in fixed}}
types |= {{name: "i32" for name in names if "stride" in name or name.endswith("_head")}}
even = [name for name in names if name in types and (types[name][0] == "*" or "stride" in name)]
source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
    kernel,
    {{name: types.get(name, "constexpr") for name in names}},
    {{(names.index(name),): value for name, value in fixed.items()}},
    {{(names.index(name),): [["tt.divisibility", 16]] for name in even}},
)
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
exact = "*fp32" in (types.get("key"), types.get("k"))
assert exact or built.asm["ptx"].count("wgmma.mma_async") > 0
print("shared", built.metadata.shared)
"""


def compiled(
    module: str,
    name: str,
    kind: str,
    fixed: Mapping[str, object],
    *,
    warps: int = 4,
    stages: int = 3,
) -> int:
    """Bytes of shared memory of a module's kernel `name`, by a process of its own.

    Queries, keys and values are of a `kind`, as Triton's signatures name it; what has no type here
    is int32. Products of keys in half precision must be wgmma's.
    """
    pytest.importorskip("triton")
    types = dict.fromkeys(["query", "key", "value", "out", "parts"], f"*{kind}")
    types |= dict.fromkeys(["partial", "lse", "part_lse", "cos_sin"], "*fp32")
    types |= {"scale": "fp32", "splits": "i32", "kv_heads": "i32"}
    options = {"num_warps": warps, "num_stages": stages}
    named = {"module": module, "name": name, "options": options}
    script = _COMPILE.format(types=types, fixed=dict(fixed), **named)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split("shared ")[1].split()[0])
