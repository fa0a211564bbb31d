"""A layer of transformers' caches that holds the states of a layer with the delta rule. Importing it imports transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from efla.layers.cache import States


class MixerCacheLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """The states of one layer with the delta rule. Their size does not grow with the tokens; they cannot be cropped."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.states: States | None = None
        self.tokens = 0

    def keep(self, states: States, tokens: int) -> None:
        self.states = states
        self.tokens += tokens
        self.is_initialized = True

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        if self.states is None:
            return
        conv = self.states["conv_state"]
        self.states = {
            "recurrent_state": function(self.states["recurrent_state"]),
            "conv_state": None if conv is None else tuple(function(state) for state in conv),
        }

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def reset(self) -> None:
        self.states, self.tokens, self.is_initialized = None, 0, False

    def crop(self, *_: Any) -> None:
        raise NotImplementedError("MixerCacheLayer: a recurrent state cannot be cropped: copy the cache before tokens that may go")

    def offload(self) -> None:
        if self.states is not None:
            self.device = self.states["recurrent_state"].device
            self._map(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.states is not None:
            self._map(lambda state: state.to(self.device, non_blocking=True))

    def get_seq_length(self, *_: Any) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return self.tokens + (query if isinstance(query, int) else query.shape[0]), 0

    def lazy_initialization(self, *_: Any) -> None:
        raise NotImplementedError("MixerCacheLayer: got keys and values, expected states")

    def update(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("MixerCacheLayer: got keys and values, expected states")
