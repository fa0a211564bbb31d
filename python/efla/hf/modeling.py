"""The language model of efla/nn/models/language_model.h with transformers' interface; parameter names as docs/checkpoints.md."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from efla.hf.configuration import DeltaNetConfig, EflaConfig, GatedDeltaNetConfig, KDAConfig
from efla.hf.packing import ENDS, find_texts
from efla.layers import RULES, Mixer, Sizes
from efla.layers.named import whole
from efla.layers.parts import HeadNorm, last_columns, repad
from efla.ops._check import check_rest, mistake

_PACKING = (*ENDS, "seq_idx")
# Keywords of flash-linear-attention and transformers that change no output; these models return no attentions.
_WITHOUT_EFFECT = ("cu_seqlens_cpu", "max_length_q", "max_length_k", "cache_position", "output_attentions")
_OF_LOSS = ("ignore_index", "num_items_in_batch", "shift_labels")
# What transformers names the cache among a model's outputs; the first name is that of version 5.24 and later.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def _mixer(config: EflaConfig, layer: int) -> Mixer:
    """Returns the mixer of a layer, as LanguageModelConfig::mixer_config makes it."""
    rule = RULES[config.mixer_name or config.mixer]
    unit = config.head_dim or config.hidden_size / config.num_heads
    lower_bound = config.lower_bound
    if lower_bound is None and (config.safe_gate or rule.lower_bound is not None):
        lower_bound = rule.lower_bound or -5.0
    gate = (rule.decay is not None) if config.use_gate is None else config.use_gate
    return Mixer(
        Sizes(
            config.hidden_size,
            config.num_heads,
            config.num_v_heads or config.num_heads,
            whole("config", "expand_k", config.expand_k * unit),
            whole("config", "expand_v", config.expand_v * unit),
        ),
        replace(
            rule,
            qk_norm="sum" if config.qk_norm == "sum" else rule.qk_norm,
            beta=rule.beta if config.use_beta else "one",
            lower_bound=lower_bound,
            safe_gate=config.safe_gate or rule.safe_gate,
        ),
        gate=None if not gate else "sigmoid" if rule.decay == "channel" else "silu",
        gate_activation=getattr(config, "output_gate_activation", None),
        allow_neg_eigval=config.allow_neg_eigval,
        use_short_conv=config.use_short_conv,
        conv_size=config.conv_size,
        qk_activation=config.qk_activation,
        norm_eps=config.norm_eps,
        output_norm=config.use_output_norm,
        layer_idx=layer,
    )


class EflaAttention(nn.Module):
    """Softmax attention with rotary positions, of hybrids."""

    def __init__(self, config: EflaConfig, layer: int) -> None:
        super().__init__()
        attention, width = config.attention(), config.hidden_size
        self.heads, self.layer_idx, self.rope_theta = attention["num_heads"], layer, attention["rope_theta"]
        self.head_dim = whole("config", "hidden_size / (2 * num_heads)", width / (2 * self.heads)) * 2
        keys = self.head_dim * attention["num_kv_heads"]
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [B, H, T, E] rotated by the positions [B or 1, T] of its tokens."""
        half = self.head_dim // 2
        exponents = torch.arange(half, device=x.device, dtype=torch.float64) * (-math.log(self.rope_theta) / half)
        angles = positions.to(torch.float64)[:, None, :, None] * exponents.exp()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Any,
        use_cache: bool,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
    ) -> tuple[Tensor, None, Any]:
        tokens = x.shape[1]
        q, k, v = (p(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        past = int(past_key_values.get_seq_length(self.layer_idx)) if past_key_values is not None else 0
        seen = past + tokens
        positions = torch.arange(past, seen, device=x.device).unsqueeze(0) if position_ids is None else position_ids
        q, k = self._rotated(q, positions), self._rotated(k, positions)
        if use_cache:  # a static cache returns room for later tokens too
            k, v = (states[:, :, :seen] for states in past_key_values.update(k, v, self.layer_idx))
        groups = self.heads // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if cu_seqlens is None:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(x, seen, attention_mask))
        else:
            lengths = cu_seqlens.diff().tolist()
            texts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2))
            o = torch.cat([F.scaled_dot_product_attention(*text, is_causal=True) for text in texts], 2)
        return self.o_proj(o.transpose(1, 2).flatten(2)), None, past_key_values

    def _mask(self, x: Tensor, seen: int, attention_mask: Tensor | None) -> Tensor:
        """Returns which of the `seen` tokens each token of x [B, T, D] may attend to: [B or 1, 1, T, seen]."""
        tokens = x.shape[1]
        mask = torch.ones(tokens, seen, dtype=torch.bool, device=x.device).tril(seen - tokens)[None, None]
        if attention_mask is None:
            return mask
        # A row of padding sees itself, because a softmax over nothing is NaN.
        own = torch.eye(tokens, dtype=torch.bool, device=x.device)
        return mask & attention_mask[:, None, None, :seen].bool() | F.pad(own, (seen - tokens, 0))


class EflaMLP(nn.Module):
    """down_proj(silu(gate_proj x) ⊙ up_proj x)."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.mlp_width()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class EflaBlock(GradientCheckpointingLayer):  # type: ignore[misc, unused-ignore]
    """x += attn(attn_norm(x)), x += mlp(mlp_norm(x))."""

    def __init__(self, config: EflaConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.attn: nn.Module = (
            EflaAttention(config, layer) if layer in config.attention()["layers"] else _mixer(config, layer)
        )
        self.mlp_norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.mlp = EflaMLP(config)

    def forward(self, x: Tensor, position_ids: Tensor | None, **named: Any) -> Tensor:
        """x [B, T, D] → [B, T, D]. The other arguments are by name, as EflaAttention.forward has them."""
        if isinstance(self.attn, EflaAttention):  # the delta rule has no positions
            named["position_ids"] = position_ids
        x = x + self.attn(self.attn_norm(x), **named)[0]
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class EflaPreTrainedModel(PreTrainedModel):  # type: ignore[misc, unused-ignore]
    config_class: type[EflaConfig] = EflaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True  # the softmax attention of hybrids calls scaled_dot_product_attention
    _no_split_modules = ["EflaBlock"]

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: the folder keeps efla_model.py instead of a copy of this package."""

    def _init_weights(self, module: nn.Module) -> None:
        """Gives a module its initial values as flash-linear-attention's models do, except parameters that a checkpoint has."""
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            init.normal_(module.weight, std=self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, Mixer):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)
        elif isinstance(module, HeadNorm) and module.weight is not None:
            init.ones_(module.weight)


class EflaModel(EflaPreTrainedModel):
    """Embeddings, layers and the last norm."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.embeddings: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([EflaBlock(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = HeadNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call, unused-ignore]

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = value

    @can_return_tuple  # type: ignore[misc, untyped-decorator, unused-ignore]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        **more: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids [B, T] → last_hidden_state [B, T, D]. attention_mask [B, past + T], 0 for padding, on any side.

        hidden_states are the inputs of the layers and then last_hidden_state, as flash-linear-attention's models return them. cache is
        the name of past_key_values from transformers 5.24 on. find_texts describes position_ids and the other keywords of packed texts.
        Packed texts take no cache. An unknown keyword is refused unless it is None.
        """
        check_rest("model", more, (*_PACKING, *_WITHOUT_EFFECT))
        past_key_values = cache if past_key_values is None else past_key_values
        if (input_ids is None) == (inputs_embeds is None):
            raise mistake("model", "input_ids", "both or neither of input_ids and inputs_embeds", "one of them")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        batch, tokens = x.shape[:2]
        padding = None
        if attention_mask is not None:
            padding = last_columns("model", attention_mask, batch, tokens)
            if attention_mask.ne(0).all():
                attention_mask = padding = None
        texts = find_texts(x, padding, position_ids, {name: more.get(name) for name in _PACKING})
        cu_seqlens = None
        if texts is not None:
            if use_cache or past_key_values is not None:
                raise mistake("model", "use_cache", "a cache for packed texts", "use_cache=False and no past_key_values")
            use_cache, attention_mask, cu_seqlens, position_ids = False, None, texts.cu_seqlens, texts.position_ids
            x = x.flatten(0, 1)[texts.indices].unsqueeze(0)
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        keeps_all = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        hidden_states: list[Tensor] = []
        for layer in self.layers:
            hidden_states += [x] if keeps_all else []
            # By keywords, because gradient checkpointing switches off a cache only where it is named.
            x = layer(
                x,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                cu_seqlens=cu_seqlens,
                position_ids=position_ids,
            )
        hidden_states += [self.norm(x)]
        if texts is not None:
            hidden_states = [repad(states, texts.indices, batch, tokens) for states in hidden_states]
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states[-1],
            hidden_states=tuple(hidden_states) if keeps_all else None,
            **{_CACHE: past_key_values if use_cache else None},
        )


class EflaForCausalLM(EflaPreTrainedModel, GenerationMixin):  # type: ignore[misc, unused-ignore]
    """EflaModel and its head; generate() of GenerationMixin with a DynamicCache."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.model = EflaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call, unused-ignore]

    @staticmethod
    def create_masks_for_generate(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
        """Returns the mask [B, T] unchanged, because the layers compute their own masks from it, also with a static cache."""
        return attention_mask

    @can_return_tuple  # type: ignore[misc, untyped-decorator, unused-ignore]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids [B, T] → logits [B, T, vocab_size]; with labels [B, T] the mean loss of the next tokens, −100 left out.

        Other arguments as EflaModel. num_items_in_batch and shift_labels are transformers' arguments of the loss.
        """
        past_key_values = cache if past_key_values is None else past_key_values
        of_loss = {name: more.pop(name) for name in _OF_LOSS if name in more}
        out = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            use_cache,
            output_hidden_states,
            position_ids=position_ids,
            return_dict=True,
            **more,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None or of_loss.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **of_loss)
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=out.hidden_states, **{_CACHE: getattr(out, _CACHE)})


class DeltaNetModel(EflaModel):
    config_class = DeltaNetConfig


class DeltaNetForCausalLM(EflaForCausalLM):
    config_class = DeltaNetConfig


class GatedDeltaNetModel(EflaModel):
    config_class = GatedDeltaNetConfig


class GatedDeltaNetForCausalLM(EflaForCausalLM):
    config_class = GatedDeltaNetConfig


class KDAModel(EflaModel):
    config_class = KDAConfig


class KDAForCausalLM(EflaForCausalLM):
    config_class = KDAConfig
