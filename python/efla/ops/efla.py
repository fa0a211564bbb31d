"""Error-free linear attention, and through its arguments the whole family."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from efla._choices import Step
from efla.ops._run import delta_rule


@overload
def chunk_efla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    step: Step = "exact",
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    erase_key: Tensor | None = None,
    return_intermediate_states: Literal[False] = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]: ...


@overload
def chunk_efla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    step: Step = "exact",
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    erase_key: Tensor | None = None,
    return_intermediate_states: Literal[True],
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None, Tensor]: ...


def chunk_efla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    step: Step = "exact",
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    erase_key: Tensor | None = None,
    return_intermediate_states: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """S̃ = D S_{t−1}, S_t = S̃ + k (b v − a S̃ᵀ κ)ᵀ, o_t = scale · S_tᵀ q_t, chunk by chunk; EFLA paper, equation 20.

    κ is k or erase_key. a = erase_scale · α and b = write_scale · α, where α(β, λ = κᵀk) is the gain of the step:

        euler           β                      DeltaNet, Gated DeltaNet, KDA
        rk2, rk4, rkN   β Σ_{n<N} (−βλ)ⁿ/(n+1)!  Runge–Kutta of order N
        exact           (1 − e^{−βλ})/λ        EFLA
        implicit_euler  β/(1 + βλ)             Longhorn
        trapezoid       β/(1 + βλ/2)

    Args:
        q, k: [B, T, H, K], float32, bfloat16 or float16 (on a CPU computed in float32; float64 runs a slow reference), any strides.
        v: [B, T, HV, V], of the same dtype; HV is a multiple of H (grouped value heads).
        beta: [B, T, HV], the step size; rounded to the dtype of q.
        g: [B, T, HV] for D = e^g, [B, T, HV, K] for D = diag(e^g), None for no decay; computed with in float32.
        scale: of the output; None for K^(−1/2).
        initial_state: [N, HV, K, V], N sequences (B of them without cu_seqlens); None for zeros.
        output_final_state: whether to return the final state.
        use_qk_l2norm_in_kernel: divide q and k by √(Σx² + 1e-6) first, and erase_key by the number that divides k.
        use_beta_sigmoid_in_kernel: β = σ(beta); with allow_neg_eigval 2σ(beta).
        state_v_first: the states are [N, HV, V, K].
        cu_seqlens: [N + 1], sequences packed one after the other into B = 1: 0, ends of sequences, T.
        erase_key: [B, T, H, K], κ, of the dtype of q: b * k for Gated DeltaNet-2 with the gate b, e^(−g) d * k for Comba; None for k.
        return_intermediate_states: return the states before every chunk_size (32 or 64) tokens of a sequence too, for
            caches of prefixes; without gradients.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state in float32 or None; with return_intermediate_states also
        float32 [B, NT, HV, K, V], the states of packed sequences one after the other.

    Gradients flow to q, k, v, beta, g, initial_state and erase_key, from both outputs. Raises ValueError naming the argument.
    """
    o, final_state, between = delta_rule(
        "chunk_efla",
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
        step=step,
        erase_scale=erase_scale,
        write_scale=write_scale,
        erase_key=erase_key,
        state_v_first=state_v_first,
        return_intermediate_states=return_intermediate_states,
        chunk_size=chunk_size,
    )
    return (o, final_state) if between is None else (o, final_state, between)


def fused_recurrent_efla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    step: Step = "exact",
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    erase_key: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """chunk_efla token by token; for short sequences and decoding."""
    return delta_rule(
        "fused_recurrent_efla",
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
        step=step,
        erase_scale=erase_scale,
        write_scale=write_scale,
        erase_key=erase_key,
        state_v_first=state_v_first,
        implementation="recurrent",
    )[:2]
