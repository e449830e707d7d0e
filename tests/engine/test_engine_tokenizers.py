"""Kinds of tokenizers: tokens, texts, streams and bytes are those of Transformers and of the whole text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashtile.engine.tokenizer import BYTE_OF, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
CORPUS = ["the quick brown fox jumps over the lazy dog and it's away from it all day, don't you see?"] * 4
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = ["the quick fox, it's a dog. don't", "naïve ☃ and 🦊 run", "it's  two\n\n spaces ", "i'm ' you' ve"]


def unigram(fallback: bool) -> Any:
    """As T5's; with ``fallback`` as Gemma's and Llama 2's, but by likelihood."""
    loaded = tokenizers.Tokenizer(tokenizers.models.Unigram())
    loaded.normalizer = tokenizers.normalizers.NFKC()
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    loaded.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>")
    loaded.train_from_iterator(CORPUS, trainer)
    if not fallback:
        return loaded
    content = json.loads(loaded.to_str())
    content["model"]["vocab"] += [[text, -20.0] for text in BYTES]
    content["model"]["byte_fallback"] = True
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }  # fmt: skip
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def wordpiece() -> Any:
    """As BERT's."""
    loaded = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    loaded.normalizer = tokenizers.normalizers.BertNormalizer()
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    loaded.decoder = tokenizers.decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=90, special_tokens=special)
    loaded.train_from_iterator(CORPUS, trainer)
    return loaded


def byte_level() -> Any:
    """As GPT-2's, Llama 3's and Qwen's."""
    loaded = tokenizers.Tokenizer(tokenizers.models.BPE())
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    loaded.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end of text|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    loaded.train_from_iterator(CORPUS, trainer)
    return loaded


KINDS = {
    "unigram": lambda: unigram(False), "unigram with bytes": lambda: unigram(True), "wordpiece": wordpiece,
    "byte level": byte_level,
}  # fmt: skip


def test_characters_of_bytes_are_gpt_2s() -> None:
    assert sorted(BYTE_OF.values()) == list(range(256))
    for characters, expected in (
        ("!~", b"!~"), ("\u0120\u010a", b" \n"), ("\u0100\u0121\u0142\u0143", b"\x00\x7f\xa0\xad"),
        ("\u00a1\u00ac\u00ae\u00ff", b"\xa1\xac\xae\xff"),
    ):  # fmt: skip
        assert bytes(map(BYTE_OF.__getitem__, characters)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_texts_streams_and_bytes(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "tokenizer.json"
    KINDS[kind]().save(str(file))
    ours, theirs = load_tokenizer(tmp_path), transformers.PreTrainedTokenizerFast(tokenizer_file=str(file))
    before = ours.encode("the quick")
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text)
        assert ours.decode(tokens, skip_special_tokens=False) == theirs.decode(tokens)
        stream = ours.stream(before, skip_special_tokens=False)
        streamed = "".join(map(stream.step, tokens)) + stream.flush()
        first, whole = (ours.decode(part, skip_special_tokens=False) for part in (before, before + tokens))
        assert first + streamed == whole
        assert first.encode() + b"".join(map(ours.token_bytes, tokens)) == whole.encode()
        if kind in ("unigram with bytes", "byte level"):
            assert streamed.strip() == text.strip()
    unknown = ours.vocab_size + 5
    assert (ours.token_bytes(unknown), ours.spell(unknown)) == (b"", "")


def test_every_byte_is_spelt_otherwise(tmp_path: Path) -> None:
    """By the tokens that are parts of characters; the others are text."""
    loaded = byte_level()
    loaded.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    singles = [token for token in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token)) == 1]
    spelt = {tokenizer.spell(token) for token in singles}
    assert len(singles) == len(spelt) == 256
    assert {"a", "\n", "bytes:\\xe2", "bytes:\\xff"} < spelt
    assert tokenizer.spell(loaded.token_to_id("<|end of text|>")) == "<|end of text|>"


def test_a_panic_of_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    """Its Rust code panics where a regular expression gives up, with a BaseException that nobody expects."""
    loaded = byte_level()
    expression = tokenizers.Regex("(a+)+$")
    loaded.pre_tokenizer = tokenizers.pre_tokenizers.Split(expression, "isolated")
    loaded.normalizer = tokenizers.normalizers.Replace(expression, "b")
    loaded.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="prompt must be a text that the tokenizer can encode: "):
        load_tokenizer(tmp_path).encode("a" * 40 + "b")


def test_added_tokens_without_an_embedding_are_left_out(tmp_path: Path) -> None:
    """Gemma 3's text models lack a row for the token that stands for images."""
    loaded = byte_level()
    size = loaded.get_vocab_size()
    loaded.add_special_tokens(["<image>"])
    loaded.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<image>"}))
    whole, cut = load_tokenizer(tmp_path), load_tokenizer(tmp_path, size)
    assert (whole.vocab_size, whole.encode("<image>"), whole.eos_token_ids) == (size + 1, [size], (size,))
    assert (cut.vocab_size, cut.decode(cut.encode("<image>")), cut.eos_token_ids) == (size, "<image>", ())
    assert cut.encode("the fox") == whole.encode("the fox")
