"""What a known model holds while it reads a prompt, and what fits a card, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from flashtile.hardware.cards import Card
from flashtile.io_model.estimate import FLASH1, FLASH2, STANDARD, estimates
from flashtile.io_model.models import Model, PromptMemory, longest_prompt, prompt_memory
from flashtile.io_model.tables import format_bytes, format_tokens, new_table, why_flash1_is_slower

COPIED_TOTALS: dict[str, tuple[int | None, int]] = {
    "LLaMA-7B": (14, 10),
    "Llama-2-7B": (14, 10),
    "LLaMA-13B": (26, 18),
    "Llama-2-13B": (26, 18),
    "Llama-2-70B": (None, 48),
}
"""10^9 bytes at batch 1 with standard and with flash attention, as a table has them that articles copy."""


def model_table(model: Model, lengths: Sequence[int], batch: int, dtype: str, card: Card) -> Table:
    """What a model holds while it reads prompts of each length, whether that fits ``card``, and how much
    faster attention's floor is."""
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
        "flash. Attention is one layer's, for layers follow one another.",
        "floors are the model's, without L2 for either: no measurements (`flashtile bench` measures).",
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
    """Why the often copied table of models' memory cannot come from attention alone."""
    standard, flash = COPIED_TOTALS[model.name]
    weights = model.weight_bytes(dtype) * 1e-9
    copied = f"{flash} GB with flash attention" + ("" if standard is None else f", {standard} with standard")
    said = f"a table often copied gives {model.name} {copied}"
    if weights <= flash:
        return f"{said}; the weights in {dtype} are {weights:.1f} GB of it"
    said += (
        f": that cannot come from attention alone, for the weights in {dtype} are {weights:.1f} GB already"
    )
    if standard is None:
        return said
    saved = (standard - flash) * 10**9
    seqlen = round((saved / (2 * model.num_heads_q * model.call(1, 1, dtype).element_bytes)) ** 0.5)
    return f"{said}; S and P of one layer take the difference, {standard - flash} GB, at {seqlen:,} tokens"
