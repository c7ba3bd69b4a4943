"""Tiny models with quantised weights, as the tools that people quantise with leave them.

Scales are of the largest weight that each covers. What compressed-tensors has is made by its own
library, which comes with vLLM; the other forms have the same numbers under other names, or packed
in another order. Nothing is calibrated: inputs are scaled when they come, if at all.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: Forms that compressed-tensors stores, and what it calls them.
_PRESETS = {
    "fp8": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "int8": "INT8",
    "int4": "W4A16",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}

#: Weights that a scale of AWQ and GPTQ covers, and numbers of 4 bits in an integer.
_GROUP, _PACKED = 64, 8

#: The order in which AWQ packs the numbers of neighbouring columns.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

#: Largest input that NVFP4 expects.
_INPUT = 16.0

_KEPT = ["lm_head"]


def save_quantised(model: Any, folder: Path, form: str) -> None:
    """Save a model of Hugging Face's, whose linear layers but the last are quantised on the way."""
    found = _FORMS[form](model)
    model.save_pretrained(folder, state_dict=_state(model))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": found}))


def _state(model: nn.Module) -> dict[str, Tensor]:
    # Buffers of the model's own are made when it is loaded.
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


def _compressed(model: Any, preset: str) -> dict[str, Any]:
    compressors: Any = import_module("compressed_tensors.compressors")
    quantization: Any = import_module("compressed_tensors.quantization")
    of_scales: Any = import_module("compressed_tensors.quantization.utils")

    config = quantization.QuantizationConfig(config_groups={preset: ["Linear"]}, ignore=_KEPT)
    quantization.apply_quantization_config(model, config)
    layers = [layer for _, layer in _linear(model)]
    most = torch.stack([layer.weight.abs().max() for layer in layers]).max().detach()
    for layer in layers:
        arguments, common = layer.quantization_scheme.weights, None
        if hasattr(layer, "weight_global_scale"):
            # One for all, as layers that vLLM joins must have the same.
            common = of_scales.generate_gparam(-most, most)
            layer.weight_global_scale.data.copy_(common)
            limit = torch.tensor(_INPUT)
            layer.input_global_scale.data.copy_(of_scales.generate_gparam(-limit, limit))
        low, high = _extremes(layer.weight.detach(), layer.weight_scale.shape)
        scale, _ = of_scales.calculate_qparams(low, high, arguments, global_scale=common)
        layer.weight_scale.data = scale.to(layer.weight_scale.dtype)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    found: dict[str, Any] = json.loads(compressor.quantization_config.model_dump_json())
    return found | {"quant_method": "compressed-tensors"}


def _extremes(weight: Tensor, scales: torch.Size) -> tuple[Tensor, Tensor]:
    """The smallest and largest of the weights that each of `scales` covers."""
    rows, columns = scales
    blocks = weight.view(rows, len(weight) // rows, columns, weight.shape[1] // columns)
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def _fp8(model: Any) -> dict[str, Any]:
    """As DeepSeek and Qwen publish: FP8 in blocks of 128 by 128."""
    _compressed(model, "FP8_BLOCK")
    _rename(model, {"weight_scale": "weight_scale_inv"})
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": _KEPT,
    }


def _modelopt(model: Any) -> dict[str, Any]:
    """As NVIDIA publishes: NVFP4, whose common scales are the reciprocals of the others'."""
    _compressed(model, "NVFP4")
    names = {
        "weight_packed": "weight",
        "weight_global_scale": "weight_scale_2",
        "input_global_scale": "input_scale",
    }
    for _, layer in _linear(model):
        for name in list(names)[1:]:
            getattr(layer, name).data.reciprocal_().squeeze_()
    _rename(model, names)
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": _KEPT}


def _rename(model: Any, names: Mapping[str, str]) -> None:
    for _, layer in _linear(model):
        for before, after in names.items():
            values = layer._parameters.pop(before)
            layer.register_parameter(after, values)


def _awq(model: Any) -> dict[str, Any]:
    for layer, numbers, scale in _rounded(model):
        rows, columns = numbers.t().shape
        packed = numbers.t().reshape(rows, columns // _PACKED, _PACKED)[..., list(_AWQ_ORDER)]
        zeros = torch.full((len(scale), packed.shape[1], _PACKED), 8)
        _give(layer, qweight=_pack(packed), qzeros=_pack(zeros), scales=scale)
    shape = {"bits": 4, "group_size": _GROUP, "zero_point": True}
    return {"quant_method": "awq", "version": "gemm", **shape, "modules_to_not_convert": _KEPT}


def _gptq(model: Any) -> dict[str, Any]:
    for layer, numbers, scale in _rounded(model):
        columns, rows = numbers.shape
        packed = numbers.t().reshape(rows // _PACKED, _PACKED, columns).transpose(1, 2)
        # It stores zero points less one.
        zeros = torch.full((len(scale), len(numbers) // _PACKED, _PACKED), 7)
        groups = torch.arange(numbers.shape[1], dtype=torch.int32) // _GROUP
        _give(layer, qweight=_pack(packed), qzeros=_pack(zeros), scales=scale, g_idx=groups)
    shape = {"bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True}
    return {"quant_method": "gptq", **shape}


def _rounded(model: Any) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Each layer, its weights as 0 to 15, and scales [groups, outputs] of the difference to 8."""
    for _, layer in _linear(model):
        groups = layer.weight.detach().float().unflatten(1, (-1, _GROUP))
        scale = groups.abs().amax(-1) / 7
        numbers = (groups / scale.unsqueeze(-1)).round().long() + 8
        yield layer, numbers.flatten(1), scale.t().to(torch.float16)


def _pack(numbers: Tensor) -> Tensor:
    """Join the last dimension's numbers of 4 bits, the first one lowest, as int32."""
    joined = (numbers << (4 * torch.arange(_PACKED))).sum(-1)
    return joined.to(torch.uint32).view(torch.int32)


def _give(layer: nn.Module, **values: Tensor) -> None:
    """Give a layer buffers in the place of its weight."""
    del layer._parameters["weight"]
    for name, value in values.items():
        layer.register_buffer(name, value.contiguous())


def _linear(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every linear layer that is quantised."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name not in _KEPT:
            yield name, layer


#: By form: quantises a model's layers and returns its `quantization_config`.
_FORMS: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{form: partial(_compressed, preset=preset) for form, preset in _PRESETS.items()},
    "fp8-hf": _fp8,
    "modelopt-nvfp4": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
}
