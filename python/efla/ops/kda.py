"""Kimi Delta Attention, as fla.ops.kda."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from efla.ops import _check
from efla.ops._gate import channel_gate
from efla.ops._run import delta_rule


def channel_decay(
    function: str,
    g: Tensor,
    use_gate: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    safe_gate: bool = False,
) -> Tensor:
    """g [B, T, HV, K] as it is, or the gate of it."""
    _check.check_rank(function, "g", g, "B T HV K")
    if not use_gate:
        return g
    sizes = _check.check_axes(function, "g", g, "B T HV K")
    _check.check_floating(function, g=g)
    _check.check_lower_bound(function, lower_bound, safe_gate)
    if A_log is not None or lower_bound is None:
        _check.check_shape(function, "A_log", A_log, "HV", sizes)
        _check.check_floating(function, A_log=A_log)
    if dt_bias is not None:
        _check.check_floating(function, dt_bias=dt_bias)
        if dt_bias.numel() != sizes["HV"] * sizes["K"]:
            raise _check.mistake(function, "dt_bias", f"shape {list(dt_bias.shape)}", f"[HV·K] = [{sizes['HV'] * sizes['K']}]")
    return channel_gate(g, A_log, dt_bias, lower_bound)


@overload
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: Literal[False] = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    *,
    return_intermediate_states: Literal[True],
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None, Tensor]: ...


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """S̃ = diag(e^g) S_{t−1}, S_t = S̃ + β k (v − S̃ᵀ k)ᵀ, o_t = scale · S_tᵀ q_t, with one decay per key channel.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as chunk_delta_rule.
        g: [B, T, HV, K], the natural logarithm of the decay, computed with in float32.
        use_gate_in_kernel: g is −exp(A_log) · softplus(g + dt_bias), with A_log [HV] and dt_bias [HV·K] or None; with
            lower_bound it is lower_bound · σ(exp(A_log) · (g + dt_bias)), and A_log may be None for zeros.
        use_beta_sigmoid_in_kernel: β = σ(beta); with allow_neg_eigval 2σ(beta).
        safe_gate: asks that lower_bound is in [−5, 0) with use_gate_in_kernel; the kernels here take any decay.
        state_v_first: the states are [N, HV, V, K].
        return_intermediate_states: return the states before every chunk_size (32 or 64) tokens of a sequence too, for
            caches of prefixes; without gradients.
        disable_recompute, cu_seqlens_cpu, max_num_seqs: taken for compatibility, without effect.
        cp_context, use_graph: None and False; context parallelism and the capture of packed sequences in a CUDA graph are not
            implemented.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state in float32 or None; with return_intermediate_states also
        float32 [B, NT, HV, K, V], the states of packed sequences one after the other.

    Gradients flow to every floating-point tensor among the arguments. Raises ValueError naming the argument.
    """
    function = "chunk_kda"
    _check.check_absent(function, "cp_context", cp_context)
    if use_graph:
        raise _check.mistake(function, "use_graph", _check.described(use_graph), "False: this is not implemented")
    o, final_state, between = delta_rule(
        function,
        q,
        k,
        v,
        beta,
        channel_decay(function, g, use_gate_in_kernel, A_log, dt_bias, lower_bound, safe_gate),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        return_intermediate_states=return_intermediate_states,
        chunk_size=chunk_size,
    )
    return (o, final_state) if between is None else (o, final_state, between)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """chunk_kda token by token; for short sequences and decoding. Unlike flash-linear-attention's, it has gradients."""
    function = "fused_recurrent_kda"
    return delta_rule(
        function,
        q,
        k,
        v,
        beta,
        channel_decay(function, g, use_gate_in_kernel, A_log, dt_bias, lower_bound),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        implementation="recurrent",
    )[:2]
