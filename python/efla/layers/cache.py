"""Where layers keep what the tokens so far left behind: a dict, flash-linear-attention's Cache or transformers' DynamicCache."""

from __future__ import annotations

import inspect
from typing import Any

States = dict[str, Any]  # recurrent_state [N, HV, K, V] and conv_state, three [N, ·, W] or None


def states_of(cache: Any, layer: int) -> States:
    """Returns the states of a layer, which are None before its first token."""
    states: States | None = None
    if isinstance(cache, dict):
        states = cache.get(layer)
    elif _is_of_fla(cache):
        states = cache[layer] if len(cache) > layer else None
    elif cache is not None:
        states = _layer_of(cache, layer).states
    return states or {"recurrent_state": None, "conv_state": None}


def keep_states(cache: Any, layer: int, tokens: int, states: States) -> Any:
    """Writes the states of a layer that has seen `tokens` more. Returns the cache, a new dict for None."""
    if cache is None:
        cache = {}
    if isinstance(cache, dict):
        cache[layer] = states
    elif _is_of_fla(cache):
        cache.update(layer_idx=layer, offset=tokens, **states)
    else:
        _layer_of(cache, layer).keep(states, tokens)
    return cache


def _is_of_fla(cache: Any) -> bool:
    """Whether a cache has the interface of flash-linear-attention's: update(recurrent_state=…) and cache[layer]."""
    update = getattr(type(cache), "update", None)
    return update is not None and "recurrent_state" in inspect.signature(update).parameters


def _layer_of(cache: Any, index: int) -> Any:
    """Returns the MixerCacheLayer of transformers' cache, which replaces an empty layer of another kind."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        raise ValueError(
            f"layer: past_key_values: got {type(cache).__name__}, expected a dict, flash-linear-attention's Cache or "
            "the DynamicCache of transformers 5"
        )
    from efla.layers.transformers_cache import MixerCacheLayer

    while len(layers) <= index:
        layers.append(MixerCacheLayer() if len(layers) == index else cache.layer_class_to_replicate())
    layer = layers[index]
    if not isinstance(layer, MixerCacheLayer):
        used = getattr(layer, "is_initialized", False) or any(getattr(layer, "has_previous_state", {}).values())
        if used:
            raise ValueError(
                f"layer: past_key_values: got a {type(layer).__name__} with tokens at {index}, expected an empty layer"
            )
        layer = layers[index] = MixerCacheLayer()
    return layer
