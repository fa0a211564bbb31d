"""Configurations with the fields of docs/checkpoints.md, which are flash-linear-attention's where it has the model."""

from __future__ import annotations

import os
import pathlib
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from efla._choices import Activation, Normalization
from efla.layers import RULES

# Settings of flash-linear-attention that change what a model computes, and their only supported values.
_ALLOWED = {
    "hidden_act": ("swish", "silu"),
    "output_gate_activation": ("swish", "silu", "sigmoid"),
    "attnres_block_size": (None,),
    "use_l2warp": (False,),
    "conv_bias": (False,),
    "norm_first": (False,),
    "share_conv_kernel": (False,),
    "clamp_min": (None,),
    "clamp_max": (None,),
    "elementwise_affine": (True, None),
}
_ALLOWED_ATTENTION = {"qkv_bias": (False, None), "qk_norm": (False, None), "window_size": (None,)}
# What transformers runs for a model where trust_remote_code is set; the program writes the same (language_model_file.cc).
_CODE = """\
# Loads this model where trust_remote_code is set. Needs the Python package efla.
from efla.hf import *  # noqa: F403
"""
_ATTENTION = ("layers", "num_heads", "num_kv_heads", "rope_theta")


def _refuse(field: str, got: object, expected: str) -> ValueError:
    return ValueError(f"config: {field}: got {got!r}, expected {expected}")


class EflaConfig(PreTrainedConfig):
    """A language model with any mixer. Fields as docs/checkpoints.md; ValueError names a field that is not supported."""

    model_type = "efla"
    keys_to_ignore_at_inference = ["past_key_values"]
    # What the other model types set instead.
    mixer_name: ClassVar[str | None] = None
    defaults: ClassVar[dict[str, Any]] = {}
    foreign: ClassVar[tuple[str, ...]] = ()  # fields of this class that the model type has not

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 2048,
        num_hidden_layers: int | None = None,
        num_heads: int | None = None,
        num_v_heads: int | None = None,
        head_dim: int | None = None,
        expand_k: float = 1.0,
        expand_v: float | None = None,
        mixer: str = "efla",
        use_short_conv: bool = True,
        conv_size: int = 4,
        use_gate: bool | None = None,
        use_beta: bool = True,
        use_output_norm: bool = True,
        allow_neg_eigval: bool = False,
        qk_norm: Normalization | None = None,
        qk_activation: Activation = "silu",
        safe_gate: bool = False,
        lower_bound: float | None = None,
        attn: Any = None,
        hidden_ratio: float | None = 4.0,
        intermediate_size: int | None = None,
        norm_eps: float = 1e-6,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        bos_token_id: int | None = 1,
        eos_token_id: int | list[int] | None = 2,
        pad_token_id: int | None = None,
        **more: Any,
    ) -> None:
        default = {"num_hidden_layers": 24, "num_heads": 16, "expand_v": 1.0, **self.defaults}
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers or default["num_hidden_layers"]
        self.num_heads = num_heads or default["num_heads"]
        self.num_v_heads = num_v_heads
        self.head_dim = head_dim or default.get("head_dim")
        self.expand_k = expand_k
        self.expand_v = default["expand_v"] if expand_v is None else expand_v
        self.use_short_conv, self.conv_size = use_short_conv, conv_size
        self.use_gate = default.get("use_gate") if use_gate is None else use_gate
        self.use_beta, self.use_output_norm = use_beta, use_output_norm
        self.allow_neg_eigval = allow_neg_eigval
        self.qk_norm, self.qk_activation = qk_norm or default.get("qk_norm"), qk_activation
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        self.attn = attn
        self.hidden_ratio = 4.0 if hidden_ratio is None else hidden_ratio
        self.intermediate_size = intermediate_size
        self.norm_eps, self.initializer_range, self.use_cache = norm_eps, initializer_range, use_cache
        if self.mixer_name is None:
            if mixer not in (*RULES, "softmax"):
                raise _refuse("mixer", mixer, f"one of {', '.join(RULES)}, softmax")
            self.mixer = mixer
        for field, allowed in _ALLOWED.items():
            if field in more and more[field] not in allowed:
                raise _refuse(field, more[field], " or ".join(map(repr, allowed)))
        if more.get("output_gate_activation") == "sigmoid" and RULES[self.mixer_name or self.mixer].decay != "scalar":
            raise _refuse("output_gate_activation", "sigmoid", "a mixer with a decay per head")
        self._check()
        super().__init__(  # type: ignore[call-arg, unused-ignore]
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **more,
        )

    def _check(self) -> None:
        """Raises ValueError for what the program refuses when it reads the configuration from a file."""
        name = self.mixer_name or self.mixer
        rule = RULES.get(name)  # None: softmax attention
        if self.allow_neg_eigval and rule is not None and rule.step != "euler":
            raise _refuse("allow_neg_eigval", True, f"False: {name} has no step of Euler's")
        if self.qk_norm is not None and (rule is None or rule.qk_norm is None):
            raise _refuse("qk_norm", self.qk_norm, f"None: {name} takes q and k as they are")
        if self.qk_norm not in (None, "l2", "sum"):
            raise _refuse("qk_norm", self.qk_norm, "'l2' or 'sum'")
        for field in ("safe_gate", "lower_bound"):
            value = getattr(self, field)
            if value not in (None, False) and (rule is None or rule.decay != "channel"):
                raise _refuse(field, value, f"none, as {name} has no decay by channel")
        if self.lower_bound is not None and not -5 <= self.lower_bound < 0:
            raise _refuse("lower_bound", self.lower_bound, "a number in [-5, 0)")
        layers = self.attention()["layers"]
        for layer in layers:
            if not (isinstance(layer, int) and 0 <= layer < self.num_hidden_layers) or layers.count(layer) > 1:
                raise _refuse("attn: layers", layers, f"different layers from 0 to {self.num_hidden_layers - 1}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields for config.json."""
        fields = {field: value for field, value in super().to_dict().items() if field not in self.foreign}
        prefix = "efla_model." + type(self).__name__[: -len("Config")]
        classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
        return {**fields, "auto_map": {auto: prefix + suffix for auto, suffix in classes.items()}}

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **more: Any) -> None:
        """Writes config.json, and efla_model.py, which loads the model where trust_remote_code is set."""
        folder = pathlib.Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "efla_model.py").write_text(_CODE)
        super().save_pretrained(save_directory, push_to_hub, **more)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: the folder keeps efla_model.py instead of a copy of this package."""

    def attention(self) -> dict[str, Any]:
        """Returns the softmax attention of a hybrid: its layers, num_heads, num_kv_heads and rope_theta."""
        given = self.attn[0] if isinstance(self.attn, (list, tuple)) and len(self.attn) == 1 else self.attn
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise _refuse("attn", given, f"a dict of {', '.join(_ATTENTION)}")
        for field, value in given.items():
            allowed = _ALLOWED_ATTENTION.get(field)
            if allowed is None and field not in _ATTENTION or allowed is not None and value not in allowed:
                raise _refuse(f"attn: {field}", value, " or ".join(map(repr, allowed or ("no such field",))))
        softmax = getattr(self, "mixer", None) == "softmax"
        heads = given.get("num_heads") or self.num_heads
        return {
            "layers": list(range(self.num_hidden_layers)) if softmax else list(given.get("layers", [])),
            "num_heads": heads,
            "num_kv_heads": given.get("num_kv_heads") or heads,
            "rope_theta": given.get("rope_theta", 10000.0),
        }

    def mlp_width(self) -> int:
        """Returns the width of the MLP."""
        return self.intermediate_size or (int(self.hidden_size * self.hidden_ratio * 2 / 3) + 255) // 256 * 256


def _own(config: EflaConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration. Raises ValueError for one that its model type has not."""
    for field in config.foreign:
        if fields.get(field) is not None:
            raise _refuse(field, fields[field], f"no such field, as model_type is {config.model_type}")
    return fields


class DeltaNetConfig(EflaConfig):
    """flash-linear-attention's DeltaNetConfig."""

    model_type = "delta_net"
    mixer_name = "deltanet"
    defaults = {"use_gate": False, "qk_norm": "l2"}
    foreign = ("head_dim", "num_v_heads", "safe_gate", "lower_bound", "mixer")

    def __init__(self, **fields: Any) -> None:
        super().__init__(**_own(self, fields))


class GatedDeltaNetConfig(EflaConfig):
    """flash-linear-attention's GatedDeltaNetConfig."""

    model_type = "gated_deltanet"
    mixer_name = "gdn"
    defaults = {"num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2.0, "use_gate": True}
    foreign = ("expand_k", "use_beta", "use_output_norm", "qk_norm", "qk_activation", "safe_gate", "lower_bound", "mixer")

    def __init__(self, **fields: Any) -> None:
        super().__init__(**_own(self, fields))


class KDAConfig(EflaConfig):
    """flash-linear-attention's KDAConfig."""

    model_type = "kda"
    mixer_name = "kda"
    defaults = {"head_dim": 128, "use_gate": True}
    foreign = ("expand_k", "use_gate", "use_beta", "use_output_norm", "qk_norm", "qk_activation", "mixer")

    def __init__(self, **fields: Any) -> None:
        super().__init__(**_own(self, fields))

    def _check(self) -> None:
        if self.safe_gate and self.lower_bound is None:
            raise _refuse("lower_bound", None, "a number in [-5, 0), as safe_gate is True")
        super()._check()
