"""The one way from the functions to the operator efla::delta_rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efla._choices import Step
from efla.ops import _check, _func
from efla.ops._gate import beta_of


_INTERVAL = 32  # tokens between the states that the operator is asked for; divides every chunk_size


def _states_between(states: Tensor, cu_seqlens: Tensor | None, chunk_size: int) -> Tensor:
    """Of the operator's states [B, NC, HV, K, V] those before every chunk_size tokens of a sequence, a new tensor."""
    every = chunk_size // _INTERVAL
    if cu_seqlens is None:
        return states[:, ::every].contiguous()
    ends = cu_seqlens.tolist()
    slots = [
        begin // _INTERVAL + n + i  # a sequence's first slot, as Sequence of efla/rule/problem.h has it
        for n, (begin, end) in enumerate(zip(ends, ends[1:]))
        for i in range(0, -(-(end - begin) // _INTERVAL), every)
    ]
    return states[:, slots]


def _with_zeros(x: Tensor, batch: bool, tokens: bool) -> Tensor:
    """x [B, T, …] with one batch entry or one token of zeros where it has none; an x that is refused later as it is."""
    if x.dim() not in (3, 4):
        return x
    return F.pad(x, (0, 0) * (x.dim() - 2) + (0, int(tokens and x.shape[1] == 0), 0, int(batch and x.shape[0] == 0)))


def _without_zeros(x: Tensor, batch: bool, tokens: bool) -> Tensor:
    """A result x [B, T, …] without the batch entry or the token that _with_zeros has appended."""
    x = x[:, :0] if tokens else x
    return x[:0] if batch else x


def _laid_out(states: Tensor, state_v_first: bool) -> Tensor:
    """States [..., K, V], or with state_v_first [..., V, K]."""
    return states.transpose(-1, -2).contiguous() if state_v_first else states


def _check_empty(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    state_v_first: bool,
    erase_key: Tensor | None,
    steps_per_token: int,
) -> None:
    """Raises ValueError unless the arguments fit each other. For calls without tokens or batch entries: the operator's own
    check comes after zeros were appended, when arguments may fit that did not fit before."""
    sizes = _check.check_axes(function, "q", q, "B T H K")
    sizes.update({axis: n for axis, n in _check.check_axes(function, "v", v, "B T HV V").items() if axis in ("HV", "V")})
    steps = {**sizes, "T": sizes["T"] * steps_per_token}
    for name, tensor, axes in (("k", k, "B T H K"), ("v", v, "B T HV V"), ("beta", beta, "B T HV")):
        _check.check_shape(function, name, tensor, axes, steps)
    if erase_key is not None:
        _check.check_shape(function, "erase_key", erase_key, "B T H K", steps)
    if g is not None and g.dim() in (3, 4):
        _check.check_shape(function, "g", g, "B T HV" if g.dim() == 3 else "B T HV K", sizes)
    sizes["N"] = sizes["B"]
    if cu_seqlens is not None:
        sizes["N"] = _check.check_axes(function, "cu_seqlens", cu_seqlens, "N+1")["N+1"] - 1
        if sizes["T"] == 0 and cu_seqlens.device.type == "cpu" and not _check.is_compiling():
            for i, end in enumerate(cu_seqlens.tolist()):
                if end != 0:
                    raise _check.mistake(function, f"cu_seqlens[{i}]", end, "0, because T = 0")
    if initial_state is not None:
        _check.check_shape(function, "initial_state", initial_state, "N HV V K" if state_v_first else "N HV K V", sizes)


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
    step: Step = "euler",
    erase_scale: float = 1.0,
    write_scale: float = 1.0,
    state_v_first: bool = False,
    implementation: str = "auto",
    return_intermediate_states: bool = False,
    chunk_size: int = 64,
    erase_key: Tensor | None = None,
    steps_per_token: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Brings the arguments to the operator's dtypes and layouts and runs it; errors name `function`.

    beta and erase_key are rounded to the dtype of q; g and initial_state are widened to float32. float16 is computed in float32 on a CPU,
    float64 runs the reference. With n = steps_per_token k, v, beta and erase_key have T·n rows, and cu_seqlens counts steps. Returns o in
    the dtype of q, the final state where output_final_state is true, and the states before every chunk_size tokens of a sequence where
    return_intermediate_states is.
    """
    _check.check_chunk_size(function, chunk_size, (32, 64))
    _check.check_tensors(function, q=q, k=k, v=v, beta=beta)
    if g is not None:
        _check.check_tensors(function, g=g)
    if initial_state is not None:
        _check.check_rank(function, "initial_state", initial_state, "N HV V K" if state_v_first else "N HV K V")
    if cu_seqlens is not None:
        _check.check_cu_seqlens(function, cu_seqlens)
    given = q.dtype
    q, k, v = _check.widen_half(function, q, k, v)
    if erase_key is not None:
        _check.check_tensors(function, erase_key=erase_key)
        erase_key = _check.as_floating(function, "erase_key", erase_key, q.dtype)
    shape = q.shape
    no_tokens = len(shape) == 4 and shape[1] == 0
    no_batch = len(shape) == 4 and shape[0] == 0 and cu_seqlens is None
    empty = no_tokens or no_batch
    if empty:
        _check_empty(function, q, k, v, beta, g, initial_state, cu_seqlens, state_v_first, erase_key, steps_per_token)
        # Zeros, which change nothing, stand for none, so that the operator checks the arguments and gradients flow as always.
        q, k, v, beta = (_with_zeros(x, no_batch, no_tokens) for x in (q, k, v, beta))
        g = None if g is None else _with_zeros(g, no_batch, no_tokens)
        erase_key = None if erase_key is None else _with_zeros(erase_key, no_batch, no_tokens)
        initial_state = None if initial_state is None else _with_zeros(initial_state, no_batch, False)
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    beta = beta_of(function, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if g is not None:
        g = _check.as_floating(function, "g", g, state_dtype)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.long()
        if no_tokens:
            cu_seqlens = torch.cat([cu_seqlens[:-1], cu_seqlens[-1:] + 1])
    if initial_state is not None:
        initial_state = _check.as_floating(function, "initial_state", initial_state, state_dtype)
        if state_v_first:
            initial_state = initial_state.transpose(-1, -2)
    arguments = (
        q,
        k,
        v,
        _check.as_floating(function, "beta", beta, q.dtype),
        g,
        initial_state,
        cu_seqlens,
        scale,
        step,
        erase_scale,
        write_scale,
        use_qk_l2norm_in_kernel,
        "ref" if q.dtype == torch.float64 else implementation,
    )

    between = None
    if return_intermediate_states:
        _check.check_no_gradients(function, "return_intermediate_states", (q, k, v, beta, g, initial_state, erase_key))
        o, final_state, states = _check.call(function, torch.ops.efla.delta_rule_with_states, *arguments, _INTERVAL, erase_key)
        between = _laid_out(_states_between(states, cu_seqlens, chunk_size), state_v_first)
    else:
        try:
            o, final_state = _check.call(function, torch.ops.efla.delta_rule, *arguments, output_final_state, erase_key)
        except _check.Transformed:
            o, final_state, _ = _check.call(function, _func.DeltaRule.apply, *arguments, erase_key)
    final_state = _laid_out(final_state, state_v_first) if output_final_state else None
    if empty:
        o = _without_zeros(o, no_batch, no_tokens)
        between = None if between is None else _without_zeros(between, no_batch, no_tokens)
        final_state = None if final_state is None else _without_zeros(final_state, no_batch, False)
    return _check.as_dtype(o, given), final_state, between
