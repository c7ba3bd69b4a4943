"""The parser of vLLM's server, which moved in 0.33.0."""

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ModuleNotFoundError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

__all__ = ["make_arg_parser"]
