"""Gated DeltaNet, as fla.ops.gated_delta_rule."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from efla.ops import _check
from efla.ops._gate import scalar_gate
from efla.ops._run import delta_rule


def _decay(function: str, g: Tensor | None, use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    """g [B, T, HV] as it is, or the gate of it."""
    g = _check.check_rank(function, "g", g, "B T HV")
    if not use_gate:
        return g
    sizes = _check.check_axes(function, "g", g, "B T HV")
    _check.check_shape(function, "A_log", A_log, "HV", sizes)
    _check.check_floating(function, g=g, A_log=A_log)
    if dt_bias is not None:
        _check.check_shape(function, "dt_bias", dt_bias, "HV", sizes)
        _check.check_floating(function, dt_bias=dt_bias)
    return scalar_gate(g, cast(Tensor, A_log), dt_bias)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """S̃ = e^g S_{t−1}, S_t = S̃ + β k (v − S̃ᵀ k)ᵀ, o_t = scale · S_tᵀ q_t, with one decay per head.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as chunk_delta_rule.
        g: [B, T, HV], the natural logarithm of the decay, computed with in float32.
        use_beta_sigmoid_in_kernel: β = σ(beta); with allow_neg_eigval 2σ(beta).
        state_v_first: the states are [N, HV, V, K].
        use_gate_in_kernel: g is −exp(A_log) · softplus(g + dt_bias), with A_log [HV] and dt_bias [HV] or None.
        cu_seqlens_cpu, chunk_indices, chunk_size (16, 32, 64): taken for compatibility, without effect.
        cp_context: None; context parallelism is not implemented.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state in float32 or None.

    Gradients flow to every floating-point tensor among the arguments. Raises ValueError naming the argument.
    """
    function = "chunk_gated_delta_rule"
    _check.check_chunk_size(function, chunk_size, (16, 32, 64))
    _check.check_absent(function, "cp_context", cp_context)
    return delta_rule(
        function,
        q,
        k,
        v,
        beta,
        _decay(function, g, use_gate_in_kernel, A_log, dt_bias),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )[:2]


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """chunk_gated_delta_rule token by token; for short sequences and decoding.

    beta None stands for ones. gk [B, T, HV, K] is a decay per key channel, added to g where both are given; neither means
    no decay. gv, a decay per value channel, is not implemented. Unlike flash-linear-attention's, it has gradients.
    """
    function = "fused_recurrent_gated_delta_rule"
    _check.check_absent(function, "gv", gv)
    _check.check_tensors(function, v=v)
    if g is not None or use_gate_in_kernel:
        g = _decay(function, g, use_gate_in_kernel, A_log, dt_bias)
    if gk is not None:
        sizes = _check.check_axes(function, "gk", gk, "B T HV K")
        _check.check_floating(function, gk=gk)
        if g is not None:
            _check.check_shape(function, "g", g, "B T HV", sizes)
        g = gk if g is None else gk + g.unsqueeze(-1)
    beta = v.new_ones(v.shape[:-1]) if beta is None else beta
    return delta_rule(
        function,
        q,
        k,
        v,
        beta,
        g,
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


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
