"""Puts the functions of this package in place of the delta rules in transformers' models."""

from __future__ import annotations

import functools
import importlib
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from efla import ops
from efla.ops._check import is_compiling

# What the models' modules call, and our function. A model looks its function up at every call.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": ops.chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": ops.fused_recurrent_gated_delta_rule,
    "chunk_kimi_delta_attention": ops.chunk_kda,
    "recurrent_kimi_delta_attention": ops.fused_recurrent_kda,
}


class TransformersPatch:
    """What patch_transformers replaced: `functions` per model type.

    `missing` are the model types of which a function was left alone, because it has arguments that this package does not know.
    """

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
            if not _takes(function, original):
                if model not in self.missing:
                    self.missing.append(model)
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
            lines.append(f"  with other arguments, left alone: {', '.join(self.missing)}")
        return "\n".join(lines)

    __repr__ = __str__


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

    Models that exist already and models made later use them, also where flash-linear-attention is installed. A call that these
    functions refuse or do not compute (a GPU that this build has no kernels for, tensors of several dtypes, torch.export) is
    computed as before.

    Returns:
        the patch, which prints what was replaced; undo(), or leaving a `with` block, puts it back. Raises ImportError where
        transformers 5 is not installed.
    """
    transformers = transformers_for("patch_transformers")
    patch = TransformersPatch(transformers.__version__)
    for model in _models(transformers):
        patch._replace(model, importlib.import_module(f"transformers.models.{model}.modeling_{model}"))
    return patch


def _models(transformers: Any) -> list[str]:
    """Returns the model types whose code defines one of the functions. Reads the files, because importing all of them takes long."""
    definition = re.compile(rf"^def ({'|'.join(_FUNCTIONS)})\(", re.MULTILINE)
    files = sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    files = [file for file in files if file.stem == f"modeling_{file.parent.name}"]
    return [file.parent.name for file in files if definition.search(file.read_text("utf-8"))]


# The reference's names of our arguments; chunk_size changes nothing here.
_NAMES = {"query": "q", "key": "k", "value": "v"}
_WITHOUT_EFFECT = ("chunk_size",)
# What keeps packed texts apart. The first two are our cu_seqlens. transformers' own functions ignore all three.
_PACKING = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


def _reference(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns transformers' own function. With flash-linear-attention installed, `original` is its function, which needs a GPU."""
    reference: Callable[..., Any] = getattr(original, "__wrapped__", original)
    return reference


def _named_parameters(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters without **kwargs."""
    return [name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind != parameter.VAR_KEYWORD]


def _takes(function: Callable[..., Any], original: Callable[..., Any]) -> bool:
    """Returns whether `function` knows every parameter of transformers' function, so that a model's call means the same to it."""
    known = {*_named_parameters(function), *_WITHOUT_EFFECT}
    return all(_NAMES.get(name, name) in known for name in _named_parameters(_reference(original)))


def _adapter(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with the names of the reference's arguments, and what was there before where `function` does not compute."""
    takes, on_gpu = set(_named_parameters(function)) - set(_WITHOUT_EFFECT), bool(torch.ops.efla.has_gpu_kernels())
    reference = _reference(original)
    names = _named_parameters(reference)

    @functools.wraps(reference)
    def adapter(*arguments: Any, **named: Any) -> Any:
        given = {**dict(zip(names, arguments)), **named}
        query = given.get("query")
        if len(arguments) <= len(names) and _computes(query, on_gpu) and not _is_exporting() and given.get("seq_idx") is None:
            ours = {_NAMES.get(name, name): value for name, value in given.items()}
            if ours.get("cu_seqlens") is None:
                ours["cu_seqlens"] = ours.get("cu_seq_lens_q")
            ours = {name: value for name, value in ours.items() if name in takes}
            if is_compiling():
                return function(**ours)
            try:
                return function(**ours)
            except (ValueError, NotImplementedError):  # the call is computed, or refused, as without the patch
                pass
        packed = any(given.get(name) is not None for name in _PACKING)
        on_cpu = isinstance(query, Tensor) and query.device.type == "cpu"
        return (reference if on_cpu and not packed else original)(*arguments, **named)

    adapter.efla_replaces = original  # type: ignore[attr-defined]
    return adapter


def _computes(query: object, on_gpu: bool) -> bool:
    """Returns whether the functions of this package take tensors of the dtype and on the device of `query`."""
    if not isinstance(query, Tensor):
        return False
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if query.device.type == "cuda":
        return on_gpu and query.shape[-1] <= 256 and query.dtype in dtypes
    return query.device.type in ("cpu", "meta") and query.dtype in (*dtypes, torch.float64)


def _is_exporting() -> bool:
    compiler = getattr(torch, "compiler", None)
    return compiler is not None and getattr(compiler, "is_exporting", lambda: False)()
