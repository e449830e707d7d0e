"""Tiny models of Transformers with random weights, for the families that compare with them."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig
from transformers.utils import logging

import flashtile.integrations.transformers as integration
from fuzz.prelude import Wrong

logging.set_verbosity_error()
logging.disable_progress_bar()

SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 90, "max_position_embeddings": 128, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOLERANCE = 2e-4
"""Allowed difference of float32 logits of order one after two layers; a wrong mask changes them by hundredths."""


def config_of(name: str, **fields):
    small = dict(SMALL)
    if name in ("bert", "modernbert"):
        small = {
            n: v
            for n, v in small.items()
            if n not in ("num_key_value_heads", "head_dim", "eos_token_id", "bos_token_id")
        }
        small["pad_token_id"] = 0
    given = {**small, **fields}
    return AutoConfig.for_model(name, **{n: v for n, v in given.items() if v is not LEFT_OUT})


LEFT_OUT = object()
"""Marks a field that config.json leaves out."""


def model_of(config, kind: str = "AutoModelForCausalLM", **options):
    import transformers

    torch.manual_seed(1)
    model = getattr(transformers, kind).from_config(config, **options).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            elif parameter.dim() == 1:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1 if parameter.dim() < 3 else 1] ** -0.5)
    return model


def eager_differs(name: str, rows: int, length: int, padding: str, seed: int, **fields) -> None:
    """Compare flashtile's hidden states with eager attention's at all tokens that are not padding.

    Raises:
        Wrong: they differ.
    """
    integration.register()
    config = config_of(name, **fields)
    found = []
    torch.manual_seed(seed)
    tokens = torch.randint(1, 90, (rows, length))
    there = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        cut = (row * 3 + 2) % (length - 1)
        if padding == "right":
            there[row, length - cut :] = 0
        elif padding == "left":
            there[row, :cut] = 0
        elif padding == "holes":
            there[row, 3 : 3 + cut // 2] = 0
    there = there if padding != "all" else torch.ones_like(there)
    for implementation in ("eager", "flashtile"):
        model = model_of(config, "AutoModel", attn_implementation=implementation)
        with torch.no_grad():
            found.append(model(tokens, attention_mask=there).last_hidden_state[there.bool()])
    difference = (found[0] - found[1]).abs().max().item()
    if not difference <= TOLERANCE:
        raise Wrong(f"{name} differs from eager", f"by {difference:.3g} with padding={padding!r}")


def packed_differs(
    name: str,
    batch: int,
    length: int,
    seed: int,
    device: str = "cpu",
    positions: list[list[int]] | None = None,
    compiled: bool = False,
    **fields,
) -> None:
    """Compare flashtile's logits without a cache with eager attention's, for positions of one or of all rows.

    Compiled code takes one row of positions as those of a batch that is not packed.

    Raises:
        Wrong: they differ.
    """
    integration.register()
    torch.manual_seed(seed)
    tokens = torch.randint(1, 90, (batch, length)).to(device)
    named = {} if positions is None else {"position_ids": torch.tensor(positions, device=device)}
    if compiled and positions is not None:
        named["position_ids"] = named["position_ids"].expand(batch, -1)
    config, found = config_of(name, **fields), []
    for implementation in ("eager", "flashtile"):
        model = model_of(config, attn_implementation=implementation).to(device)
        if compiled and implementation == "flashtile":
            torch.compiler.reset()
            model = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            found.append(model(tokens, use_cache=False, **named).logits)
    difference = ((found[0] - found[1]).abs().max() / found[0].abs().max().clamp(min=1)).item()
    if not difference <= TOLERANCE:
        raise Wrong(f"{name} differs from eager", f"by {difference:.3g}")


def shared_differs(
    name: str, prompts: list[int], answers: list[list[int]], seed: int, device: str = "cpu", **fields
) -> None:
    """Compare log-probabilities of answers that share a prompt with eager attention's, one after another.

    Args:
        prompts, answers: numbers of tokens.

    Raises:
        Wrong: they differ.
    """
    integration.register()
    torch.manual_seed(seed)
    config = config_of(name, **fields)
    eager, ours = (model_of(config, attn_implementation=one).to(device) for one in ("eager", "flashtile"))
    texts = [torch.randint(1, 90, (length,)).to(device) for length in prompts]
    drawn = [[torch.randint(1, 90, (length,)).to(device) for length in of_prompt] for of_prompt in answers]
    with torch.no_grad():
        batch = integration.shared_prompts(ours, texts, drawn)
        found = batch.unpack(batch.log_probs(ours(**batch).logits))
        for text, of_text, parts in zip(texts, drawn, found, strict=True):
            for answer, part in zip(of_text, parts, strict=True):
                logits = eager(torch.cat((text, answer))[None], use_cache=False).logits[0].log_softmax(-1)
                right = logits[len(text) - 1 : -1].gather(1, answer[:, None])[:, 0]
                difference = ((part - right).abs().max() / right.abs().max().clamp(min=1)).item()
                if not difference <= TOLERANCE:
                    raise Wrong(f"{name} differs from eager", f"by {difference:.3g}")


def engine_differs(name: str, prompt: list[int], **fields) -> None:
    """Compare the engine's log-probabilities with those of Transformers for the same checkpoint.

    Raises:
        Wrong: they differ.
    """
    import transformers

    from flashtile.engine import LLM, SamplingParams

    folder = tempfile.mkdtemp()
    try:
        model_of(config_of(name, **fields)).save_pretrained(folder)
        _leave_out(folder, [n for n, v in fields.items() if v is LEFT_OUT])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype="float32"
        )
        with torch.no_grad():
            right = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        llm = LLM(
            folder, device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=16, max_model_len=64
        )
        asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, logprobs=5)
        output = llm.generate({"prompt_token_ids": prompt}, asked)[0]
        pairs = [
            (entry[token].logprob, right[at, token].item())
            for at, (token, entry) in enumerate(zip(prompt[1:], output.prompt_logprobs[1:], strict=True))
        ]
        pairs += [
            (entry.logprob, right[-1, token].item()) for token, entry in output.outputs[0].logprobs[0].items()
        ]
        difference = max(abs(a - b) for a, b in pairs)
    finally:
        shutil.rmtree(folder)
    if not difference <= 50 * TOLERANCE:
        raise Wrong(f"{name} differs from Transformers", f"by {difference:.3g}")


def _leave_out(folder: str, names: list[str]) -> None:
    path = Path(folder) / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in names}))
