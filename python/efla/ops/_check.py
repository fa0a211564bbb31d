"""What the functions check of their arguments before the operator, which checks shapes, dtypes and choices itself.

A message names the function, the argument, what was got and expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def described(value: object) -> object:
    """Returns what a message shows of a value: the shape of a tensor, and any other value itself."""
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else value


def mistake(function: str, argument: str, got: object, expected: str) -> ValueError:
    """The error for a bad argument."""
    return ValueError(f"{function}: {argument}: got {got}, expected {expected}")


class Transformed(NotImplementedError):
    """A transform of torch.func that the operator does not take."""


# What PyTorch says of an argument that does not fit an operator's schema, and where the operators have other names.
_BAD_TYPE = re.compile(r"Expected a value of type '(.+)' for argument '(\w+)' but instead found .*\n.*\nValue: (.*)")
_ARGUMENTS = {"qk_l2norm": "use_qk_l2norm_in_kernel"}
# What C++ calls dtypes.
_SCALAR_TYPES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Bool": torch.bool},
    **{"Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32, "Long": torch.int64},
    **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
_SCALAR_TYPE = re.compile(rf"(?<= )({'|'.join(sorted(_SCALAR_TYPES, key=len, reverse=True))})\b")
# What PyTorch says of a forward derivative: of the operator, and of _func.DeltaRule.
_FORWARD_DERIVATIVE = ("jvp is not implemented for the c++ API", "must implement the jvp function")


def call(function: str, operator: Callable[..., Any], *arguments: object) -> Any:
    """Calls a torch operator of the library with q, k, v, beta, g and more. Its mistakes become ValueErrors that name `function`.

    Raises Transformed inside torch.func's grad, vjp, jvp and jacobians where the operator's gradients are made in C++, and
    NotImplementedError for forward derivatives.
    """
    if is_compiling():
        return operator(*arguments)
    try:
        return operator(*arguments)
    except RuntimeError as error:
        if "functorch transforms" in str(error):
            raise Transformed(f"{function}: got a transform of torch.func, expected torch.autograd.grad or backward()") from None
        if any(text in str(error) for text in _FORWARD_DERIVATIVE):
            text = "got a forward derivative (jvp, jacfwd, hessian), expected a first derivative in reverse mode (grad, vjp, jacrev)"
            raise NotImplementedError(f"{function}: {text}") from None
        check_dense(function, operator, arguments)
        bad_type = _BAD_TYPE.search(str(error))
        if bad_type:
            expected, argument, got = bad_type.groups()
            raise mistake(function, _ARGUMENTS.get(argument, argument), got, f"a value of type {expected}") from None
        _, separator, text = str(error).partition(": ")
        if not (separator and ": got " in text and ", expected " in text):
            raise
        q, g = arguments[0], arguments[4]
        if text.startswith("g: got shape") and isinstance(q, Tensor) and isinstance(g, Tensor) and g.dim() == q.dim() - 1:
            text = text.replace(", 1]", "]")  # the axis of channels that the operator gives a decay per head
        if ": got dtype " in text:
            text = _SCALAR_TYPE.sub(lambda match: str(_SCALAR_TYPES[match.group()]), text)
        raise ValueError(f"{function}: {text}") from None


def check_dense(function: str, operator: Any, arguments: Iterable[object]) -> None:
    """Raises ValueError for a sparse or nested tensor among the arguments of a torch operator, which no kernel takes."""
    names = [argument.name for argument in operator.default._schema.arguments] if hasattr(operator, "default") else []
    for name, value in zip(names, arguments):
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise mistake(function, name, f"a tensor of layout {value.layout}", "a dense tensor; cu_seqlens packs sequences")


_COMPILER = getattr(torch, "compiler", None)


def is_compiling() -> bool:
    """Whether torch.compile is tracing (PyTorch 2), so that the values of tensors are not known."""
    return _COMPILER is not None and _COMPILER.is_compiling()


def check_absent(function: str, argument: str, value: object) -> None:
    """Raises ValueError for an argument of flash-linear-attention that is not implemented."""
    if value is not None:
        raise mistake(function, argument, described(value), "None: this is not implemented")


def check_tensors(function: str, **tensors: object) -> None:
    """Raises ValueError for an argument that is not a tensor."""
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise mistake(function, argument, type(tensor).__name__, "a tensor")


def check_floating(function: str, **tensors: object) -> None:
    """Raises ValueError for an argument that is not a floating-point tensor."""
    check_tensors(function, **tensors)
    for argument, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not tensor.is_floating_point():
            raise mistake(function, argument, f"dtype {tensor.dtype}", "a floating-point dtype")


def as_floating(function: str, argument: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor.to(dtype), without the cost of a call that changes nothing. Raises ValueError for a dtype that is not floating-point."""
    if tensor.dtype == dtype:
        return tensor
    check_floating(function, **{argument: tensor})
    return tensor.to(dtype)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """tensor.to(dtype), without the cost of a call that changes nothing."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def widen_half(function: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float16 tensors on a CPU in float32, in which they are computed; others as they are. Raises ValueError for a mixture and other dtypes."""
    if q.dtype not in _DTYPES:
        raise mistake(function, "q", f"dtype {q.dtype}", "one of " + ", ".join(map(str, _DTYPES)))
    if q.dtype != torch.float16:
        return q, k, v
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise mistake(function, name, f"dtype {tensor.dtype}", f"{q.dtype}, as q")
    return (q, k, v) if q.is_cuda else (q.float(), k.float(), v.float())


def check_rank(function: str, argument: str, tensor: object, axes: str) -> Tensor:
    """Returns the tensor. Raises ValueError unless it is one and has as many axes as `axes`, for example "B T HV"."""
    if isinstance(tensor, Tensor) and tensor.dim() == axes.count(" ") + 1:
        return tensor
    got = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
    raise mistake(function, argument, got, f"a tensor [{axes.replace(' ', ', ')}]")


def check_axes(function: str, argument: str, tensor: object, axes: str) -> dict[str, int]:
    """Returns the sizes of `axes`, for example "B T HV", by name. Raises ValueError unless the tensor has these axes."""
    return dict(zip(axes.split(), check_rank(function, argument, tensor, axes).shape))


def check_shape(function: str, argument: str, tensor: object, axes: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError unless `tensor` has the shape that `axes`, for example "B T HV K", names sizes of."""
    got = list(check_axes(function, argument, tensor, axes).values())
    expected = [sizes[axis] for axis in axes.split()]
    if got != expected:
        raise mistake(function, argument, f"shape {got}", f"[{axes.replace(' ', ', ')}] = {expected}")


def check_cu_seqlens(function: str, cu_seqlens: object, argument: str = "cu_seqlens") -> None:
    """Raises ValueError unless cu_seqlens is a tensor of whole numbers; the operator checks the numbers."""
    check_tensors(function, **{argument: cu_seqlens})
    if isinstance(cu_seqlens, Tensor) and cu_seqlens.dtype not in (torch.int64, torch.int32):
        raise mistake(function, argument, cu_seqlens.dtype, "torch.int64 or torch.int32")


def check_ends(function: str, argument: str, cu_seqlens: Tensor, tokens: int) -> None:
    """Raises ValueError unless cu_seqlens is [N + 1] and rises from 0 to `tokens`. For code that uses cu_seqlens before the operator."""
    check_cu_seqlens(function, cu_seqlens, argument)
    check_axes(function, argument, cu_seqlens, "N+1")
    ends = cu_seqlens.tolist()
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        raise mistake(function, argument, ends, f"ends of sequences that rise from 0 to T = {tokens}")


def check_rest(function: str, rest: Mapping[str, object], without_effect: Iterable[str]) -> None:
    """Raises ValueError for a keyword that is neither None nor in `without_effect`, because it could ask for another computation."""
    for argument, value in rest.items():
        if value is not None and argument not in without_effect:
            raise mistake(function, argument, described(value), "no such keyword")


def check_lower_bound(function: str, lower_bound: object, safe_gate: bool) -> None:
    """Raises ValueError unless lower_bound is None or below 0, and with safe_gate in [-5, 0)."""
    number = isinstance(lower_bound, (int, float))
    if safe_gate and not (number and -5 <= lower_bound < 0):  # type: ignore[operator, unused-ignore]
        raise mistake(function, "lower_bound", lower_bound, "a number in [-5, 0) with safe_gate")
    if lower_bound is not None and not (number and lower_bound < 0):  # type: ignore[operator, unused-ignore]
        raise mistake(function, "lower_bound", repr(lower_bound), "None or a number below 0")


def check_constants(function: str, **tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor that requires gradients, because a function without gradients would give none silently."""
    for argument, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise mistake(function, argument, "a tensor that requires gradients", "torch.no_grad(): this function has none")


def check_no_gradients(function: str, argument: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises ValueError where a gradient would be asked of what `argument` returns."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        raise mistake(function, argument, "True with tensors that require gradients", "torch.no_grad() or inference_mode()")


def check_chunk_size(function: str, chunk_size: int, allowed: tuple[int, ...]) -> None:
    """Raises ValueError unless flash-linear-attention would take the chunk size, which does not change results here."""
    if chunk_size not in allowed:
        raise mistake(function, "chunk_size", chunk_size, "one of " + ", ".join(map(str, allowed)))
