"""The numbers of the I/O model as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from flashtile.hardware.calls import Call
from flashtile.hardware.cards import CARDS, GIB, KIB, Card
from flashtile.learn.io_model.estimate import FLASH1, FLASH2, STANDARD, Estimate, estimates
from flashtile.learn.io_model.memory import (
    SEQLENS,
    PromptMemory,
    at_length,
    attention_memory,
    cached_tokens,
    longest_prompt,
    longest_sequence,
    prompt_memory,
)
from flashtile.learn.io_model.models import MODELS, Model


def card_table(card: Card, dtype: str) -> Table:
    """Return a table of the card's memory sizes and speeds, which determine the lower bounds of times."""
    table = new_table(card.name, ("", "size", "speed"))
    table.add_row("memory", format_bytes(card.memory_bytes), f"{card.bandwidth_gbps:.0f} GB/s")
    if card.l2_bytes:
        table.add_row("L2", format_bytes(card.l2_bytes), "")
    if card.l1_bytes:
        table.add_row("L1 and SRAM", f"{card.sm_count} x {format_bytes(card.l1_bytes)}", "")
    if card.shared_bytes:
        speed = f"{card.sram_gbps * 1e-3:.1f} TB/s" if card.sram_gbps else ""
        table.add_row("SRAM", f"{card.sm_count} x {format_bytes(card.shared_bytes)}", speed)
    if card.register_bytes:
        table.add_row("registers", f"{card.sm_count} x {format_bytes(card.register_bytes)}", "")
    table.add_row(dtype, "", f"{format_count(card.peak_tflops(dtype) * 1e12)}FLOP/s")
    table.caption = f"from {card.ridge(dtype):.0f} FLOPs a byte on, arithmetic is the limit"
    if card.l1_bytes:
        table.caption += "\n" + why_not_all_shared(card)
    return table


def why_not_all_shared(card: Card) -> str:
    """Explain why a tile cannot use all of an SM's L1 memory.

    Source: CUDA C++ Programming Guide, chapter on compute capabilities.
    """
    whole, most = (size // KIB for size in (card.l1_bytes, card.shared_bytes))
    said = (
        f"an SM's {whole} KiB serve as L1 cache and shared memory: shared memory may take {most} of them, "
        f"the other {whole - most} always cache"
    )
    block = f"; of the {most} a block may have {most - 1}, because CUDA reserves 1"
    return said + (block if card.capability >= (8, 0) else "")


def estimate_table(found: Sequence[Estimate], card: Card) -> Table:
    """Return a table with one row per algorithm. All times are floors (lower bounds)."""
    headings = ("HBM", "FLOPs", "FLOPs/B", "arithmetic", "HBM time", "L2 time", "bound by", "floor", "memory")
    table = new_table(f"{found[0].which} on {card.name}", ("algorithm", *headings, "programs"))
    for row in found:
        table.add_row(
            row.algorithm,
            format_bytes(row.bytes),
            format_count(row.flops),
            f"{row.intensity:.0f}",
            format_seconds(row.compute_seconds),
            format_seconds(row.memory_seconds),
            format_seconds(row.l2_seconds),
            row.bound,
            format_seconds(row.floor_seconds),
            format_bytes(row.peak_bytes),
            str(row.programs) if row.programs else "",
        )
    table.caption = (
        "Bytes of flashtile and of the least possible are those that miss L2. Those of the papers' "
        "algorithms are counted as in the papers, without L2."
    )
    slow = why_flash1_is_slower(found)
    if slow:
        table.caption += "\n" + slow
    return table


def why_flash1_is_slower(found: Sequence[Estimate]) -> str | None:
    """Explain why the lower bound of FlashAttention 1 is above standard attention's. None if it is not."""
    rows = {row.algorithm: row for row in found}
    first, standard = rows.get(FLASH1), rows.get(STANDARD)
    if first is None or standard is None or first.floor_seconds <= standard.floor_seconds:
        return None
    if first.bytes > standard.bytes and first.bound == "HBM":
        return (
            f"{FLASH1} is above standard here: it moves {format_bytes(first.bytes)}, as it reads and "
            "writes the output again for every block of keys"
        )
    return (
        f"{FLASH1} is above standard here: it has one program for each head of each sequence, and its "
        f"{first.programs} use {first.busy} of {first.card.sm_count} SMs"
    )


def memory_table(call: Call, card: Card, training: bool) -> Table:
    """Return a table of the memory of standard and flash attention, with one row per sequence length.

    The caption gives the lengths at which the card is full.
    """
    what = "training" if training else "inference"
    title = f"memory of one layer's attention, {what}: batch {call.batch}, {call.num_heads_q} heads"
    table = new_table(
        f"{title}, {call.dtype}", ("tokens", "q, k, v, out", "standard, further", "flash, further")
    )
    for seqlen in SEQLENS:
        row = attention_memory(at_length(call, seqlen), training)
        full = row.tensors + row.standard > card.memory_bytes
        table.add_row(
            format_tokens(seqlen),
            format_bytes(row.tensors),
            format_bytes(row.standard) + (" (does not fit)" if full else ""),
            format_bytes(row.flash),
        )
    longest = [longest_sequence(call, card, standard=side, training=training) for side in (True, False)]
    table.caption = (
        f"{card.name} is full at {longest[0]:,} tokens with standard attention, at {longest[1]:,} with flash"
    )
    return table


def kv_cache_table(dtype: str) -> Table:
    """Return a table of known models: bytes of their KV caches, and tokens that fit on known cards."""
    cards = [CARDS[name] for name in ("rtx4090", "l40s", "a100", "h200")]
    headings = ("weights", "a token", "longest sequence", *(f"tokens, {card.name}" for card in cards))
    table = new_table(f"key/value caches, {dtype}", ("model", *headings))
    for model in MODELS:
        token = model.kv_bytes_per_token(dtype)
        table.add_row(
            model.name,
            format_bytes(model.weight_bytes(dtype)),
            format_bytes(token),
            f"{format_bytes(token * model.longest)} ({format_tokens(model.longest)})",
            *(f"{cached_tokens(model, card, dtype):,}" for card in cards),
        )
    return table


def format_bytes(size: float) -> str:
    """Format ``size`` with three digits and a binary unit."""
    return _scaled(size, ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"))) or f"{size:.0f} B"


def format_count(count: float) -> str:
    """Format ``count`` with three digits and a decimal prefix."""
    return _scaled(count, ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))) or f"{count:.0f} "


def format_seconds(seconds: float) -> str:
    """Format ``seconds`` with three digits and a unit; an empty string for 0."""
    scaled = _scaled(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))
    return scaled or (f"{seconds * 1e9:.0f} ns" if seconds else "")


def format_number(value: float) -> str:
    """Format ``value`` with three digits, or all digits before the point if there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_tokens(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str | None:
    """Format ``value`` with three digits in the largest unit that is not larger than ``value``.

    Returns None if every unit is larger than ``value``. ``units`` are in descending order.
    """
    for unit, name in units:
        if value >= unit:
            number = value / unit
            return f"{number:.0f} {name}" if number >= 100 else f"{number:.3g} {name}"
    return None


def new_table(title: str, headings: Sequence[str]) -> Table:
    """Return an empty table with the first column aligned left and the others right."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


COPIED_TOTALS: dict[str, tuple[int | None, int]] = {
    "LLaMA-7B": (14, 10),
    "Llama-2-7B": (14, 10),
    "LLaMA-13B": (26, 18),
    "Llama-2-13B": (26, 18),
    "Llama-2-70B": (None, 48),
}
"""Memory of models in 10^9 bytes at batch 1, (with standard attention, with flash attention). The numbers are
from a table that articles often copy."""


def model_table(model: Model, lengths: Sequence[int], batch: int, dtype: str, card: Card) -> Table:
    """Return a table of a model's memory while it reads prompts, with one row per prompt length.

    Other columns say whether the memory fits ``card``, and give the time floor (lower bound) of standard
    attention divided by that of FlashAttention.
    """
    headings = (
        "weights", "cache", "q, out", "attention,\nstandard", "attention,\nflash", "total,\nstandard",
        "total,\nflash", f"fits {card.name}", "floor, standard /\nFlashAttention 1",
        "floor, standard /\nFlashAttention 2",
    )  # fmt: skip
    prompts = "a prompt" if batch == 1 else f"{batch} prompts at once"
    table = new_table(f"{model.name} reads {prompts}, {dtype}", ("tokens", *headings))
    reasons = []
    for seqlen in lengths:
        memory = prompt_memory(model, batch, seqlen, dtype)
        found = estimates(model.call(batch, seqlen, dtype), card)
        floors = {row.algorithm: row.floor_seconds for row in found}
        sizes = (
            memory.weights, memory.cache, memory.rows, memory.standard, memory.flash, memory.total_standard,
            memory.total_flash,
        )  # fmt: skip
        speed_ups = (f"{floors[STANDARD] / floors[name]:.2f}" for name in (FLASH1, FLASH2))
        table.add_row(format_tokens(seqlen), *map(format_bytes, sizes), _fits(memory, card), *speed_ups)
        reasons.append(why_flash1_is_slower(found))
    longest = [longest_prompt(model, batch, card, dtype, standard=side) for side in (True, False)]
    notes = [
        f"{card.name} takes prompts of {longest[0]:,} tokens with standard attention, of {longest[1]:,} with "
        "flash. Attention is that of one layer, because layers run one after the other.",
        "Floors are estimates without L2 for both algorithms, not measurements.",
    ]
    if reasons[0] is not None:
        notes.append(reasons[0])
    if model.name in COPIED_TOTALS:
        notes.append(about_copied_totals(model, dtype))
    table.caption = "\n".join(notes)
    return table


def _fits(memory: PromptMemory, card: Card) -> str:
    if memory.total_standard <= card.memory_bytes:
        return "both"
    return "flash" if memory.total_flash <= card.memory_bytes else "neither"


def about_copied_totals(model: Model, dtype: str) -> str:
    """Compare a model's entry in ``COPIED_TOTALS`` with the size of its weights and scores."""
    standard, flash = COPIED_TOTALS[model.name]
    weights = model.weight_bytes(dtype) * 1e-9
    copied = f"{flash} GB with flash attention" + ("" if standard is None else f", {standard} with standard")
    said = f"a table often copied gives {model.name} {copied}"
    if weights <= flash:
        return f"{said}; the weights in {dtype} are {weights:.1f} GB of it"
    said += f": that cannot come from attention alone, as the weights in {dtype} are {weights:.1f} GB already"
    if standard is None:
        return said
    saved = (standard - flash) * 10**9
    seqlen = round((saved / (2 * model.num_heads_q * model.call(1, 1, dtype).element_bytes)) ** 0.5)
    return f"{said}; S and P of one layer take the difference, {standard - flash} GB, at {seqlen:,} tokens"
