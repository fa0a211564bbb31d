"""Gated DeltaProduct, as fla.ops.gated_delta_product."""

from __future__ import annotations

from torch import Tensor

from efla._choices import Step
from efla.ops import _check
from efla.ops._run import delta_rule


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    *,
    step: Step = "euler",
) -> tuple[Tensor, Tensor | None]:
    """n = num_householder steps of the gated delta rule per token; DeltaProduct, arXiv 2502.10297.

    The decay e^g comes before a token's first step, and o_t = scale · Sᵀ q_t is read after its last step.

    Args:
        q: [B, T, H, K]; k: [B, T·n, H, K], v: [B, T·n, HV, V], beta: [B, T·n, HV], the steps of a token side by side.
        g: [B, T, HV], the natural logarithm of the decay; None for no decay.
        num_householder: n, at least 1.
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel: as chunk_gated_delta_rule.
        cu_seqlens: [N + 1], counted in tokens, not steps.
        step: of every step: euler, or another one of chunk_efla.
        cu_seqlens_cpu: taken for compatibility, without effect.
        cp_context: None; context parallelism is not implemented.

    Returns o [B, T, HV, V] in the dtype of q, and the final state in float32 or None. Gradients flow to every floating-point tensor
    among the arguments. Raises ValueError naming the argument.
    """
    function, n = "chunk_gated_delta_product", num_householder
    _check.check_absent(function, "cp_context", cp_context)
    if not isinstance(n, int) or n < 1:
        raise _check.mistake(function, "num_householder", _check.described(n), "a whole number of at least 1")
    sizes = _check.check_axes(function, "q", q, "B T H K")
    steps = {**sizes, "T": sizes["T"] * n}
    _check.check_shape(function, "k", k, "B T H K", steps)
    steps.update(zip(("HV", "V"), _check.check_rank(function, "v", v, "B T HV V").shape[2:]))
    for name, tensor, axes in (("v", v, "B T HV V"), ("beta", beta, "B T HV")):
        _check.check_shape(function, name, tensor, axes, steps)
    if g is not None:
        _check.check_shape(function, "g", g, "B T HV", {**steps, "T": sizes["T"]})
        _check.check_floating(function, g=g)
    if cu_seqlens is not None:
        _check.check_cu_seqlens(function, cu_seqlens)
    o, final_state, _ = delta_rule(
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
        cu_seqlens=None if cu_seqlens is None else cu_seqlens * n,
        step=step,
        steps_per_token=n,
    )
    return o, final_state
