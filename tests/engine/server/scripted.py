"""A model with a trained tokenizer, whose markers are tokens, and answers in every format of tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from flashtile.engine.server.formats import Formats

END = "<|im_end|>"
MARKERS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    "<|python_tag|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>",
    "<|return|>",
]  # fmt: skip

ARGUMENTS = '{"a": "1 }\\" </tool_call>\U0001f98a"}'
"""Arguments with a bracket, a quote, an end marker and a character of several tokens within a string."""
CALL = f'{{"name": "add", "arguments": {ARGUMENTS}}}'

CALLS = (("add", ARGUMENTS), ("stop", "{}"))
FORCED_ARGUMENTS = ARGUMENTS.replace("</tool_call>", "]")
"""A grammar leaves the model no token that is a marker."""
FORCED = f'{{"name": "add", "parameters": {FORCED_ARGUMENTS}}}'


class Answer(NamedTuple):
    """An answer in a format: reasoning and text, if it has any, a call, and one without arguments."""

    formats: Formats
    text: str
    fields: Mapping[str, Any] = MappingProxyType({})
    """Further fields of the request."""
    calls: Sequence[tuple[str, str]] = CALLS


ANSWERS = {
    "hermes": Answer(
        Formats("hermes", "qwen3"),
        f"<think>\nWhy 1?\n</think>\n\nI call.\n<tool_call>\n{CALL}\n</tool_call>\n"
        '<tool_call>\n{"name": "stop"}\n</tool_call>',
    ),
    "reasoning begun by the prompt": Answer(
        Formats("hermes", "deepseek_r1"),
        f'Why 1?\n</think>\n\nI call.<tool_call>{CALL}</tool_call><tool_call>{{"name": "stop"}}</tool_call>',
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    "llama": Answer(Formats("llama3_json"), f'{CALL}; {{"name": "stop", "parameters": null}}'),
    "llama, marked": Answer(Formats("llama3_json"), f'I call.<|python_tag|>{CALL}; {{"name": "stop"}}'),
    "mistral": Answer(Formats("mistral"), f"I call.[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]stop"),
    "mistral, a list": Answer(
        Formats("mistral"), f'[TOOL_CALLS][{CALL}, {{"name": "stop", "arguments": ""}}]'
    ),
    "mistral, with ids": Answer(
        Formats("mistral"),
        f"I call.[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{ARGUMENTS}[TOOL_CALLS]stop[CALL_ID]a1b2c3d4f[ARGS]",
    ),
    "gpt": Answer(
        Formats("openai", "openai_gptoss"),
        "<|channel|>analysis<|message|>Why 1?<|end|><|start|>assistant<|channel|>commentary<|message|>I call."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|><|start|>assistant<|channel|>commentary to=functions.stop<|message|><|call|>",
    ),
    "forced": Answer(
        Formats("hermes", "qwen3"),
        f'<think>\nWhy 1?\n</think>\n\n[{FORCED}, {{"name": "stop", "parameters": {{}}}}]',
        {"tool_choice": "required"},
        (("add", FORCED_ARGUMENTS), ("stop", "{}")),
    ),
    "forced, one of gpt": Answer(
        Formats("openai", "openai_gptoss"),
        f"<|channel|>analysis<|message|>Why 1?<|end|><|start|>assistant<|channel|>final<|message|>[{FORCED}]",
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
        (("add", FORCED_ARGUMENTS),),
    ),
}

TEMPLATE = (
    "{% for tool in tools or () %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ c.function.name }}"
    "{% for name, value in c.function.arguments.items() %}{{ name }}{{ value | tojson }}{% endfor %}"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking %}<think>{% endif %}"
)


def write_model(path: Path) -> Path:
    """A model without weights, and a tokenizer of bytes and pairs as those of Llama 3, Qwen and gpt-oss."""
    tokenizers = pytest.importorskip("tokenizers")
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE())
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    loaded.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=480, special_tokens=[END, *MARKERS], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    loaded.train_from_iterator(
        [text.replace("\U0001f98a", "") for _, text, *_ in ANSWERS.values()] * 2, trainer
    )
    path.mkdir(parents=True, exist_ok=True)
    loaded.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    config = {
        "model_type": "llama", "vocab_size": 500, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "eos_token_id": 0,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return path
