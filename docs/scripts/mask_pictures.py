"""Draws docs/assets/masks/*.svg: the ready masks and modifications of scores, by the functions that run.

    python docs/scripts/mask_pictures.py

Each picture is 64 queries by 64 keys, with the blocks of 16 by 16 that a block mask makes of
them: empty ones are not computed, full ones take no mask. A test holds the files to the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from flashtile import masks

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "assets" / "masks"
TOKENS, BLOCK, CELL = 64, 16, 3
INK, SEEN, FULL, PARTIAL = "#7d858f", "#e8590c", "#4c8fd6", "#9a78d0"
DOCUMENTS = torch.tensor([0] * 18 + [1] * 28 + [2] * 18)

FIRST = masks.mask_mod(lambda batch, head, q_idx, kv_idx: kv_idx < 4)

MASKS: dict[str, Callable[[], masks.MaskMod]] = {
    "causal": masks.causal,
    "window": lambda: masks.window(11, 4),
    "prefix_lm": lambda: masks.prefix_lm(20),
    "document": lambda: masks.document(DOCUMENTS) & masks.causal(),
    "padding": lambda: masks.padding(torch.tensor([41])),
    "dilated": lambda: masks.dilated(5, 3),
    "natten": lambda: masks.natten(8, 8, 5),
    "joined": lambda: (masks.window(9, 0) | FIRST) & masks.causal(),
}
SCORES: dict[str, Callable[[], masks.ScoreMod]] = {
    "alibi": lambda: masks.alibi(torch.tensor([0.04])),
    "relative_position": lambda: masks.relative_position(torch.cos(torch.arange(-24.0, 25.0) / 4)[None]),
    "softcap": lambda: masks.softcap(1.0),
}
"""Modifications of scores; the soft-cap's are of scores from -3 to 3."""


def grids() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    zero, positions = torch.tensor(0), torch.arange(TOKENS)
    return zero, zero, positions[:, None], positions


def area(cells: Tensor, fill: str, opacity: float, size: int = 1) -> str:
    """The True cells, each ``size`` tokens wide, as one path of runs."""
    runs = []
    for row, flags in enumerate(cells.tolist()):
        column = 0
        while column < len(flags):
            end = column
            while end < len(flags) and flags[end]:
                end += 1
            if end > column:
                width, side = (end - column) * size * CELL, size * CELL
                runs.append(f"M{column * side} {row * side}h{width}v{side}h-{width}z")
            column = end + 1
    return f'<path d="{"".join(runs)}" fill="{fill}" fill-opacity="{opacity:.2f}"/>'


def of_mask(mask: masks.MaskMod) -> Iterator[str]:
    blocks = masks.create_block_mask(mask, None, None, TOKENS, TOKENS, BLOCK_SIZE=BLOCK)
    yield area(listed_blocks(blocks.kv_num_blocks, blocks.kv_indices), PARTIAL, 0.3, BLOCK)
    yield area(torch.as_tensor(mask(*grids())).expand(TOKENS, TOKENS), SEEN, 0.85)
    yield area(listed_blocks(blocks.full_kv_num_blocks, blocks.full_kv_indices), FULL, 1.0, BLOCK)


def listed_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    there = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        there[row, indices[0, 0, row, :count].long()] = True
    return there


def of_scores(modify: masks.ScoreMod) -> Iterator[str]:
    """Where the modified score is higher the cell is darker, in eight steps."""
    plain = torch.zeros(TOKENS, TOKENS)
    if modify.name == "softcap":
        plain = plain + torch.linspace(-3, 3, TOKENS)
    scores = modify(plain, *grids())
    steps = (8 * (scores - scores.min()) / (scores.max() - scores.min())).long().clamp(max=7)
    for step in range(8):
        yield area(steps == step, SEEN, 0.1 + 0.8 * step / 7)


def picture(cells: Iterator[str], words: str) -> str:
    side = TOKENS * CELL
    frame = f'<rect x="0.5" y="0.5" width="{side - 1}" height="{side - 1}" fill="none" stroke="{INK}"/>'
    lines = (
        f'<path d="M{i * CELL} 0V{side}M0 {i * CELL}H{side}" stroke="{INK}" stroke-width="0.5"/>'
        for i in range(BLOCK, TOKENS, BLOCK)
    )
    parts = "\n".join([*cells, *lines, frame])
    label = f'role="img" aria-label="{words}"'
    size = f'width="{side}" height="{side}" viewBox="0 0 {side} {side}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {label}>\n{parts}\n</svg>\n'


def pictures() -> dict[str, str]:
    """Every file's text, by its name."""
    drawn = {
        f"{name}.svg": picture(of_mask(make()), f"{name}: queries downwards, keys to the right")
        for name, make in MASKS.items()
    }
    for name, make in SCORES.items():
        drawn[f"{name}.svg"] = picture(of_scores(make()), f"{name}: what becomes of scores")
    return drawn


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
