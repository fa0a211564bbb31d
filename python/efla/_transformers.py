"""Puts the functions of this package in place of the delta rules in transformers' models."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from efla import ops

_MODELS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "glm5_next")
# What the models' modules call, and our function. A model looks its function up at every call.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": ops.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": ops.fused_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": ops.chunk_kda,
    "recurrent_kimi_delta_attention": ops.fused_recurrent_kda,
}


class TransformersPatch:
    """What patch_transformers replaced: `functions` per model type, and `missing`, the model types that are not there."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.functions: dict[str, list[str]] = {}
        self.missing: list[str] = []
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # module, name, original, ours

    def _replace(self, model: str, module: Any) -> None:
        for name, function in _FUNCTIONS.items():
            original = getattr(module, name, None)
            if original is None:
                continue
            self.functions.setdefault(model, []).append(name)
            if not hasattr(original, "efla_replaces"):  # else an earlier patch is in force
                ours = _adapter(function, original)
                setattr(module, name, ours)
                self._replaced.append((module, name, original, ours))

    def undo(self) -> None:
        """Puts back what this patch replaced, except where something else has replaced it since."""
        for module, name, original, ours in self._replaced:
            if getattr(module, name) is ours:
                setattr(module, name, original)
        self._replaced.clear()

    def __enter__(self) -> TransformersPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __str__(self) -> str:
        lines = [f"efla computes the delta rules of transformers {self.version}:"]
        lines += [f"  {model}: {', '.join(names)}" for model, names in self.functions.items()]
        if self.missing:
            lines.append(f"  not in this version: {', '.join(self.missing)}")
        return "\n".join(lines)


def transformers_for(feature: str) -> Any:
    """Returns the module transformers. Raises ImportError where its version 5 is not installed, which `feature` needs."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ImportError(f"{feature}: transformers 5 is needed: {error}") from None
    if int(transformers.__version__.split(".")[0]) < 5:
        raise ImportError(f"{feature}: transformers 5 is needed, got {transformers.__version__}")
    return transformers


def patch_transformers() -> TransformersPatch:
    """Gives the models of transformers with a (gated or Kimi) delta rule the functions of this package, on CPUs and GPUs.

    Models that exist already and models made later use them, also where flash-linear-attention is installed. What these functions do
    not compute (a GPU that this build has no kernels for, torch.export) is computed as before.

    Returns:
        the patch, which prints what was replaced; undo(), or leaving a `with` block, puts it back. Raises ImportError where
        transformers 5 is not installed.
    """
    transformers = transformers_for("patch_transformers")
    patch = TransformersPatch(transformers.__version__)
    for model in _MODELS:
        try:
            module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        except ModuleNotFoundError:
            patch.missing.append(model)
            continue
        patch._replace(model, module)
        if model not in patch.functions:
            patch.missing.append(model)
    return patch


def _adapter(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with the names of the reference's arguments, and `original` where `function` does not compute."""
    takes, on_gpu = set(inspect.signature(function).parameters), bool(torch.ops.efla.has_gpu_kernels())
    # Where flash-linear-attention is installed, the original is its function, which fails without a GPU.
    reference = getattr(original, "__wrapped__", original)

    @functools.wraps(reference)
    def adapter(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **more: Any) -> Any:
        if not _computes(query, on_gpu) or _is_exporting():
            before = reference if query.device.type == "cpu" else original
            return before(query, key, value, g=g, beta=beta, **more)
        more = {name: argument for name, argument in more.items() if name in takes}
        return function(q=query, k=key, v=value, g=g, beta=beta, **more)

    adapter.efla_replaces = original  # type: ignore[attr-defined]
    return adapter


def _computes(query: Tensor, on_gpu: bool) -> bool:
    """Whether the functions of this package take tensors of the dtype and on the device of `query`."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if query.device.type == "cuda":
        return on_gpu and query.shape[-1] <= 256 and query.dtype in dtypes
    dtypes = (*dtypes, torch.float64)
    return query.device.type in ("cpu", "meta") and query.dtype in dtypes


def _is_exporting() -> bool:
    compiler = getattr(torch, "compiler", None)
    return compiler is not None and getattr(compiler, "is_exporting", lambda: False)()
