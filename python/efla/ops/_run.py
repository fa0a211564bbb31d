"""The one way from the functions to the operator efla::delta_rule."""

from __future__ import annotations

import torch
from torch import Tensor

from efla.ops import _check
from efla.ops._gate import beta_of


def delta_rule(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor | None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    step: str = "euler",
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    state_v_first: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Checks the arguments, brings them to the operator's dtypes and layouts and runs it; errors name `function`.

    beta is rounded to the dtype of q, g and initial_state are widened to float32. float64 runs the reference.
    """
    sizes = _check.check_qkv(function, q, k, v)
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    _check.check_rule(function, scale, step, erase_scale, write_scale)
    _check.check_shape(function, "beta", beta, "B T HV", sizes)
    beta = beta_of(function, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if g is not None:
        _check.check_decay(function, g, "B T HV", sizes)
        g = g.to(state_dtype)
    sizes["N"] = sizes["B"]
    if cu_seqlens is not None:
        sizes["N"] = _check.check_cu_seqlens(function, cu_seqlens, sizes)
        cu_seqlens = cu_seqlens.long()
    if initial_state is not None:
        axes = "N HV V K" if state_v_first else "N HV K V"
        _check.check_shape(function, "initial_state", initial_state, axes, sizes)
        initial_state = initial_state.to(state_dtype)
        if state_v_first:
            initial_state = initial_state.transpose(-1, -2)
    o, final_state = torch.ops.efla.delta_rule(
        q,
        k,
        v,
        beta.to(q.dtype),
        g,
        initial_state,
        cu_seqlens,
        scale,
        step,
        float(erase_scale),
        float(write_scale),
        use_qk_l2norm_in_kernel,
        "ref" if q.dtype == torch.float64 else implementation,
    )
    if not output_final_state:
        return o, None
    return o, final_state.transpose(-1, -2).contiguous() if state_v_first else final_state
