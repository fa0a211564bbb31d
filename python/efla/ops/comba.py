"""Comba, as fla.ops.comba."""

from __future__ import annotations

import torch
from torch import Tensor

from efla._choices import Step
from efla.ops import _check
from efla.ops._run import delta_rule


# The least g, as kClosedLoopLeastDecay of efla/rule/mixer_preset.h: e^(−g) stays within the range of float32, and what is left of
# the state is below the rounding of float32.
_LEAST_DECAY = -40.0


def _wide(x: Tensor) -> Tensor:
    """Returns x in at least float32."""
    return x if x.dtype == torch.float64 else x.float()


def _normalised(*tensors: Tensor) -> list[Tensor]:
    """Returns each tensor divided by √(Σx² + 1e-6) of its own, rounded once."""
    wide = [_wide(x) for x in tensors]
    quotients = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in wide]
    return [quotient.to(x.dtype) for quotient, x in zip(quotients, tensors)]


def _comba(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    step: Step,
    implementation: str,
) -> tuple[Tensor, Tensor | None]:
    """Runs the operator, which reads the decayed state, with the erase key e^(−g) p of every value head and the decay g."""
    sizes = _check.check_axes(function, "k", k, "B T H K")
    for name, keys in (("q", q), ("p", p)):
        _check.check_shape(function, name, keys, "B T H K", sizes)
    sizes["HV"] = _check.check_rank(function, "v", v, "B T HV V").shape[2]
    _check.check_shape(function, "g", g, "B T HV", sizes)
    _check.check_floating(function, q=q, k=k, p=p, g=g)
    if sizes["H"] == 0 or sizes["HV"] % sizes["H"] != 0:
        raise _check.mistake(function, "value head count HV", sizes["HV"], f"a multiple of H = {sizes['H']}")
    if use_qk_l2norm_in_kernel:
        q, k, p = _normalised(q, k, p)
    if sizes["HV"] > sizes["H"]:  # every value head has its own decay, and so its own erase key
        q, k, p = (x.repeat_interleave(sizes["HV"] // sizes["H"], 2) for x in (q, k, p))
    wide_p = _wide(p)
    if g.dtype != torch.float64:
        g = g.clamp_min(_LEAST_DECAY)
    return delta_rule(
        function,
        q,
        k,
        v,
        v.new_ones(v.shape[:3]) if beta is None else beta,
        g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=cu_seqlens,
        step=step,
        implementation=implementation,
        erase_key=wide_p * torch.exp(-g.to(wide_p.dtype)).unsqueeze(-1),
    )[:2]


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    step: Step = "euler",
) -> tuple[Tensor, Tensor | None]:
    """S_t = e^g S_{t−1} + β k (v − S_{t−1}ᵀ p)ᵀ, o_t = scale · S_tᵀ q_t; Comba, arXiv 2506.02475.

    Args:
        q, k, v, g, scale, initial_state, output_final_state, cu_seqlens: as chunk_gated_delta_rule.
        p: [B, T, H, K], the key that erases, in the paper d · k with d between 0 and 1. It reads the state before its decay. The
            operator reads the decayed state with the key κ = e^(−g) p, which is rounded to the dtype of q (on a CPU float16: to
            float32). g below −40 counts as −40 except in float64: float32 keeps nothing of a state that decays more. In float16
            on a GPU κ overflows for g below −11.
        beta: [B, T, HV]; None for ones.
        use_qk_l2norm_in_kernel: divide q, k and p by √(Σx² + 1e-6) first, each by its own, as flash-linear-attention does. The d
            of p = d · k has no effect then.
        step: "exact" for S_t = e^{−β k κᵀ} e^g S_{t−1} + ∫₀^β e^{−s k κᵀ} ds k vᵀ; or another one of chunk_efla.
        cu_seqlens_cpu: taken for compatibility, without effect.

    Returns o [B, T, HV, V] in the dtype of q, and the final state in float32 or None. Gradients flow to every floating-point tensor
    among the arguments. Raises ValueError naming the argument.
    """
    rest = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, step)
    return _comba("chunk_comba", q, k, v, p, g, beta, *rest, "auto")


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    step: Step = "euler",
) -> tuple[Tensor, Tensor | None]:
    """chunk_comba token by token; for short sequences and decoding. p comes before v, as in flash-linear-attention."""
    rest = (scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, step)
    return _comba("fused_recurrent_comba", q, k, v, p, g, beta, *rest, "recurrent")
