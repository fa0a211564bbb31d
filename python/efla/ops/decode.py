"""One or a few tokens at a time, with the states updated in place."""

from __future__ import annotations

import torch
from torch import Tensor

from efla._choices import Step
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
    step: Step,
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    erase_key: Tensor | None = None,
) -> Tensor:
    """chunk_efla for one token of every batch entry, in place and without gradients: tensors that require them need torch.no_grad().

    Args:
        q, k: [B, H, K], float32, bfloat16 or float16; v: [B, HV, V]; beta: [B, HV]; g: [B, HV], [B, HV, K] or None.
        state: [B, HV, K, V], float32 or bfloat16 (rounded at every token), overwritten with the next one.
        step: "euler" for DeltaNet, Gated DeltaNet and KDA, "exact" for EFLA, or another of chunk_efla's.
        erase_key: [B, H, K] or None; scale, use_qk_l2norm_in_kernel, erase_scale, write_scale: as chunk_efla.

    Returns:
        o [B, HV, V] in the dtype of q. Raises ValueError naming the argument.
    """
    function = "delta_rule_step"
    _check.check_tensors(function, q=q, k=k, v=v, beta=beta, state=state)
    if torch.is_grad_enabled():
        _check.check_constants(function, q=q, k=k, v=v, beta=beta, g=g, state=state, erase_key=erase_key)
    given = q.dtype
    q, k, v = _check.widen_half(function, q, k, v)
    if erase_key is not None:
        _check.check_tensors(function, erase_key=erase_key)
        erase_key = _check.as_floating(function, "erase_key", erase_key, q.dtype)
    double = q.dtype == torch.float64
    if g is not None:
        _check.check_tensors(function, g=g)
        g = _check.as_floating(function, "g", g, torch.float64 if double else torch.float32)
    o: Tensor = _check.call(
        function,
        torch.ops.efla.delta_rule_step,
        q,
        k,
        v,
        _check.as_floating(function, "beta", beta, q.dtype),
        g,
        state,
        scale,
        step,
        erase_scale,
        write_scale,
        use_qk_l2norm_in_kernel,
        "ref" if double else "auto",
        erase_key,
    )
    return _check.as_dtype(o, given)


def delta_rule_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    states: Tensor,
    slots: Tensor | None = None,
    g: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    step: Step,
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    kept: Tensor | None = None,
    erase_key: Tensor | None = None,
) -> Tensor:
    """chunk_efla for 1 to 8 tokens of every batch entry, whose states lie in a pool; in place and without gradients, as delta_rule_step.

    Args:
        q, k: [B, T, H, K], float32, bfloat16 or float16; v: [B, T, HV, V]; beta: [B, T, HV]; g: [B, T, HV], [B, T, HV, K] or None.
        states: [P, HV, K, V], float32 or bfloat16 (rounded at every token), of which those named are overwritten.
        slots: [B] int64, the state of each batch entry, no two alike; −1 for an entry without a state, whose outputs are
            zeros. None: entry b has state b of P = B. On a GPU the values are not checked.
        kept: [B] int64, how many of its tokens each entry's state keeps, 0 to T; the others are rolled back, but have
            outputs. None: T. Speculative decoding can thus reject tokens without waiting for a GPU: a call takes the
            tokens accepted after the last call, which the state keeps, then new drafts. On a GPU values outside 0 to T
            are clamped.
        erase_key: [B, T, H, K] or None; step, scale, use_qk_l2norm_in_kernel, erase_scale, write_scale: as delta_rule_step.

    Returns:
        o [B, T, HV, V] in the dtype of q, the same bits as of T calls of delta_rule_step. Raises ValueError naming the
        argument.
    """
    function = "delta_rule_steps"
    _check.check_tensors(function, q=q, k=k, v=v, beta=beta, states=states)
    if torch.is_grad_enabled():
        _check.check_constants(function, q=q, k=k, v=v, beta=beta, g=g, states=states, erase_key=erase_key)
    given = q.dtype
    q, k, v = _check.widen_half(function, q, k, v)
    for name, tensor in (("slots", slots), ("kept", kept)):
        if tensor is not None:
            _check.check_tensors(function, **{name: tensor})
    if erase_key is not None:
        _check.check_tensors(function, erase_key=erase_key)
        erase_key = _check.as_floating(function, "erase_key", erase_key, q.dtype)
    double = q.dtype == torch.float64
    if g is not None:
        _check.check_tensors(function, g=g)
        g = _check.as_floating(function, "g", g, torch.float64 if double else torch.float32)
    o: Tensor = _check.call(
        function,
        torch.ops.efla.delta_rule_steps,
        q,
        k,
        v,
        _check.as_floating(function, "beta", beta, q.dtype),
        g,
        states,
        slots,
        kept,
        scale,
        step,
        erase_scale,
        write_scale,
        use_qk_l2norm_in_kernel,
        "ref" if double else "auto",
        erase_key,
    )
    return _check.as_dtype(o, given)
