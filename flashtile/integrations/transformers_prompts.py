"""Prompts and their answers as one packed sequence, in which each prompt is stored and computed once.

A path is a prompt and one of its answers. The token that predicts the first token of an answer is the last
one of the prompt, so each answer's segment begins with a copy of it and omits the answer's own last token,
which predicts nothing. Then each token of a segment predicts one token of the answer, as in the path alone,
and no logits are used twice. The root of the tree is the prompt without its last token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashtile.checks.arguments import named
from flashtile.checks.values import check_between
from flashtile.integrations import transformers_private as private
from flashtile.integrations.transformers_masks import WITHOUT_WINDOWS, TreeMask
from flashtile.masks.block_mask import BlockMask
from flashtile.masks.trees import create_tree_mask
from flashtile.problems.common import UNLIMITED

ATTENTION_LAYERS = ("full_attention", "sliding_attention")
"""Types of layers in a config that a tree describes: they mix tokens only by attention, by position."""

INPUTS = ("input_ids", "attention_mask", "position_ids", "block_mask", "logits_to_keep", "use_cache")


@dataclass(frozen=True, eq=False)
class SharedPrompts:
    """A packed batch of :func:`shared_prompts`. ``model(**batch)`` takes what a model needs of it.

    Tensors are on the model's device. The tokens that answers consist of are numbered in the order of the
    prompts and their answers.
    """

    input_ids: Tensor
    """(1, total) int64: for each prompt, the prompt without its last token, then the answers' segments."""
    attention_mask: Tensor
    """(1, total) of ones: models with another attention, which would ignore ``block_mask``, fail by it."""
    position_ids: Tensor
    """(1, total) int64: the position of each token in its path."""
    block_mask: dict[int, BlockMask]
    """The mask of the tree, for each ``window_left`` among the model's layers; -1 without a window."""
    logits_to_keep: Tensor
    """(answer_tokens,) int64: the tokens whose logits predict a token of an answer."""
    labels: Tensor
    """(1, answer_tokens) int64: the tokens of the answers, which the kept logits predict."""
    answer_ids: Tensor
    """(answer_tokens,) int64: the answer that each token belongs to, counted over all prompts."""
    lengths: list[list[int]]
    """Numbers of tokens of each answer, by prompt."""
    cu_seqlens: Tensor
    """(segments + 1,) int64 on the CPU: offsets of the segments, as :func:`flashtile.tree_attention` takes
    them."""
    parent: Tensor
    """(segments,) int64 on the CPU: the segment that each segment continues, or -1."""
    use_cache: bool = False

    def keys(self) -> tuple[str, ...]:
        return INPUTS

    def __getitem__(self, name: str) -> Any:
        if name not in INPUTS:
            raise KeyError(name)
        return getattr(self, name)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each token of the answers, (answer_tokens,), differentiable.

        Args:
            logits: (1, answer_tokens, vocabulary), as ``model(**batch).logits``, or (1, total, vocabulary) of
                a model that ignores ``logits_to_keep``. Divide them by the temperature first, if there is
                one. They are converted to float32, except for float64.

        Raises:
            TypeError: ``logits`` are no floating-point tensor.
            ValueError: ``logits`` have another shape.
        """
        if not isinstance(logits, Tensor) or not logits.is_floating_point():
            raise TypeError(
                f"logits must be a floating-point tensor, model(**batch).logits, got {_kind(logits)}"
            )
        kept, total = self.labels.shape[1], self.input_ids.shape[1]
        if logits.dim() != 3 or logits.shape[0] != 1 or logits.shape[1] not in (kept, total):
            raise ValueError(
                f"logits must have shape (1, {kept} or {total}, vocabulary), got {tuple(logits.shape)}"
            )
        rows = logits[0] if logits.shape[1] == kept else logits[0, self.logits_to_keep]
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return -F.cross_entropy(rows, self.labels[0], reduction="none")

    def unpack(self, values: Tensor) -> list[list[Tensor]]:
        """Return the part of each answer, by prompt, of ``values``, (answer_tokens, ...), as views.

        Raises:
            TypeError: ``values`` is no tensor.
            ValueError: ``values`` has another number of tokens.
        """
        if not isinstance(values, Tensor):
            raise TypeError(
                "values must be a tensor of numbers of the answers' tokens, as log_probs returns it, got "
                f"{_kind(values)}"
            )
        flat = [length for of_prompt in self.lengths for length in of_prompt]
        if values.dim() < 1 or values.shape[0] != sum(flat):
            raise ValueError(f"values must have shape ({sum(flat)}, ...), got {tuple(values.shape)}")
        parts = iter(values.split(flat))
        return [[next(parts) for _ in of_prompt] for of_prompt in self.lengths]


def shared_prompts(
    model: nn.Module, prompts: Sequence[Any], answers: Sequence[Sequence[Any]]
) -> SharedPrompts:
    """Pack prompts and their answers for one call of a model that computes each prompt once.

    The log-probabilities of the answers and all gradients are those of separate sequences, prompt and answer,
    up to rounding. GRPO and similar methods train on several answers to each prompt. The tokens that a layer
    computes then decrease from ``len(answers) * (prompt + answer)`` to ``prompt + len(answers) * answer``.

    Args:
        model: a causal language model of Transformers with ``attn_implementation="flashtile"``, or a module
            that wraps one, as DDP, PEFT and ``torch.compile`` do. Windows of its layers count positions in
            the path.
        prompts: a list of token ids for each prompt, or 1-D int tensors. All prompts are packed into one row.
        answers: for each prompt, a list of answers, which are like prompts and may differ in length.

    Returns:
        A :class:`SharedPrompts`.

    ``model(**batch)`` raises a ValueError if that model has another attention, which would ignore the tree.

    Terms of a loss that a model adds by itself, such as the balance of experts, count the tokens of a prompt
    once. The RoPE types "dynamic" and "longrope" choose frequencies by the longest path, as they do in a
    padded batch.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a prompt or an answer is empty, a prompt has no answer, ``answers`` has another length
            than ``prompts``, a token is not in the vocabulary, or the model has another attention.
        NotImplementedError: the model finds the order of tokens in memory and not in ``position_ids``, as
            convolutions, state spaces, ALiBi and chunked attention do, or has an encoder.

    Examples:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from flashtile.integrations.transformers import register, shared_prompts
        >>> register()
        >>> config = LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=4, num_key_value_heads=2,
        ... )
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="flashtile")
        >>> batch = shared_prompts(model, [[5, 6, 7, 8]], [[[9, 10], [11, 12, 13]]])
        >>> log_probs = batch.log_probs(model(**batch).logits)
        >>> advantages = torch.tensor([1.0, -1.0])  # of each answer
        >>> (-advantages[batch.answer_ids] * log_probs).mean().backward()
        >>> [[len(answer) for answer in of_prompt] for of_prompt in batch.unpack(log_probs)]
        [[2, 3]]
    """
    found = _find_model(model)
    config = found.config.get_text_config()
    implementation = private.implementation(config)
    if implementation not in private.served_names():
        raise ValueError(
            f'model must have attn_implementation="flashtile", got {implementation!r}: call register() and '
            'model.set_attn_implementation("flashtile")'
        )
    if found not in _checked:
        _check_layers(found, config)
        _checked.add(found)
    _check_list("prompts", prompts, "prompt")
    _check_list("answers", answers, "list of answers")
    if len(answers) != len(prompts):
        raise ValueError(
            f"answers must have a list for each of the {len(prompts)} prompts, got {len(answers)} lists"
        )
    segments: list[Tensor] = []
    parents: list[int] = []
    labels: list[Tensor] = []
    for i, (prompt, of_prompt) in enumerate(zip(prompts, answers, strict=True)):
        prompt, root = _as_tokens(f"prompts[{i}]", prompt, config.vocab_size), len(segments)
        _check_list(f"answers[{i}]", of_prompt, "answer")
        own = [_as_tokens(f"answers[{i}][{j}]", one, config.vocab_size) for j, one in enumerate(of_prompt)]
        last = len(prompt) - 1
        segments += [prompt[:last], *(torch.cat((prompt[last:], answer[:-1])) for answer in own)]
        parents += [-1] + [root] * len(own)
        labels += own
    parent = torch.tensor(parents, device="cpu")
    lengths = torch.tensor([len(segment) for segment in segments], device="cpu")
    cu_seqlens, is_answer = F.pad(lengths.cumsum(0), (1, 0)), parent >= 0
    # The first position of an answer's segment is the length of its root.
    total, first = int(cu_seqlens[-1]), torch.where(is_answer, lengths[parent], 0)
    position_ids = torch.arange(total, device="cpu") + (first - cu_seqlens[:-1]).repeat_interleave(lengths)
    of_answers = lengths[is_answer]
    kept = is_answer.repeat_interleave(lengths).nonzero()[:, 0]
    mask_of = partial(create_tree_mask, cu_seqlens, parent, total, found.device)
    masks, window = {UNLIMITED: mask_of()}, _window(config)
    if window is not None:
        hides_keys = window <= int(position_ids.max())
        masks[window - 1] = mask_of(window_left=window - 1) if hides_keys else masks[UNLIMITED]

    def placed(tensor: Tensor) -> Tensor:
        return tensor.to(found.device, non_blocking=True)

    return SharedPrompts(
        placed(torch.cat(segments))[None],
        torch.ones(1, total, dtype=torch.bool, device=found.device).as_subclass(TreeMask),
        placed(position_ids)[None],
        masks,
        placed(kept),
        placed(torch.cat(labels))[None],
        placed(torch.repeat_interleave(of_answers)),
        [of.tolist() for of in of_answers.split([len(of_prompt) for of_prompt in answers])],
        cu_seqlens,
        parent,
    )


def _kind(given: Any) -> str:
    return named(given) if isinstance(given, Tensor) else type(given).__name__


def _check_list(name: str, given: Any, element: str) -> None:
    if isinstance(given, str) or not isinstance(given, (Sequence, Tensor)):
        raise TypeError(f"{name} must be a list with at least one {element}, got {named(given)}")
    if not len(given):
        raise ValueError(f"{name} must have at least one {element}, got none")


def _as_tokens(name: str, given: Any, vocabulary: int) -> Tensor:
    """Return token ids as a tensor (tokens,) int64 on the CPU, or raise naming ``name``."""
    try:
        (length,) = (tokens := torch.as_tensor(given, device="cpu")).shape
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name} must be a list of token ids or a 1-D tensor of ints, got {named(given)}"
        ) from None
    if length == 0:
        raise ValueError(f"{name} must have at least one token, got none")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {tokens.dtype}")
    tokens = tokens.to(torch.int64)
    check_between(name, tokens, 0, vocabulary - 1, "the last token of the vocabulary")
    return tokens


def _find_model(model: Any) -> Any:
    """Return the model of Transformers that a module is or wraps."""
    from transformers import PreTrainedModel

    modules = model.modules() if isinstance(model, nn.Module) else ()
    found = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise TypeError(f"model must be or wrap a model of Transformers, got {type(model).__name__}")
    return found


_checked: WeakSet[nn.Module] = WeakSet()
"""Models whose layers have been checked: that takes milliseconds, and they are packed for in each step."""


def _check_layers(model: Any, config: Any) -> None:
    """Raise an error if a layer of the model would not follow the tree.

    Args:
        config: the config of the model's text.
    """
    layers = getattr(config, "layer_types", None) or ()
    other = next((kind for kind in layers if kind not in ATTENTION_LAYERS), None)
    decoder = model.get_decoder()
    modules = dict(decoder.named_modules())
    dropping = private.drops_keywords(model, decoder)
    convolution = next((name for name, module in modules.items() if isinstance(module, nn.Conv1d)), None)
    for reason, applies in (
        ("an encoder", config.is_encoder_decoder),
        (f"layers of type {other!r}", other is not None),
        ("a recurrent state", private.is_stateful(model)),
        (f"the convolution {convolution}", convolution is not None),
        ("attention that is not causal", any(not getattr(m, "is_causal", True) for m in modules.values())),
        ("ALiBi", getattr(config, "alibi", False)),
        ("no argument position_ids", "position_ids" not in inspect.signature(model.forward).parameters),
        (f"{dropping}, which drops block_mask", dropping is not None),
        ("windows in its masks only", config.model_type in WITHOUT_WINDOWS and _window(config) is not None),
    ):
        if applies:
            raise NotImplementedError(
                "model must have only attention whose positions come from position_ids, got "
                f"{type(model).__name__} with {reason}: use a sequence for each answer"
            )


def _window(config: Any) -> int | None:
    """Return the number of tokens that layers with a window see, or None if no layer has one."""
    layers = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    return None if layers is not None and "sliding_attention" not in layers else window
