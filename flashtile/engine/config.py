"""Reading and validating a Hugging Face ``config.json``.

All model families are one architecture with switches (:mod:`flashtile.engine.families`). Settings that the
switches cannot express, such as partial rotary embedding, raise an error that names the field.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flashtile.engine.families import FAMILIES, Family
from flashtile.problems.linear import SCALE_BLOCK

MAX_CONFIG_BYTES = 2**24
MAX_SIZE = 2**24
"""Upper limit of every size in a config, such as ``hidden_size``. Larger ones are mistakes or attacks."""

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
IN_VLLM = "; vLLM serves more models, on flashtile's attention: see docs/guides/vllm.md"
NO_ROPE = {"rope_type": "none"}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a model, with the meanings that Hugging Face gives them.

    Attributes:
        rope: the parameters of the rotary embedding, ``rope_theta`` and ``rope_type`` among them.
        local_rope: those of layers with a window, or None if they are the same.
        no_rope_layers: layers without rotary embedding.
        windows: for each layer, how many earlier keys a query sees in addition to its own; -1 for all.
        softmax_scale: factor of the attention scores.
        attn_softcap, final_softcap: soft caps of the attention scores and of the logits; 0 for none.
        activation: "silu" or "gelu_tanh".
        num_experts, experts_per_token: size of a mixture of experts, and how many of them a token gets.
            Without a mixture there are 0 experts.
        expert_size: intermediate size of an expert.
        normalized: whether the weights of a token's experts sum to 1.
        dense_layers: layers that have an MLP instead of experts.
        swiglu_alpha, swiglu_limit: parameters of gpt-oss's activation function; 0 in other families.
        eos_token_ids: tokens that end a text.
        bos_token_id: the token that begins a text, or None.
        dtype: dtype of the stored weights as ``config.json`` names it, "float32" by default.
        scales: what has a scale if the layers' matrices are stored in e4m3: "channel" (a row or the whole
            matrix) or "block" (of 128 x 128). "": they are not stored in e4m3.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_theta": 10000.0, "rope_type": "default"})
    local_rope: dict[str, Any] | None = None
    no_rope_layers: frozenset[int] = frozenset()
    windows: tuple[int, ...] = ()
    softmax_scale: float = 0.0
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    activation: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    normalized: bool = True
    dense_layers: frozenset[int] = frozenset()
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    scales: str = ""

    @property
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    def rope_of(self, layer: int) -> dict[str, Any]:
        """Return the parameters of a layer's rotary embedding. ``rope_type`` is "none" if it has none."""
        if layer in self.no_rope_layers:
            return NO_ROPE
        return self.rope if self.local_rope is None or self.windows[layer] < 0 else self.local_rope

    @property
    def ropes(self) -> list[dict[str, Any]]:
        """The different results of :meth:`rope_of`, in the order of the layers."""
        found: list[dict[str, Any]] = []
        for layer in range(self.num_layers):
            if self.rope_of(layer) not in found:
                found.append(self.rope_of(layer))
        return found

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def longest_sequence(self) -> int:
        """Maximum number of tokens of a sequence that the model supports.

        With linear, dynamic and YaRN scaling it can be larger than ``max_position_embeddings``.
        """
        length, rope = self.max_position_embeddings, self.rope
        if rope["rope_type"] not in ("linear", "dynamic", "yarn"):
            return length
        stretched = rope.get("original_max_position_embeddings", length) * rope["factor"]
        return max(length, int(min(MAX_SIZE, stretched)))


class ConfigError(ValueError):
    """A file of a model's folder is invalid. The message names the file and the field."""


class _Fields:
    """Typed reads of a JSON object, with errors that name the field."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source

    def refuse(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self.source}: {name} must be {allowed}, got {self.values.get(name)!r:.80}")

    def _get(self, name: str, default: Any) -> Any:
        """Return a field, or the default if it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refuse(name, f"an integer from {least} to {most}")
        return value

    def number(self, name: str, default: float | None = None, positive: bool = True) -> float:
        value = self._get(name, default)
        number = value if type(value) in (int, float) else math.nan
        if not abs(number) <= sys.float_info.max or (positive and number <= 0):
            raise self.refuse(name, f"a {'positive ' * positive}number")
        return float(number)

    def integers(self, name: str) -> list[int]:
        value = self._get(name, [])
        if not isinstance(value, list) or any(type(one) not in (int, bool) for one in value):
            raise self.refuse(name, "a list of integers")
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        """Return a list of ``count`` positive numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(name, f"a list of {count} positive numbers")
        return [_Fields({name: one}, self.source).number(name) for one in value]

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def one_of(self, name: str, allowed: Iterable[str], hint: str = "") -> str:
        """Return a field that must be one of ``allowed``, because nothing else is supported."""
        value = self.values.get(name)
        if not isinstance(value, str) or value not in allowed:
            given = f"{', '.join(allowed)}, got {value!r:.80}{hint}"
            raise NotImplementedError(f"{self.source}: {name} must be one of {given}")
        return value

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        value = self.values.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or not 0 <= token < vocab_size for token in found):
            raise self.refuse(name, f"a token or a list of tokens below vocab_size={vocab_size}, or null")
        return tuple(found)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most ``MAX_CONFIG_BYTES`` from a file. Raise ConfigError otherwise."""
    size = path.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: expected a config of at most {MAX_CONFIG_BYTES} bytes, got {size}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def model_folder(model: str | Path, name: str = "model") -> Path:
    """Return the folder of a model: ``model`` itself, or the newest snapshot of ``ORGANISATION/NAME``.

    Snapshots are looked up in Hugging Face's hub cache (``HF_HUB_CACHE``, or ``hub`` in ``HF_HOME``). Nothing
    is downloaded. A path that is neither a folder nor such a name is returned unchanged. Errors call the
    argument ``name``.

    Raises:
        TypeError: ``model`` is no path.
        FileNotFoundError: the cache does not have the model.
    """
    if not isinstance(model, (str, os.PathLike)):
        got = type(model).__name__
        raise TypeError(f"{name} must be a folder, or a name in Hugging Face's cache, got {got}")
    folder, model = Path(model), str(model)
    if folder.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", model):
        return folder
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    stored = cache / f"models--{model.replace('/', '--')}"
    head = stored / "refs" / "main"
    snapshot = stored / "snapshots" / (head.read_text().strip() if head.is_file() else "none")
    if not snapshot.is_dir():
        raise FileNotFoundError(
            f"{name} must be a folder, or a name in the hub cache {cache}, got {model!r}; "
            f"`hf download {model}` downloads it"
        )
    return snapshot


def read_config(folder: Path) -> ModelConfig:
    """Read the model's config from ``folder``.

    The end tokens of config.json and of generation_config.json both end a text. Transformers uses only the
    latter's, if it has any.

    Raises:
        FileNotFoundError: there is no config.json.
        ConfigError: a field is absent, of the wrong type or out of range.
        NotImplementedError: the model is not supported; the message names the field.
    """
    path = folder / "config.json"
    if not path.is_file() and (folder / "adapter_config.json").is_file():
        raise NotImplementedError(f"{folder} has a LoRA adapter: merge it into its model first{IN_VLLM}")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must be a folder with a config.json")
    values = read_json(path)
    config = parse_config(values, str(path))
    generation = folder / "generation_config.json"
    if not generation.is_file():
        return config
    further = _Fields(read_json(generation), str(generation)).ids("eos_token_id", config.vocab_size)
    if not further:
        return config
    own = config.eos_token_ids if values.get("eos_token_id") is not None else ()  # not the class's default
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*own, *further))))


def parse_config(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Validate the contents of a config.json, as :func:`read_config` does.

    ``source`` is the name of the file in errors.
    """
    _refuse_unsupported(values, source)
    model_type = _Fields(values, source).one_of("model_type", FAMILIES, IN_VLLM)
    family = FAMILIES[model_type]
    fields = _Fields(_with_defaults(values, family), source)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads", most=2**14)
    kv_heads = fields.size("num_key_value_heads", heads, most=2**14)
    if heads % kv_heads:
        raise fields.refuse("num_attention_heads", f"a multiple of num_key_value_heads={kv_heads}")
    head_dim = fields.size("head_dim", hidden // heads, most=512)
    if head_dim % 2:
        raise fields.refuse("head_dim", "even, because rotary embedding rotates pairs")
    layers, vocab_size = fields.size("num_hidden_layers", most=2**12), fields.size("vocab_size")
    gemma = "hidden_activation" in family.fields
    bias = fields.flag("attention_bias")
    experts = fields.size("num_local_experts", most=2**12) if family.experts else 0
    sparse_step = fields.size("decoder_sparse_step", 1)
    dense = {i for i in range(layers) if (i + 1) % sparse_step}
    unrotated = _read_no_rope_layers(fields, layers)
    rope, local_rope = _read_ropes(values, fields, family, head_dim)
    dtype = values.get("dtype") or values.get("torch_dtype") or "float32"
    if dtype not in ("float16", "bfloat16", "float32"):
        raise NotImplementedError(f"{source}: dtype must be float16, bfloat16 or float32, got {dtype!r:.80}")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        rope=rope,
        local_rope=local_rope,
        no_rope_layers=unrotated,
        windows=_read_windows(fields, layers, family, unrotated),
        softmax_scale=fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
        attn_softcap=fields.number("attn_logit_softcapping", 0.0, positive=False),
        final_softcap=fields.number("final_logit_softcapping", 0.0, positive=False),
        activation=ACTIVATIONS[fields.one_of("hidden_activation" if gemma else "hidden_act", ACTIVATIONS)],
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=fields.flag("mlp_bias"),
        num_experts=experts,
        experts_per_token=fields.size("num_experts_per_tok", most=experts) if experts else 0,
        expert_size=fields.size(family.experts.inner) if family.experts else 0,
        normalized=fields.flag("norm_topk_prob", True),
        dense_layers=frozenset(dense.union(fields.integers("mlp_only_layers"))),
        swiglu_alpha=fields.number("swiglu_alpha", 0.0, positive="swiglu_alpha" in family.fields),
        swiglu_limit=fields.number("swiglu_limit", 0.0, positive="swiglu_limit" in family.fields),
        eos_token_ids=fields.ids("eos_token_id", vocab_size),
        bos_token_id=next(iter(fields.ids("bos_token_id", vocab_size)), None),
        dtype=dtype,
        scales=_read_scales(values, source),
    )


def _with_defaults(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the fields of the family's config class. Absent fields have the defaults of the class."""
    found = {name: values.get(name, default) for name, default in family.fields.items()}
    for name, default in family.fields.items():
        if found[name] is None and isinstance(default, (bool, str)):
            found[name] = default  # the class does not allow None here, so null means absent
    # A vocabulary smaller than the class's default may not contain the class's default tokens.
    for name in ("eos_token_id", "bos_token_id"):
        size = found["vocab_size"]
        if name not in values and type(size) is int and (found[name] or 0) >= size:
            found[name] = None
    if "num_local_experts" in found and "num_local_experts" not in values:
        found["num_local_experts"] = values.get("num_experts", found["num_local_experts"])
    return found


def _refuse_unsupported(values: Mapping[str, Any], source: str) -> None:
    for name in ("vision_config", "audio_config"):
        if values.get(name):
            raise NotImplementedError(f"{source}: {name} is not supported, only models of text{IN_VLLM}")
    classes = values.get("architectures")
    if isinstance(classes, list) and classes and not any(str(one).endswith("ForCausalLM") for one in classes):
        raise NotImplementedError(
            f"{source}: architectures must have a model that generates text (...ForCausalLM), not embeddings "
            f"or classes, got {classes!r:.80}{IN_VLLM}"
        )
    for name in ("use_bidirectional_attention", "per_layer_config"):
        if values.get(name):
            raise NotImplementedError(f"{source}: {name} is not supported, got {values[name]!r:.80}")


def _read_scales(values: Mapping[str, Any], source: str) -> str:
    """Return ``scales`` of :class:`ModelConfig`.

    Raises:
        NotImplementedError: the checkpoint is quantized in another way.
    """
    given = values.get("quantization_config") or values.get("compression_config")
    if not given:
        return ""
    given = given if isinstance(given, Mapping) else {"quant_method": given}
    method, found = given.get("quant_method"), []
    if method == "fp8":
        found = [given.get("weight_block_size")]
    elif method == "compressed-tensors" and isinstance(given.get("config_groups"), Mapping):
        for group in given["config_groups"].values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            weights = weights if isinstance(weights, Mapping) else {}
            e4m3 = (weights.get("type"), weights.get("num_bits")) == ("float", 8)
            block = weights.get("block_structure") if weights.get("strategy") == "block" else None
            found.append(block if e4m3 else "other")
    if len({*map(str, found)}) != 1 or found[0] not in (None, [SCALE_BLOCK, SCALE_BLOCK]):
        raise NotImplementedError(
            f"{source}: quantization_config must be fp8 or compressed-tensors in e4m3 with a scale for each "
            f"tensor, channel or block of {[SCALE_BLOCK, SCALE_BLOCK]}, got {method!r:.80}{IN_VLLM}"
        )
    return "block" if found[0] else "channel"


def _read_ropes(
    values: Mapping[str, Any], fields: _Fields, family: Family, head_dim: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return (``rope``, ``local_rope``) of :class:`ModelConfig`.

    Transformers 5 stores both in ``rope_parameters``; Transformers 4 splits them over ``rope_theta`` and
    ``rope_scaling``.
    """
    source = f"{fields.source}: rope_parameters"
    scaling, given = values.get("rope_scaling"), fields.values["rope_parameters"]
    given = scaling or given if scaling and not family.local_rope else given
    given = (family.fields["rope_parameters"] or {}) if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{source} must be an object, got {given!r:.80}")
    read = functools.partial(_read_rope, values, fields, family, head_dim)
    if family.local_rope:
        kinds = "full_attention", "sliding_attention"
        everywhere, local = (given.get(kind) or {} for kind in kinds)
        scaling = scaling or {}
        if not {*given} <= {*kinds} or not all(isinstance(x, Mapping) for x in (everywhere, local, scaling)):
            raise NotImplementedError(f"{source} must be objects {' and '.join(kinds)}, got {given!r:.80}")
        return read({**everywhere, **scaling}, "rope_theta"), read(local, "rope_local_base_freq")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise NotImplementedError(
            f"{source} must be the same for all types of layers, got {sorted(given)!r:.80}"
        )
    return read(given, "rope_theta"), None


def _read_rope(
    values: Mapping[str, Any], fields: _Fields, family: Family, head_dim: int, given: Mapping[str, Any],
    base: str,
) -> dict[str, Any]:  # fmt: skip
    """Validate rotary parameters. Field ``base`` is the base if ``given`` has no ``rope_theta``."""
    source = f"{fields.source}: rope_parameters"
    rope = _Fields({"rope_theta": fields.values[base], **given}, source)
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    kind = family.rope_types.get(kind, kind) if isinstance(kind, str) else kind
    _Fields({"rope_type": kind}, source).one_of("rope_type", ROPE_TYPES)
    either = _Fields({**values, **rope.values}, source)
    rotated = either.number("partial_rotary_factor", 1)
    if rotated != 1 and "partial_rotary_factor" not in family.fields:
        raise NotImplementedError(f"{source}: partial_rotary_factor must be 1, got {rotated!r:.80}")
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": rope.number("rope_theta", family.fields[base])}
    if rotated != 1:
        found["rotary_dim"] = int(head_dim * rotated)
        if not 2 <= found["rotary_dim"] <= head_dim or found["rotary_dim"] % 2:
            raise either.refuse("partial_rotary_factor", f"an even part of head_dim={head_dim}")
    longest = fields.size("max_position_embeddings")
    if kind not in ("default", "longrope"):
        found["factor"] = rope.number("factor")
    if kind in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        outer = _Fields({**values, **fields.values}, fields.source)
        apart = outer.number(name, longest)
        found[name] = apart if outer.values.get(name) is not None else rope.number(name, apart)
    if kind == "dynamic":
        found["original_max_position_embeddings"] = longest
        if head_dim == 2:
            raise fields.refuse("head_dim", "above 2 with rope_type 'dynamic'")
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            found[name] = rope.number(name)
        if found["high_freq_factor"] <= found["low_freq_factor"]:
            raise rope.refuse("high_freq_factor", f"above low_freq_factor={found['low_freq_factor']}")
    if kind == "yarn":
        _read_yarn(rope, found)
    if kind == "longrope":
        pairs = found.get("rotary_dim", head_dim) // 2
        found |= {name: rope.numbers(name, pairs) for name in ("short_factor", "long_factor")}
        original = found["original_max_position_embeddings"]
        factor = rope.number("factor", longest / original)
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
        found["attention_factor"] = rope.number("attention_factor", default)
    return found


def _read_yarn(rope: _Fields, found: dict[str, Any]) -> None:
    """Add the parameters that only YaRN has to ``found``."""
    for name in ("mscale", "mscale_all_dim"):
        if rope.values.get(name):
            raise NotImplementedError(
                f"{rope.source}: {name} is not supported, got {rope.values[name]!r:.80}"
            )
    if found["rope_theta"] == 1:  # all pairs would rotate at the same frequency
        raise rope.refuse("rope_theta", "other than 1 with rope_type 'yarn'")
    found |= {name: rope.number(name, value) for name, value in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    # An absent field means true, null means false.
    found["truncate"] = rope.flag("truncate", "truncate" not in rope.values)
    if rope.values.get("attention_factor") is not None:
        found["attention_factor"] = rope.number("attention_factor")


def _read_no_rope_layers(fields: _Fields, layers: int) -> frozenset[int]:
    """Return the layers without rotary embedding, which SmolLM 3 has."""
    if "no_rope_layers" not in fields.values:
        return frozenset()
    if fields.values["no_rope_layers"] is None:
        return frozenset(range(layers)[(every := fields.size("no_rope_layer_interval")) - 1 :: every])
    has_rope = fields.integers("no_rope_layers")
    if len(has_rope) < layers:
        raise fields.refuse("no_rope_layers", f"a list of at least {layers} integers")
    return frozenset(i for i in range(layers) if not has_rope[i])


def _read_windows(fields: _Fields, layers: int, family: Family, unrotated: frozenset[int]) -> tuple[int, ...]:
    """Return the window of each layer: how many keys before the query are visible, -1 for all.

    Transformers' ``sliding_window`` also counts the query's own position, which is not counted here.
    """
    values, kinds = fields.values, fields.values.get("layer_types")
    if values.get("sliding_window") is None or not fields.flag("use_sliding_window", True):
        return (-1,) * layers
    window = fields.size("sliding_window", most=2**30) - 1
    if kinds is None and "no_rope_layers" in values:
        sliding = [i in unrotated for i in range(layers)]
    elif kinds is None:
        first = fields.size("max_window_layers", 0, least=0)
        every = fields.size("sliding_window_pattern", family.full_every or layers + 1)
        sliding = [i >= first and (i + 1) % every > 0 for i in range(layers)]
    else:
        allowed = ("sliding_attention", "full_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in allowed for kind in kinds):
            raise fields.refuse("layer_types", f"a list of {layers} of {' or '.join(allowed)}")
        sliding = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if slides else -1 for slides in sliding)
