"""Lets flash-linear-attention (fla) 0.6 compute with this package: `import efla.fla`.

chunk_gated_delta_rule and chunk_kda get a backend in fla's registry (fla/backends.py). The functions without dispatch,
chunk_delta_rule and the functions of fused_recurrent, DeltaProduct, Comba, Gated DeltaNet-2 and RWKV-7, are replaced wherever a module of
fla has imported them. On a CPU, where fla's Triton kernels do not run, the same backend computes what fla's layers and models with a delta
rule need beside it (efla/_fla_modules.py). A call that is declined, for example with float64, runs fla's own function; `declines(function, *arguments)` says why, and fla logs it (logger
fla.backends, INFO). FLA_EFLA=0 in the environment or disable() switches everything off, enable() on again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from efla import _fla_modules, ops
from efla.ops._choice import refusal_on_gpu

try:
    from fla.backends import BaseBackend, register  # type: ignore[import-untyped, unused-ignore]
    from fla.modules.fused_cross_entropy import (  # type: ignore[import-untyped, unused-ignore]
        FusedCrossEntropyLoss,
        cross_entropy_loss,
    )
except ImportError as error:
    raise ImportError(f"efla.fla: flash-linear-attention 0.6 or later is needed: {error}") from None

# Functions and fla's modules that have them.
_DISPATCHED = {"chunk_gated_delta_rule": "ops.gated_delta_rule", "chunk_kda": "ops.kda"}
_REPLACED = {
    "chunk_delta_rule": "ops.delta_rule",
    "fused_recurrent_delta_rule": "ops.delta_rule",
    "fused_recurrent_gated_delta_rule": "ops.gated_delta_rule",
    "fused_recurrent_kda": "ops.kda",
    "chunk_gated_delta_product": "ops.gated_delta_product",
    "chunk_comba": "ops.comba",
    "fused_recurrent_comba": "ops.comba",
    "chunk_gdn2": "ops.gdn2",
    "fused_recurrent_gdn2": "ops.gdn2",
    "chunk_rwkv7": "ops.rwkv7",
    "fused_recurrent_rwkv7": "ops.rwkv7",
}
_ON_CPU = {
    "causal_conv1d_fwd": "modules.causal_conv1d.ops",
    "causal_conv1d_bwd": "modules.causal_conv1d.ops",
    "causal_conv1d_update": "modules.causal_conv1d.ops",
    "layer_norm_fwd": "modules.norm.layernorm",
    "layer_norm_bwd": "modules.norm.layernorm",
    "layer_norm_gated_fwd": "modules.norm.fused_norm_gate",
    "layer_norm_gated_bwd": "modules.norm.fused_norm_gate",
    "l2norm_fwd": "modules.norm.l2norm",
    "l2norm_bwd": "modules.norm.l2norm",
    "swiglu_fwd": "modules.activations.ops",
    "swiglu_fwdbwd": "modules.activations.ops",
    "swiglu_linear": "modules.activations.ops",
    "cross_entropy_fwd": "modules.fused_cross_entropy.ops",
    "cross_entropy_bwd": "modules.fused_cross_entropy.ops",
    "fused_linear_cross_entropy_bwd": "modules.fused_linear_cross_entropy.ops",
    "gdn_gate_fwd": "ops.gated_delta_rule.gate",
    "gdn_gate_bwd": "ops.gated_delta_rule.gate",
    "fused_kda_gate": "ops.kda.gate",
}
# Functions that dispatch by the name of an operation instead of their own.
_OPERATIONS = {
    "chunk_gated_delta_rule": "gated_delta_rule",
    "gdn_gate_fwd": "gated_delta_rule",
    "gdn_gate_bwd": "gated_delta_rule",
    "fused_kda_gate": "kda",
}
# Arguments of fla's that change nothing here.
_WITHOUT_EFFECT = {"cu_seqlens_cpu", "chunk_indices", "disable_recompute", "safe_gate", "max_num_seqs"}
_NOT_IMPLEMENTED = ("cp_context", "gv", "use_graph")
_WITHOUT_EFFECT_ON_CPU = {
    *("cu_seqlens_cpu", "chunk_indices", "chunk_size", "layout_fallback", "output_contiguous", "is_rms_norm"),
    *("lse", "total_classes", "class_start_idx"),  # of the forward, which the backward computes again
}

_originals = {
    name: getattr(importlib.import_module(f"fla.{module}"), name)
    for name, module in {**_DISPATCHED, **_REPLACED, **_ON_CPU}.items()
}
_functions: dict[str, Callable[..., Any]] = {
    name: getattr(_fla_modules if name in _ON_CPU else ops, name) for name in _originals
}
_signatures = {name: inspect.signature(inspect.unwrap(original)) for name, original in _originals.items()}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES_TEXT = "torch.float32, torch.bfloat16 or torch.float16"
_enabled = True


def enable() -> None:
    """Computes what this package can compute, which importing it has begun."""
    global _enabled
    _enabled = True


def disable() -> None:
    """Leaves every call to flash-linear-attention."""
    global _enabled
    _enabled = False


def declines(function: str, *arguments: Any, **named: Any) -> str | None:
    """Returns why a call of fla's function of this name is left to fla; None if this package computes it."""
    if function not in _originals:
        raise ValueError(f"declines: function: got {function!r}, expected one of {', '.join(_originals)}")
    try:
        _arguments(function, arguments, named)
    except _Declined as reason:
        return str(reason)
    return None


class _Declined(Exception):
    """Why a call is left to fla."""


def _arguments(function: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments for this package's function by name. Raises _Declined."""
    if not _enabled:
        raise _Declined("efla.fla is disabled")
    if os.environ.get("FLA_EFLA", "1") == "0":
        raise _Declined("FLA_EFLA is 0")
    if function in _ON_CPU:  # before anything that takes time, because models on a GPU make these calls too
        for value in (*arguments, *named.values()):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                raise _Declined(f"a tensor is on {value.device}, where fla has kernels")
    signature = _signatures[function]
    bound = dict(signature.bind(*arguments, **named).arguments)
    bound.update(bound.pop("kwargs", {}))
    if "transpose_state_layout" in bound and "state_v_first" not in bound:  # its older name
        bound["state_v_first"] = bound.pop("transpose_state_layout")
    takes = inspect.signature(_functions[function]).parameters
    without_effect = _WITHOUT_EFFECT_ON_CPU if function in _ON_CPU else _WITHOUT_EFFECT
    given: dict[str, Any] = {}
    for name, value in bound.items():
        default = signature.parameters[name].default if name in signature.parameters else None
        if name in without_effect or value is default or (isinstance(value, bool) and value == (default or False)):
            continue
        if value is None and name not in takes:
            continue
        if name not in takes or name in _NOT_IMPLEMENTED:
            raise _Declined(f"{name} is not implemented")
        given[name] = value
    if function in _ON_CPU:
        if "is_rms_norm" in signature.parameters and not bound.get("is_rms_norm"):
            raise _Declined("is_rms_norm is False, expected True")
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point() and value.dtype not in _DTYPES:
                raise _Declined(f"{name} has dtype {value.dtype}, expected {_DTYPES_TEXT}")
        return given
    _check(function, given)
    if "A_log" in given:  # in fla of any shape, such as [1, 1, HV, 1]
        given["A_log"] = given["A_log"].flatten()
    return given


def _check(function: str, given: dict[str, Any]) -> None:
    """Raises _Declined for tensors that the functions of this package do not take."""
    q_name = "r" if "r" in given else "q"  # as RWKV-7 calls it
    q = given[q_name]
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.device.type != q.device.type:
            raise _Declined(f"{name} is on {tensor.device}, {q_name} on {q.device}")
    if q.dtype not in _DTYPES:
        raise _Declined(f"{q_name} has dtype {q.dtype}, expected {_DTYPES_TEXT}")
    for name in ("k", "v"):
        if given[name].dtype != q.dtype:
            raise _Declined(f"{name} has dtype {given[name].dtype}, expected {q.dtype}, as {q_name}")
    sizes = (32, 64) if function in ("chunk_kda", "chunk_gdn2") else (16, 32, 64)  # with effect only on the states that these return
    if given.get("chunk_size", 64) not in sizes:
        raise _Declined(f"chunk_size is {given['chunk_size']}, expected one of {', '.join(map(str, sizes))}")
    if "beta" in given and given["beta"].dim() != 3:
        raise _Declined(f"beta has {given['beta'].dim()} dimensions, expected [B, T, HV]")
    if q.device.type == "cuda":
        g = given.get("w") if q_name == "r" else given.get("g")
        erase_key = given.get("p", given["k"] if "b" in given else None)  # of Comba; b is of Gated DeltaNet-2 and RWKV-7
        if reason := refusal_on_gpu(function, q, given["k"], given["v"], g, given.get("cu_seqlens"), erase_key):
            raise _Declined(reason)
    elif q.device.type != "cpu":
        raise _Declined(f"{q_name} is on {q.device}, expected a CPU or an NVIDIA GPU")


class EflaBackend(BaseBackend):  # type: ignore[misc, unused-ignore]
    """The backend of the dispatched functions."""

    backend_type = "efla"
    package_name = "efla"
    env_var = "FLA_EFLA"
    priority = 2  # before those that need a GPU of one kind

    def verify(self, function_name: str, *arguments: Any, **named: Any) -> tuple[bool, str | None]:
        if function_name not in _originals:
            return False, "efla has no such function"
        reason = declines(function_name, *arguments, **named)
        return reason is None, reason


def _compute(function: str, given: dict[str, Any], named: dict[str, Any]) -> Any:
    """Runs this package's function. `named` are the keywords of the call."""
    if "transpose_state_layout" in named:
        text = "`transpose_state_layout` is deprecated and renamed to `state_v_first`."
        warnings.warn(f"{function}: {text}", DeprecationWarning, stacklevel=3)  # as fla's function does
    result = _functions[function](**given)
    if not given.get("return_intermediate_states"):
        return result
    o, final_state, states = result
    return o, final_state, states.to(o.dtype)  # fla's are


def _caller(function: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return _compute(function, _arguments(function, arguments, named), named)

    return call


def _replacement(function: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*arguments: Any, **named: Any) -> Any:
        try:
            given = _arguments(function, arguments, named)
        except _Declined:
            return original(*arguments, **named)
        return _compute(function, given, named)

    return replacement


def _loss_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the forward of fla's FusedCrossEntropyLoss without its assertion that tensors are on a GPU."""

    @functools.wraps(original)
    def forward(self: Any, input: Tensor, target: Tensor) -> Any:
        if declines("cross_entropy_fwd", input, target, process_group=self.process_group):
            return original(self, input, target)
        names = list(inspect.signature(cross_entropy_loss).parameters)[2:]
        losses = cross_entropy_loss(input, target, *(getattr(self, name) for name in names))
        if self.reduction != "none":
            count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            losses = tuple(loss.sum() / count for loss in losses)
        return losses if self.return_z_loss else losses[0]

    return forward


def _warn_of_lost_caches() -> None:
    """Warns if fla's models lose their cache between tokens, because transformers 5.24 names it `cache`, which fla 0.6.0 does not know."""
    outputs, models = (importlib.import_module(name) for name in ("transformers.modeling_outputs", "fla.models.modeling_utils"))
    renamed = "cache" in outputs.CausalLMOutputWithPast.__dataclass_fields__
    if renamed and "cache" not in inspect.signature(models.FLAForCausalLM.forward).parameters:
        warnings.warn(
            "efla.fla: this version of flash-linear-attention loses the cache of this version of transformers, so that its models generate "
            "other tokens with a cache than without: use transformers 5.23, use_cache=False, or import efla.hf",
            stacklevel=2,
        )


for _name in (*_DISPATCHED, *_ON_CPU):
    setattr(EflaBackend, _name, staticmethod(_caller(_name)))
    register(_OPERATIONS.get(_name, _originals[_name]))(EflaBackend)
FusedCrossEntropyLoss.forward = _loss_on_cpu(FusedCrossEntropyLoss.forward)
for _name in _REPLACED:
    _ours = _replacement(_name, _originals[_name])
    for _module in [module for key, module in sys.modules.items() if key.split(".")[0] == "fla" and module is not None]:
        for _attribute, _value in list(vars(_module).items()):
            if _value is _originals[_name]:
                setattr(_module, _attribute, _ours)
_warn_of_lost_caches()
