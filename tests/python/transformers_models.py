"""Models of transformers with a delta rule and random weights, whose sizes a test or a benchmark chooses."""

import dataclasses
import importlib

import torch


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a model: `layers` is a multiple of 4, and every fourth layer is attention without a delta rule."""

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    positions: int
    heads: int
    kv_heads: int
    head_dim: int
    delta_heads: int
    delta_value_heads: int  # one per delta_heads in Kimi-Linear
    delta_key_dim: int
    delta_value_dim: int  # delta_key_dim in Kimi-Linear
    latent: int
    rope_dim: int
    experts: int
    expert_width: int

    def _common(self):
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner_width,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_hidden_layers": self.layers,
            "max_position_embeddings": self.positions,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (self.layers // 4),
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def _delta(self):
        return {
            "linear_num_key_heads": self.delta_heads,
            "linear_num_value_heads": self.delta_value_heads,
            "linear_key_head_dim": self.delta_key_dim,
            "linear_value_head_dim": self.delta_value_dim,
        }

    def _experts(self):
        return {
            "num_experts": self.experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.expert_width,
            "shared_expert_intermediate_size": self.expert_width,
        }

    def _kimi(self):
        return {
            "num_key_value_heads": self.heads,
            "linear_num_heads": self.delta_heads,
            "linear_head_dim": self.delta_key_dim,
            "kv_lora_rank": self.latent,
            "qk_rope_head_dim": self.rope_dim,
            "qk_nope_head_dim": self.head_dim,
            "v_head_dim": self.head_dim,
            "moe_intermediate_size": self.expert_width,
            "num_local_experts": self.experts,
            "num_experts_per_tok": 2,
        }

    def fields(self, model):
        """Returns the fields of the configuration of `model`, one of MODELS."""
        extra = {
            "qwen3_5": lambda: {**self._delta(), "head_dim": self.head_dim},
            "qwen3_next": lambda: {**self._delta(), **self._experts(), "head_dim": self.head_dim},
            "olmo_hybrid": self._delta,
            "kimi_linear": self._kimi,
        }
        return {**self._common(), **extra[model]()}


# The prefixes of the classes, by the name of the module.
MODELS = {"qwen3_5": "Qwen3_5", "qwen3_next": "Qwen3Next", "olmo_hybrid": "OlmoHybrid", "kimi_linear": "KimiLinear"}


def make(model, sizes):
    """Returns the module of a model's code, and the model in eval mode, with the same random weights at every call."""
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    prefix = MODELS[model]
    config = getattr(configuration, f"{prefix}TextConfig" if model == "qwen3_5" else f"{prefix}Config")(**sizes.fields(model))
    torch.manual_seed(0)
    return modeling, getattr(modeling, f"{prefix}ForCausalLM")(config).eval()
