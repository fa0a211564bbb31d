"""One token at a time, with the state updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from efla.ops import _check


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    state: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    step: str = "exact",
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
) -> Tensor:
    """chunk_efla for one token of every batch entry, in place and without gradients.

    Args:
        q, k: [B, H, K], float32 or bfloat16; v: [B, HV, V]; beta: [B, HV]; g: [B, HV], [B, HV, K] or None.
        state: [B, HV, K, V], float32 or bfloat16 (rounded at every token), overwritten with the next one.
        scale, use_qk_l2norm_in_kernel, step, erase_scale, write_scale: as chunk_efla.

    Returns:
        o [B, HV, V] in the dtype of q. Raises ValueError naming the argument.
    """
    function = "delta_rule_step"
    _check.check_tensors(function, q=q, k=k, v=v, beta=beta, state=state)
    double = q.dtype == torch.float64
    if g is not None:
        _check.check_tensors(function, g=g)
        g = g.to(torch.float64 if double else torch.float32)
    with torch.no_grad():
        return _check.call(
            function,
            torch.ops.efla.delta_rule_step,
            q,
            k,
            v,
            beta.to(q.dtype),
            g,
            state,
            scale,
            step,
            float(erase_scale),
            float(write_scale),
            use_qk_l2norm_in_kernel,
            "ref" if double else "auto",
        )
