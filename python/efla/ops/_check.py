"""What every function checks of its arguments. A message names the function, the argument, what was got and expected."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# A set and no pattern: torch.compile traces no regular expressions in PyTorch 2.11.
_STEPS = frozenset(["euler", "exact", "implicit_euler", "trapezoid"] + [f"rk{order}" for order in range(1, 65)])


def mistake(function: str, argument: str, got: object, expected: str) -> ValueError:
    """The error for a bad argument."""
    return ValueError(f"{function}: {argument}: got {got}, expected {expected}")


def check_absent(function: str, argument: str, value: object) -> None:
    """Raises ValueError for an argument of flash-linear-attention that is not implemented."""
    if value is not None:
        raise mistake(function, argument, value, "None: this is not implemented")


def is_compiling() -> bool:
    """Whether torch.compile is tracing (PyTorch 2), so that the values of tensors are not known."""
    compiler = getattr(torch, "compiler", None)
    return compiler is not None and compiler.is_compiling()


def check_shape(function: str, argument: str, tensor: Tensor, axes: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless `tensor` has the shape that `axes`, for example "B T HV K", names sizes of."""
    if not isinstance(tensor, Tensor):
        raise mistake(function, argument, type(tensor).__name__, f"a tensor [{axes.replace(' ', ', ')}]")
    expected = [sizes[axis] for axis in axes.split()]
    if list(tensor.shape) != expected:
        raise mistake(function, argument, f"shape {list(tensor.shape)}", f"[{axes.replace(' ', ', ')}] = {expected}")


def check_decay(function: str, g: Tensor, axes: str, sizes: Mapping[str, int]) -> None:
    """Checks g, of the axes of beta for a decay per head, or with K behind them for one per key channel."""
    scalar = isinstance(g, Tensor) and g.dim() == len(axes.split())
    check_shape(function, "g", g, axes if scalar else axes + " K", sizes)


def check_qkv(function: str, q: Tensor, k: Tensor, v: Tensor, tokens: str = "T ") -> dict[str, int]:
    """Checks q, k [B, T, H, K] and v [B, T, HV, V], without T where `tokens` is empty; returns the sizes by name."""
    key_axes, value_axes = f"B {tokens}H K", f"B {tokens}HV V"
    for argument, tensor, axes in (("q", q, key_axes), ("k", k, key_axes), ("v", v, value_axes)):
        if not isinstance(tensor, Tensor) or tensor.dim() != len(axes.split()):
            got = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise mistake(function, argument, got, f"a tensor [{axes.replace(' ', ', ')}]")
        if tensor.dtype != q.dtype or q.dtype not in _DTYPES:
            expected = "float32, bfloat16 or float64" if q.dtype not in _DTYPES else f"{q.dtype}, as q has"
            raise mistake(function, argument, tensor.dtype, expected)
        if tensor.device != q.device or q.device.type not in ("cpu", "cuda", "meta"):
            expected = f"one on {q.device}, as q" if q.device.type in ("cpu", "cuda", "meta") else "one on the CPU or a GPU"
            raise mistake(function, argument, f"a tensor on {tensor.device}", expected)
        if 0 in tensor.shape:
            raise mistake(function, argument, f"shape {list(tensor.shape)}", "no dimension of 0")
    sizes = dict(zip(key_axes.split(), q.shape)) | dict(zip(value_axes.split()[-2:], v.shape[-2:]))
    check_shape(function, "k", k, key_axes, sizes)
    check_shape(function, "v", v, value_axes, sizes)
    if sizes["HV"] % sizes["H"] != 0:
        raise mistake(function, "v", f"{sizes['HV']} heads", f"a multiple of the {sizes['H']} heads of q")
    return sizes


def check_cu_seqlens(function: str, cu_seqlens: Tensor, sizes: Mapping[str, int]) -> int:
    """Checks cu_seqlens [N + 1] of sequences packed into one batch entry; returns N."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        got = f"shape {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise mistake(function, "cu_seqlens", got, "a tensor [N + 1] with N at least 1")
    if cu_seqlens.dtype not in (torch.int64, torch.int32):
        raise mistake(function, "cu_seqlens", cu_seqlens.dtype, "torch.int64 or torch.int32")
    if sizes["B"] != 1:
        raise mistake(function, "q", f"batch size {sizes['B']}", "1 with cu_seqlens: pack the sequences one after the other")
    if cu_seqlens.device.type == "cpu" and not is_compiling():
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != sizes["T"] or ends != sorted(ends):
            raise mistake(function, "cu_seqlens", ends, f"ascending numbers from 0 to T = {sizes['T']}")
    return cu_seqlens.shape[0] - 1


def check_rule(function: str, scale: float | None, step: str, erase_scale: float, write_scale: float) -> None:
    """Checks the choices of the recurrence."""
    if not isinstance(step, str) or step not in _STEPS:
        raise mistake(function, "step", repr(step), "euler, rk1 to rk64, exact, implicit_euler or trapezoid")
    for argument, value in (("scale", scale), ("erase_scale", erase_scale), ("write_scale", write_scale)):
        if value is not None and not -math.inf < value < math.inf:  # torch.compile traces no math.isfinite
            raise mistake(function, argument, value, "a finite number")


def check_no_gradients(function: str, argument: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises ValueError where a gradient would be asked of what `argument` returns."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise mistake(function, argument, "True with tensors that require gradients", "torch.no_grad() or inference_mode()")


def check_chunk_size(function: str, chunk_size: int, allowed: tuple[int, ...]) -> None:
    """Raises ValueError unless flash-linear-attention would take the chunk size, which does not change results here."""
    if chunk_size not in allowed:
        raise mistake(function, "chunk_size", chunk_size, "one of " + ", ".join(map(str, allowed)))
