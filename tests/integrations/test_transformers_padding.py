"""Padding wherever it lies, in Transformers' models: read once, and attended to as eager attention does."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.17")

from hugging_face import MASK, SMALL, TOKENS, pair, registered  # noqa: E402, F401 - a fixture

from flashtile.integrations import transformers_masks as masks  # noqa: E402

PADDED = {
    "left": MASK,
    "right": MASK.flip(1),
    "both": torch.tensor([[0] * 4 + [1] * 6 + [0] * 2, [1] * 12, [0] * 7 + [1] * 2 + [0] * 3]),
    "holes": torch.tensor([[1, 0, 1] * 4, [1] * 12, [0, 1] * 6]),
    "a sequence of padding": torch.cat((MASK[:2], torch.zeros_like(MASK[:1]))),
}


def llamas(**changed) -> tuple:
    return pair("LlamaForCausalLM", transformers.LlamaConfig(**{**SMALL, **changed}))


class HostReads(TorchDispatchMode):
    """Counts what waits for a GPU, if the tensors are there."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += function.overloadpacket.__name__ in self.WAITING
        return function(*arguments, **named or {})


def test_every_layer_uses_what_the_first_one_read():
    """Of masks of padding on either side, of positions that may restart, and in a step of decoding."""
    counts = []
    for layers in (1, 4):
        _, model = llamas(num_hidden_layers=layers)
        found = []
        with torch.no_grad():
            restarts = torch.cat([torch.arange(5), torch.arange(7)])[None]
            for named in (
                {"attention_mask": MASK}, {"attention_mask": MASK.flip(1)}, {"input_ids": TOKENS[:1]},
                {"input_ids": TOKENS[:1], "position_ids": restarts},
            ):  # fmt: skip
                with HostReads() as reads:
                    model(**{"input_ids": TOKENS, **named})
                found.append(reads.count)
            cache = model(TOKENS[:, :-1], attention_mask=MASK[:, :-1]).past_key_values
            with HostReads() as reads:
                model(TOKENS[:, -1:], attention_mask=MASK, past_key_values=cache)
            found.append(reads.count)
        counts.append(found)
    assert counts[0] == counts[1]
    assert min(counts[0][:2]) > 0  # they are counted


def test_a_tensor_that_was_written_to_is_read_again():
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert masks.padding_of(mask) is masks.padding_of(mask)
    assert masks.padding_of(mask).whole
    mask[0, :2] = False
    assert masks.padding_of(mask).on_left
    assert masks.padding_of(mask).starts.tolist() == [2, 0]
    assert all(value is not mask for value in vars(masks.padding_of(mask)).values())  # it would never go
    with torch.inference_mode():
        mask = torch.ones(2, 5, dtype=torch.bool)
        assert masks.padding_of(mask).whole
        mask[1, 4] = False
        assert masks.padding_of(mask).on_right


@pytest.mark.parametrize("where", PADDED)
def test_tokens_see_no_padding(where):
    """In training, in inference mode, and in parts over a cache."""
    mask = PADDED[where]
    here = mask == 1
    eager, ours = llamas()
    expected = eager(TOKENS, attention_mask=mask).logits
    torch.testing.assert_close(
        ours(TOKENS, attention_mask=mask).logits[here], expected[here], atol=2e-6, rtol=1e-5
    )
    with torch.inference_mode():
        torch.testing.assert_close(
            ours(TOKENS, attention_mask=mask).logits[here], expected[here], atol=2e-6, rtol=1e-5
        )
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            cache, parts, place = None, [], 0
            for part in TOKENS.split([7, 4, 1], 1):
                place += part.shape[1]
                result = ours(part, attention_mask=mask[:, :place], past_key_values=cache)
                cache = result.past_key_values
                parts.append(result.logits)
            torch.testing.assert_close(torch.cat(parts, 1)[here], expected[here], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("where", ["left", "right", "both"])
def test_a_window_counts_from_the_tokens(where):
    mask = PADDED[where]
    config = transformers.MistralConfig(**SMALL, sliding_window=3)
    eager, ours = pair("MistralForCausalLM", config)
    expected, logits = (model(TOKENS, attention_mask=mask).logits[mask == 1] for model in (eager, ours))
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("where", PADDED)
def test_a_decoder_looks_at_the_padded_tokens_of_its_encoder(where):
    """As many queries as there are keys: padding of the keys is none of the queries."""
    config = transformers.BartConfig(
        vocab_size=96, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        dropout=0.0,
    )  # fmt: skip
    models = pair("BartForConditionalGeneration", config)
    here = PADDED[where].any(1)  # eager attention makes of no key the mean of all
    named = {"attention_mask": PADDED[where], "decoder_input_ids": TOKENS.flip(1)}
    expected, logits = (model.train()(TOKENS, **named).logits for model in models)
    torch.testing.assert_close(logits[here], expected[here], atol=5e-6, rtol=1e-5)
    gradients = []
    for model, found in zip(models, (expected, logits), strict=True):
        found[here].square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], atol=2e-5, rtol=1e-3)
