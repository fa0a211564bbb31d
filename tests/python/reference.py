"""The recurrence of the delta-rule family in plain torch and float64, token by token: autograd gives its gradients.

Written from the equations, and by no function of the package.
"""

import math

import torch


def gain(step, beta, lam):
    """α(β, λ): EFLA paper, equations 5 (euler), 11 to 13 (rk), 20 (exact)."""
    lam = lam.clamp_min(1e-12)
    x = beta * lam
    if step == "euler":
        return beta
    if step == "exact":
        return -torch.expm1(-x) / lam
    if step == "implicit_euler":
        return beta / (1 + x)
    if step == "trapezoid":
        return beta / (1 + x / 2)
    return beta * sum((-x) ** n / math.factorial(n + 1) for n in range(int(step[2:])))


def delta_product(q, k, v, beta, n, g=None, initial_state=None, l2norm=False):
    """n Householder steps per token after one decay; o [B, T, H, V] and the final state, in float64."""
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, outputs = initial_state.double(), []
    for t in range(q.shape[1]):
        if g is not None:
            state = state * g[:, t].double().exp()[..., None, None]
        for i in range(n * t, n * (t + 1)):
            error = v[:, i] - torch.einsum("bhkv,bhk->bhv", state, k[:, i])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, i], beta[:, i, :, None] * error)
        outputs.append(q.shape[-1] ** -0.5 * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def comba(q, k, v, p, beta, g, initial_state, l2norm=False):
    """S_t = e^g S_{t−1} + β k (v − S_{t−1}ᵀ p)ᵀ; o [B, T, HV, V] and the final state, in float64."""
    q, k, v, p, beta, g = (x.double() for x in (q, k, v, p, beta, g))
    if l2norm:
        q, k, p = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k, p))
    q, k, p = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k, p))
    state, outputs = initial_state.double(), []
    for t in range(q.shape[1]):
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, p[:, t])
        state = state * g[:, t].exp()[..., None, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(q.shape[-1] ** -0.5 * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), state


def rwkv7(r, w, k, v, a, b, initial_state):
    """S_t = diag(e^w) S_{t−1} + b (S_{t−1}ᵀ a)ᵀ + k vᵀ; o [B, T, H, V] without a scale and the final state, in float64."""
    r, w, k, v, a, b = (x.double() for x in (r, w, k, v, a, b))
    state, outputs = initial_state.double(), []
    for t in range(r.shape[1]):
        read = torch.einsum("bhkv,bhk->bhv", state, a[:, t])
        state = state * w[:, t].exp()[..., None]
        state = state + torch.einsum("bhk,bhv->bhkv", b[:, t], read) + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, r[:, t]))
    return torch.stack(outputs, 1), state


def delta_rule(
    q,
    k,
    v,
    beta,
    g=None,
    initial_state=None,
    cu_seqlens=None,
    scale=None,
    step="euler",
    erase_scale=1.0,
    write_scale=1.0,
    l2norm=False,
    erase_key=None,
):
    """o [B, T, HV, V] and the final state [N, HV, K, V], in float64."""
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        parts = []
        for n, (a, b) in enumerate(zip(ends, ends[1:])):
            state = None if initial_state is None else initial_state[n : n + 1]
            gate = None if g is None else g[:, a:b]
            erase = None if erase_key is None else erase_key[:, a:b]
            cut = [x[:, a:b] for x in (q, k, v, beta)]
            parts.append(delta_rule(*cut, gate, state, None, scale, step, erase_scale, write_scale, l2norm, erase))
        return torch.cat([o for o, _ in parts], 1), torch.cat([s for _, s in parts])
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    erase_key = k if erase_key is None else erase_key.double()
    if l2norm:
        q_length, k_length = ((x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k, erase_key = q / q_length, k / k_length, erase_key / k_length
    batch, tokens, heads, key_dim = q.shape
    value_heads = v.shape[2]
    q, k, erase_key = (x.repeat_interleave(value_heads // heads, 2) for x in (q, k, erase_key))
    scale = key_dim**-0.5 if scale is None else scale
    state = torch.zeros(batch, value_heads, key_dim, v.shape[3], dtype=torch.float64)
    if initial_state is not None:
        state = initial_state.double()
    outputs = []
    for t in range(tokens):
        if g is not None:
            decay = g[:, t].double().exp()
            state = state * (decay[..., None, None] if decay.dim() == 2 else decay[..., None])
        alpha = gain(step, beta[:, t], (erase_key[:, t] * k[:, t]).sum(-1))[..., None]
        read = torch.einsum("bhkv,bhk->bhv", state, erase_key[:, t])
        write = write_scale * alpha * v[:, t] - erase_scale * alpha * read
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    empty = v.new_zeros(batch, 0, *v.shape[2:])
    return torch.stack(outputs, 1) if outputs else empty, state
