"""DeltaNet, as fla.ops.delta_rule."""

from __future__ import annotations

from torch import Tensor

from efla.ops._check import check_chunk_size, check_tensors
from efla.ops._run import delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """S_t = S_{t−1} + β k (v − S_{t−1}ᵀ k)ᵀ, o_t = scale · S_tᵀ q_t, chunk by chunk; for training and prefill.

    Args:
        q, k: [B, T, H, K], float32, bfloat16 or float16 (on a CPU computed in float32; float64 runs a slow reference), any strides.
        v: [B, T, HV, V], of the same dtype; HV is a multiple of H (grouped value heads).
        beta: [B, T, HV], the step size; rounded to the dtype of q.
        scale: of the output; None for K^(−1/2).
        initial_state: [N, HV, K, V], N sequences (B of them without cu_seqlens); None for zeros.
        output_final_state: whether to return the final state.
        use_qk_l2norm_in_kernel: divide q and k by √(Σx² + 1e-6) first.
        cu_seqlens: [N + 1], sequences packed one after the other into B = 1: 0, ends of sequences, T.
        cu_seqlens_cpu: taken for compatibility; tensors are on the CPU already.
        chunk_size: 16, 32 or 64; taken for compatibility, results do not depend on it.

    Returns:
        o [B, T, HV, V] in the dtype of q, and the final state [N, HV, K, V] in float32 or None.

    Gradients flow to q, k, v, beta and initial_state, from both outputs. Raises ValueError naming the argument.
    """
    check_chunk_size("chunk_delta_rule", chunk_size, (16, 32, 64))
    return delta_rule(
        "chunk_delta_rule",
        q,
        k,
        v,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )[:2]


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """chunk_delta_rule token by token; for short sequences and decoding. beta None stands for ones."""
    function = "fused_recurrent_delta_rule"
    check_tensors(function, v=v)
    return delta_rule(
        function,
        q,
        k,
        v,
        v.new_ones(v.shape[:-1]) if beta is None else beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        implementation="recurrent",
    )[:2]
