"""The articles' blocks of Python run as they stand after one line that installs flashtile.

The harness gives what the blocks take for granted, imports and a model's folder, and without a GPU it writes
"cpu" for "cuda" and 512 for 4096.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import article_blocks
import pytest
import torch

import flashtile
from flashtile.reference import attention as reference
from targets import CUDA

DEVICE = "cuda" if CUDA else "cpu"
SEQLEN = 4096 if CUDA else 512


def run(block: str, **names: Any) -> dict[str, Any]:
    """The names that a block leaves."""
    if not CUDA:
        block = block.replace("'cuda'", "'cpu'").replace("4096", "512")
    exec(compile(block, "article 004", "exec"), names)
    return names


@pytest.fixture
def installed():
    flashtile.compat.install_as_flash_attn()
    yield
    flashtile.compat.uninstall_as_flash_attn()


def last_rows(q, k, v, causal: bool, rows: int = 32):
    """Standard attention of the last rows, in float32: (batch, rows, heads, head_dim)."""
    return reference.attention(q[:, -rows:], k, v, causal=causal, upcast=torch.float32)[0]


def test_online_softmax_update_is_softmax():
    """[1, 2, 3, 4] in two blocks, as article 003 works it out, with rows of V beside."""
    update = run(
        article_blocks.ONLINE_SOFTMAX,
        **{name: getattr(torch, name) for name in ("max", "exp", "sum", "matmul")},
    )["online_softmax_update"]
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    V = torch.eye(4, dtype=torch.float64)
    output, row_max, row_sum = (
        torch.zeros(4, dtype=torch.float64),
        torch.tensor(-torch.inf),
        torch.tensor(0.0),
    )
    for start in (0, 2):
        block = slice(start, start + 2)
        output, row_max, row_sum = update(output, row_max, row_sum, scores[block], V[block])
    torch.testing.assert_close(output / row_sum, torch.softmax(scores, 0))
    expected, lse = flashtile.attention(
        torch.ones(1, 1, 1, 1, dtype=torch.float64),
        scores[None, :, None, None],
        V[None, :, None],
        softmax_scale=1.0,
        return_lse=True,
    )
    torch.testing.assert_close(output / row_sum, expected[0, 0, 0])
    torch.testing.assert_close(row_max + row_sum.log(), lse[0, 0, 0])


@pytest.mark.filterwarnings("ignore:.*sdp_kernel:FutureWarning")
def test_scaled_dot_product_attention(capsys):
    door = flashtile.sdpa(fallback=False)
    door.enable()  # the one line
    try:
        left = run(article_blocks.SDPA)
    finally:
        door.disable()
    assert capsys.readouterr().out == f"torch.Size([1, 8, {SEQLEN}, 64])\n"
    assert door.served == 1
    q, k, v, output = (left[name].transpose(1, 2) for name in ("q", "k", "v", "output"))
    torch.testing.assert_close(output[:, -32:], last_rows(q, k, v, causal=False), atol=1e-5, rtol=1e-5)


def test_flash_attn_functions(installed, capsys):
    left = run(article_blocks.FLASH_ATTN, torch=torch)
    assert capsys.readouterr().out == f"torch.Size([1, {SEQLEN}, 8, 64])\n"
    assert inspect.unwrap(left["flash_attn_func"]) is flashtile.flash_attn_func
    q, k, v, output = (left[name] for name in ("q", "k", "v", "output"))
    expected = last_rows(q, k, v, causal=True)
    torch.testing.assert_close(output[:, -32:].float(), expected, atol=2e-3, rtol=2e-3)

    again = run(article_blocks.BEST_PRACTICE, **{**left, "q": q.float()})
    torch.testing.assert_close(again["output"], output)


def test_a_matrix_for_a_mask_is_answered(installed):
    """FlashAttention has no such argument. Whatever flashtile makes of it is no other mask than was given."""
    left = run(article_blocks.FLASH_ATTN, torch=torch)
    causal_mask = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool, device=DEVICE).tril()
    refused = ""
    try:
        masked = run(article_blocks.MASK_MATRIX, **left, causal_mask=causal_mask)["output"]
    except TypeError as error:
        masked, refused = None, str(error)
    if masked is None:
        assert "'attn_mask'" in refused
        assert "causal" in refused
    else:
        torch.testing.assert_close(masked, left["output"])


def test_variable_lengths(installed):
    """The article imports the function and stops: two sequences of 3 and 5 tokens, packed."""
    attend = run(article_blocks.VARLEN)["flash_attn_varlen_func"]
    q, k, v = torch.randn(3, 8, 2, 16, device=DEVICE, dtype=torch.float16).unbind()
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
    out = attend(q, k, v, cu_seqlens, cu_seqlens, 5, 5, causal=True)
    for part in (slice(0, 3), slice(3, 8)):
        expected, _ = reference.attention(*(t[None, part].float() for t in (q, k, v)), causal=True)
        torch.testing.assert_close(out[part].float(), expected[0], atol=2e-3, rtol=2e-3)


@pytest.fixture
def llama_folder(tmp_path, monkeypatch):
    """A small random Llama in a folder by the name that the article downloads."""
    transformers = pytest.importorskip("transformers", minversion="5.17")
    monkeypatch.chdir(tmp_path)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **sizes)
    transformers.LlamaForCausalLM(config).half().save_pretrained("meta-llama/Llama-2-7b-hf")
    yield tmp_path / "meta-llama" / "Llama-2-7b-hf"
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def registered(monkeypatch):
    """The one line; the sizes of what flashtile is asked are kept."""
    from flashtile.integrations import transformers as door
    from flashtile.integrations import transformers_attention as layers

    calls: list[torch.Size] = []
    attention = layers.attention

    def counted(q, *others, **named):
        calls.append(q.shape)
        return attention(q, *others, **named)

    monkeypatch.setattr(layers, "attention", counted)
    door.register(as_flash_attention=True)
    yield calls
    door.unregister()


def test_transformers_by_its_literal_names(llama_folder, registered, capsys):
    pytest.importorskip("accelerate")  # device_map needs it
    model = run(article_blocks.TRANSFORMERS, torch=torch)["model"]
    assert capsys.readouterr().out == "flash_attention_2\n"
    tokens = torch.tensor([[1, 5, 9, 2, 7]], device=model.device)
    logits = model(tokens).logits
    assert registered == [(1, 5, 4, 8)] * 2
    model.set_attn_implementation("eager")
    torch.testing.assert_close(logits, model(tokens).logits, atol=2e-3, rtol=2e-2)
    assert len(registered) == 2


def test_transformers_by_config_json(llama_folder, registered):
    """The article's second way, and the name that is left where flashtile is not registered."""
    import transformers

    config = json.loads((llama_folder / "config.json").read_text())
    (llama_folder / "config.json").write_text(
        json.dumps({**config, "attn_implementation": "flash_attention_2"})
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(llama_folder)
    assert model.config._attn_implementation == "flash_attention_2"
    model(torch.tensor([[1, 5, 9]]))
    assert len(registered) == 2
