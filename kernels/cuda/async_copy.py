"""Gluon's asynchronous copy into shared memory, by the name that this Triton has for it."""

from typing import Any

from triton.experimental.gluon.language.nvidia.ampere import async_copy

#: `async_load` since Triton 3.9.
copy: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
