"""Which problems the library computes, asked of the library itself."""

from __future__ import annotations

import torch
from torch import Tensor

from efla.ops._check import is_compiling


def refusal_on_gpu(
    function: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, erase_key: Tensor | None = None
) -> str | None:
    """Returns why the library does not compute the tensors on a GPU, by chunks if `function` does; None where it does.

    erase_key: with two keys a tensor of its shape, dtype and layout.

    While torch.compile traces, only whether the library has GPU kernels, because the layouts are not known yet.
    """
    if is_compiling():
        return None if torch.ops.efla.has_gpu_kernels() else "this build of efla has no GPU kernels"
    algorithm = "chunk" if function.startswith("chunk") else "auto"
    try:
        name, reason = torch.ops.efla.delta_rule_choice(q, k, v, g, cu_seqlens, algorithm, erase_key=erase_key)
    except RuntimeError as error:  # tensors that the operator refuses too
        return str(error)
    return None if name else str(reason)
