"""Lets flash-linear-attention (fla) 0.6 compute with this package: `import efla.fla`.

chunk_gated_delta_rule and chunk_kda get a backend in fla's registry (fla/backends.py). The functions without dispatch,
chunk_delta_rule and the fused_recurrent ones, are replaced wherever a module of fla has imported them. A call that is declined, for
example with float64, runs fla's own function; `declines(function, *arguments)` says why, and fla logs it (logger fla.backends, INFO).
FLA_EFLA=0 in the environment or disable() switches everything off, enable() on again.
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

from efla import ops
from efla.ops._choice import refusal_on_gpu

try:
    from fla.backends import BaseBackend, register  # type: ignore[import-untyped, unused-ignore]
except ImportError as error:
    raise ImportError(f"efla.fla: flash-linear-attention 0.6 or later is needed: {error}") from None

_DISPATCHED = {"chunk_gated_delta_rule": "gated_delta_rule", "chunk_kda": "kda"}
_REPLACED = {
    "chunk_delta_rule": "delta_rule",
    "fused_recurrent_delta_rule": "delta_rule",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule",
    "fused_recurrent_kda": "kda",
}
# Arguments of fla's that change nothing here.
_WITHOUT_EFFECT = {"cu_seqlens_cpu", "chunk_indices", "disable_recompute", "safe_gate", "max_num_seqs"}

_originals = {
    name: getattr(importlib.import_module(f"fla.ops.{module}"), name) for name, module in {**_DISPATCHED, **_REPLACED}.items()
}
_signatures = {name: inspect.signature(inspect.unwrap(original)) for name, original in _originals.items()}
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
    signature = _signatures[function]
    bound = dict(signature.bind(*arguments, **named).arguments)
    bound.update(bound.pop("kwargs", {}))
    if "transpose_state_layout" in bound and "state_v_first" not in bound:  # its older name
        bound["state_v_first"] = bound.pop("transpose_state_layout")
    takes = inspect.signature(getattr(ops, function)).parameters
    given: dict[str, Any] = {}
    for name, value in bound.items():
        default = signature.parameters[name].default if name in signature.parameters else None
        if name in _WITHOUT_EFFECT or value is default or (isinstance(value, bool) and value == (default or False)):
            continue
        if name not in takes or name in ("cp_context", "gv"):
            raise _Declined(f"{name} is not implemented")
        given[name] = value
    _check(function, given)
    if "A_log" in given:  # in fla of any shape, such as [1, 1, HV, 1]
        given["A_log"] = given["A_log"].flatten()
    return given


def _check(function: str, given: dict[str, Any]) -> None:
    """Raises _Declined for tensors that the functions of this package do not take."""
    q = given["q"]
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if tensor.device.type != q.device.type:
            raise _Declined(f"{name} is on {tensor.device}, q on {q.device}")
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise _Declined(f"q has dtype {q.dtype}, expected torch.float32, torch.bfloat16 or torch.float16")
    for name in ("k", "v"):
        if given[name].dtype != q.dtype:
            raise _Declined(f"{name} has dtype {given[name].dtype}, expected {q.dtype}, as q")
    sizes = (32, 64) if function == "chunk_kda" else (16, 32, 64)  # without effect except on the states that chunk_kda returns
    if given.get("chunk_size", 64) not in sizes:
        raise _Declined(f"chunk_size is {given['chunk_size']}, expected one of {', '.join(map(str, sizes))}")
    if "beta" in given and given["beta"].dim() != 3:
        raise _Declined(f"beta has {given['beta'].dim()} dimensions, expected [B, T, HV]")
    if q.device.type == "cuda":
        if q.dtype == torch.float16 and function.startswith("chunk") and q.shape[-1] > 64:
            raise _Declined(f"efla computes {q.dtype} in float32, which takes longer for keys of {q.shape[-1]} dimensions")
        if reason := refusal_on_gpu(function, q, given["k"], given["v"], given.get("g"), given.get("cu_seqlens")):
            raise _Declined(reason)
    elif q.device.type != "cpu":
        raise _Declined(f"q is on {q.device}, expected a CPU or an NVIDIA GPU")


class EflaBackend(BaseBackend):  # type: ignore[misc, unused-ignore]
    """The backend of the dispatched functions."""

    backend_type = "efla"
    package_name = "efla"
    env_var = "FLA_EFLA"
    priority = 2  # before those that need a GPU of one kind

    def verify(self, function_name: str, *arguments: Any, **named: Any) -> tuple[bool, str | None]:
        if function_name not in _DISPATCHED:
            return False, "efla has no such function"
        reason = declines(function_name, *arguments, **named)
        return reason is None, reason


def _compute(function: str, given: dict[str, Any], named: dict[str, Any]) -> Any:
    """Runs this package's function. `named` are the keywords of the call."""
    if "transpose_state_layout" in named:
        text = "`transpose_state_layout` is deprecated and renamed to `state_v_first`."
        warnings.warn(f"{function}: {text}", DeprecationWarning, stacklevel=3)  # as fla's function does
    result = getattr(ops, function)(**given)
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


for _name in _DISPATCHED:
    setattr(EflaBackend, _name, staticmethod(_caller(_name)))
register("gated_delta_rule")(EflaBackend)
register(_originals["chunk_kda"])(EflaBackend)
for _name in _REPLACED:
    _ours = _replacement(_name, _originals[_name])
    for _module in [module for key, module in sys.modules.items() if key.split(".")[0] == "fla" and module is not None]:
        for _attribute, _value in list(vars(_module).items()):
            if _value is _originals[_name]:
                setattr(_module, _attribute, _ours)
