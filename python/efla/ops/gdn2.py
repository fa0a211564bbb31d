"""Gated DeltaNet-2, as fla.ops.gdn2."""

from __future__ import annotations

from torch import Tensor

from efla._choices import Step
from efla.ops import _check
from efla.ops._run import delta_rule
from efla.ops.kda import channel_decay


def _gated(function: str, k: Tensor, v: Tensor, b: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the erase key b ∘ k and the value w ∘ v. Raises ValueError unless b is as k and w as v."""
    sizes = _check.check_axes(function, "k", k, "B T H K")
    _check.check_shape(function, "b", b, "B T H K", sizes)
    _check.check_shape(function, "w", w, "B T HV V", _check.check_axes(function, "v", v, "B T HV V"))
    _check.check_floating(function, k=k, v=v, b=b, w=w)
    return (b * k).to(k.dtype), (w * v).to(v.dtype)


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    step: Step = "euler",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """S̃ = diag(e^g) S_{t−1}, S_t = S̃ + k (w ∘ v − S̃ᵀ (b ∘ k))ᵀ, o_t = scale · S_tᵀ q_t; Gated DeltaNet-2, arXiv 2605.22791.

    Args:
        q, k, v, g, scale, initial_state, output_final_state, use_gate_in_kernel, safe_gate, lower_bound, A_log, dt_bias,
            state_v_first, return_intermediate_states, chunk_size, cu_seqlens: as chunk_kda.
        b: [B, T, H, K], the gate that erases, in the layer between 0 and 1; w: [B, T, HV, V], the gate that writes. Their products
            with k and v are rounded to the dtype of these.
        use_qk_l2norm_in_kernel: divide q and k by √(Σx² + 1e-6) first; b multiplies the normalised key.
        step: "exact" for S_t = e^{−k κᵀ} S̃ + ∫₀¹ e^{−s k κᵀ} ds k (w ∘ v)ᵀ with κ = b ∘ k, which needs no L2 norm for its
            eigenvalues to stay in (0, 1]; or another one of chunk_efla.
        disable_recompute, cu_seqlens_cpu: taken for compatibility, without effect.
        cp_context: None; context parallelism is not implemented.

    Returns what chunk_kda returns. Gradients flow to every floating-point tensor among the arguments. Raises ValueError
    naming the argument.
    """
    function = "chunk_gdn2"
    _check.check_absent(function, "cp_context", cp_context)
    erase_key, written = _gated(function, k, v, b, w)
    o, final_state, between = delta_rule(
        function,
        q,
        k,
        written,
        v.new_ones(v.shape[:3]),
        channel_decay(function, g, use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        step=step,
        state_v_first=state_v_first,
        return_intermediate_states=return_intermediate_states,
        chunk_size=chunk_size,
        erase_key=erase_key,
    )
    return (o, final_state) if between is None else (o, final_state, between)


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    step: Step = "euler",
) -> tuple[Tensor, Tensor | None]:
    """chunk_gdn2 token by token; for short sequences and decoding. Unlike flash-linear-attention's, it has gradients."""
    function = "fused_recurrent_gdn2"
    erase_key, written = _gated(function, k, v, b, w)
    return delta_rule(
        function,
        q,
        k,
        written,
        v.new_ones(v.shape[:3]),
        channel_decay(function, g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        step=step,
        state_v_first=state_v_first,
        implementation="recurrent",
        erase_key=erase_key,
    )[:2]
