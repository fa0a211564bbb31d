"""The recurrence of RWKV-7, as fla.ops.rwkv7."""

from __future__ import annotations

import torch
from torch import Tensor

from efla._choices import Step
from efla.ops import _check
from efla.ops._run import delta_rule


def _steps(first: Tensor | None, second: Tensor) -> Tensor:
    """Returns the rows [B, 2T, …] of two steps per token from those [B, T, …] of the first, or zeros, and of the second."""
    return torch.stack((torch.zeros_like(second) if first is None else first, second), 2).flatten(1, 2)


def _rwkv7(
    function: str,
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    step: Step,
    implementation: str,
) -> tuple[Tensor, Tensor | None]:
    """Runs two steps per token: b erases with the key −a ⊘ e^w after the decay, then k writes v."""
    sizes = _check.check_axes(function, "r", r, "B T H K")
    for name, tensor in (("w", w), ("k", k), ("a", a), ("b", b)):
        _check.check_shape(function, name, tensor, "B T H K", sizes)
    sizes["V"] = _check.check_rank(function, "v", v, "B T H V").shape[3]
    _check.check_shape(function, "v", v, "B T H V", sizes)
    _check.check_floating(function, r=r, w=w, k=k, v=v, a=a, b=b)
    if cu_seqlens is not None:
        _check.check_cu_seqlens(function, cu_seqlens)
    wide = torch.float64 if r.dtype == torch.float64 else torch.float32
    erase_key = -a.to(wide) * torch.exp(-w.to(wide))
    o, final_state, _ = delta_rule(
        function,
        r,
        _steps(b, k),
        _steps(None, v),
        v.new_ones(v.shape[0], 2 * v.shape[1], v.shape[2]),
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens * 2,
        step=step,
        implementation=implementation,
        erase_key=_steps(erase_key, torch.zeros_like(erase_key)),
        steps_per_token=2,
    )
    return o, final_state


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: None = None,
    lower_bound: float | None = None,
    *,
    step: Step = "euler",
) -> tuple[Tensor, Tensor | None]:
    """S_t = diag(e^w) S_{t−1} + b (S_{t−1}ᵀ a)ᵀ + k vᵀ, o_t = scale · S_tᵀ r_t, with a = −κ̂ and b = κ̂ ∘ α; RWKV-7, arXiv 2503.14456.

    A token is two steps of the operator, because k, which writes the value, is a third key beside a and b.

    Args:
        r, w, k, a, b: [B, T, H, K]; v: [B, T, H, V]. w is the natural logarithm of the decay, in RWKV-7 between −0.61 and 0. The
            key −a ⊘ e^w reads the decayed state; it is rounded to the dtype of r, and overflows where e^w vanishes.
        scale, initial_state, output_final_state, cu_seqlens: as chunk_kda; scale is 1 by default.
        step: of the step that erases: "exact" for e^{b aᵀ ⊘ e^w}; or another one of chunk_efla.
        cu_seqlens_cpu, safe_gate, chunk_size, disable_recompute, lower_bound: taken for compatibility, without effect.
        cp_context: None; context parallelism is not implemented.

    Returns o [B, T, H, V] in the dtype of r, and the final state in float32 or None. Gradients flow to every floating-point tensor
    among the arguments. Raises ValueError naming the argument.
    """
    _check.check_absent("chunk_rwkv7", "cp_context", cp_context)
    rest = (scale, initial_state, output_final_state, cu_seqlens, step)
    return _rwkv7("chunk_rwkv7", r, w, k, v, a, b, *rest, "auto")


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    *,
    step: Step = "euler",
) -> tuple[Tensor, Tensor | None]:
    """chunk_rwkv7 token by token; for short sequences and decoding. scale None is K^(−1/2), as in flash-linear-attention."""
    rest = (scale, initial_state, output_final_state, cu_seqlens, step)
    return _rwkv7("fused_recurrent_rwkv7", r, w, k, v, a, b, *rest, "recurrent")
