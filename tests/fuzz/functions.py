"""Family of score and mask functions, drawn from a grammar or ready-made, with block masks, in both passes."""

from __future__ import annotations

import re
from random import Random

from fuzz.attention import BODY, dtype_for, in_surroundings, masking, qkv, sizes_for, spelled
from fuzz.runner import Call

INTS = ("i", "j", "h", "b", "(i - j)", "(j - i)", "(i + j)", "(i * 3)")


def integer(rng: Random, depth: int = 2) -> str:
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(INTS)
    a, n = integer(rng, depth - 1), rng.choice([1, 2, 3, 7, 16, 50000])
    return rng.choice(
        [f"({a} + {n})", f"({a} - {n})", f"({a} // {min(n, 16)})", f"({a} % {min(n, 16)})", f"({a}).abs()",
         f"torch.where({condition(rng, 0)}, {a}, {n})", f"({a}).clamp(-{n}, {n})", f"torch.maximum({a}, j)"]
    )  # fmt: skip


def real(rng: Random, depth: int = 2) -> str:
    """Draw an expression of a real number of moderate size, so scores stay in range."""
    n = integer(rng)
    makes_float = [
        f"({n}) * 1.0",
        f"1.0 * ({n})",
        f"({n}) + 0.0",
        f"({n}).float()",
        f"({n}) / 2",
        f"0.5 * ({n})",
    ]
    x = f"({rng.choice(makes_float)})"
    if rng.random() < 0.25:  # a square that does not fit an int32
        return f"({x} * {x} * 1e-9)"
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(
            [f"({x} * 1e-3).sin()", f"torch.tanh({x})", f"({x} * 0.01).cos()", f"{x}.sigmoid()"]
        )
    a, c = real(rng, depth - 1), condition(rng)
    return rng.choice(
        [f"({a} + 0.25)", f"(-{a})", f"torch.where({c}, {a}, 0.5)", f"({a} * 0.7)", f"(({c}) * {a})"]
    )


def condition(rng: Random, depth: int = 2) -> str:
    if depth == 0:
        return rng.choice(["(j <= i)", "(i != j)", "(j % 2 == 0)", "(h == 0)", "(i - j < 5)"])
    a, c = condition(rng, depth - 1), condition(rng, 0)
    x, y = integer(rng, 1), integer(rng, 1)
    return rng.choice(
        [f"({a} & {c})", f"({a} | {c})", f"(~{a})", f"({a} ^ {c})", f"({x} <= {y})", f"({x} > {y})", f"({x} == {y})",
         f"(({x}) * 1.0 < 3.5)"]
    )  # fmt: skip


def mask_mod(rng: Random, tensors: dict[str, str], depth: int = 1) -> str:
    """Draw an expression of a mask function: from the grammar, ready-made, or several combined.

    It can stand beside "&": a score function that divides by 0 for other scores has its own mask joined to it.
    """
    if depth and rng.random() < 0.35:
        a, b = mask_mod(rng, tensors, depth - 1), mask_mod(rng, tensors, depth - 1)
        pair = f"masks.mask_mod({a}), masks.mask_mod({b})"
        joined = [f"flex.{name}({pair})" for name in ("and_masks", "or_masks")]
        return rng.choice(
            [" & ".join(pair.split(", masks.", 1)).replace("& mask_mod", "& masks.mask_mod"), *joined]
        )
    tensors["_ids"] = "torch.arange(seqlen_q + seqlen_k + 99, device=device) // 5"
    tensors["_lengths"] = "torch.arange(1, batch + 1, device=device) * 3"
    tensors["_pictures"] = "torch.where(_ids % 3 > 0, _ids, -1 - torch.arange(len(_ids), device=device))"
    n = rng.randint(0, 9)
    ready = [
        f"masks.causal({rng.choice(['', 'seqlen_k - seqlen_q'])})", f"masks.window({n - 1}, {rng.randint(-1, 9)}, offset={n})",
        f"masks.prefix_lm({n})", "masks.prefix_lm(_lengths)", "masks.document(_ids)", "masks.padding(_lengths)",
        "(masks.causal() | masks.document(_pictures))",
        f"masks.dilated({rng.randint(0, 4)}, {rng.randint(1, 4)})", "masks.natten(9 + max(seqlen_q, seqlen_k) // 7, 7, 3)", "masks.natten(9 + max(seqlen_q, seqlen_k) // 7, 9, (3, 5))",
    ]  # fmt: skip
    if rng.random() < 0.4:
        found = rng.choice(ready)
        return f"~{found}" if rng.random() < 0.2 else found
    captured = ["", "", " & (_ids[i] == _ids[j])", " | (j < _lengths[b])"]
    return f"masks.mask_mod(lambda b, h, i, j: {condition(rng)}{rng.choice(captured)})"


def score_mod(rng: Random, tensors: dict[str, str]) -> tuple[str, str]:
    """Draw a score_mod with captured tensors, which get gradients: return (score_mod, mask that it needs)."""
    heads = "heads, dtype=torch.promote_types(dtype, torch.float32), device=device"
    tensors["w"] = f"rand({heads}, seed=31)"
    tensors["table"] = (
        "rand(heads, 9, dtype=torch.promote_types(dtype, torch.float32), device=device, seed=32)"
    )
    tensors["power"] = f"rand({heads}, seed=33).abs() + 0.5"
    ready = ["masks.alibi(w)", "masks.relative_position(table)", f"masks.softcap({rng.choice([0.5, 3.0])})"]
    score = "masks.score_mod(lambda s, b, h, i, j: {})".format
    written = [
        f"s + {real(rng)}", f"s * {real(rng)}", f"torch.where({condition(rng)}, s, s * 0.5 - 1.0)", "s + w[h]", "0.0 + 1.0 * (i - j)", "1.0 * j",
        "s * w[h].sigmoid() + table[h, (i + j) % 9]", f"s - w[h] * {real(rng)}", real(rng), "(s * 0.5).tanh() * 2.0",
        "s + (((i - j) % 4) * 0.5) ** power[h]", "s + (i // (j + 1) * 1.0) ** power[h]",
    ]  # fmt: skip
    only_where = [
        ("s / (i - j).abs()", "lambda b, h, i, j: i != j"), ("s - torch.log((i - j + 1) * 1.0)", "masks.causal()"),
        ("s + w[h] / (i - j)", "lambda b, h, i, j: i > j"), ("s * ((i - j) * 1.0).sqrt()", "lambda b, h, i, j: j < i"),
    ]  # fmt: skip
    if rng.random() < 0.2:
        text, needs = rng.choice(only_where)
        return score(text), f"masks.mask_mod({needs})"
    return (rng.choice(ready) if rng.random() < 0.2 else score(rng.choice(written))), ""


def block_mask(rng: Random, mask: str, empty: bool, lengths: str = "seqlen_q, seqlen_k") -> str:
    """Draw the text that makes a block mask. FlexAttention's own function cannot make one that is ``empty``."""
    sizes = rng.choice(["", ", BLOCK_SIZE=32", ", BLOCK_SIZE=(16, 64)"])
    read = re.sub(r"lambda b, h, i, j:", "", mask)  # without b and h, the block mask has one mask for all
    of_batch = "batch" if re.search(r"\bb\b|_lengths", read) else rng.choice(["None", "batch"])
    of_heads = "group * heads_kv" if re.search(r"\bh\b", read) else rng.choice(["None", "group * heads_kv"])
    sides = f"{of_batch}, {of_heads}"
    make = "masks.create_block_mask" if empty or rng.random() < 0.5 else "flex.create_block_mask"
    return f"{make}({mask}, {sides}, {lengths}, device=device{sizes})"


def draw(rng: Random, device: str = "cpu") -> Call:
    sizes = sizes_for(rng, 200 if rng.random() < 0.2 else 50)
    fixed = {"dtype": dtype_for(rng, device), "device": repr(device)}
    tensors = qkv(rng, False, rng.randrange(1000))
    form = rng.choice(["mods"] * 5 + ["flex", "flex", "other lengths"])
    options = masking(rng) if form == "mods" else []
    empty = 0 in sizes.values()
    scores, needed = score_mod(rng, tensors) if rng.random() < 0.7 else ("", "")
    mask = needed or mask_mod(rng, tensors)
    if needed and rng.random() < 0.3:
        mask = f"({needed} & {mask_mod(rng, tensors)})" if "flex." not in mask else needed
    if fixed["dtype"] == "torch.float64":  # float() is float32, in the oracle as well
        scores, mask = scores.replace(".float()", " * 1.0"), mask.replace(".float()", " * 1.0")
    if scores:
        options.append(f"score_mod={scores}")
    blocks = rng.random() < 0.4 or form != "mods"
    if needed or rng.random() < 0.6 or not scores:
        options.append(f"block_mask={block_mask(rng, mask, empty)}" if blocks else f"mask_mod={mask}")
    if form == "mods" and rng.random() < 0.15:
        tensors["alibi_slopes"] = "rand(heads, device=device, seed=21).abs()"
        options.append("alibi_slopes=alibi_slopes")
    if form == "mods" and rng.random() < 0.15:
        tensors["sink"] = "rand(heads, dtype=dtype, device=device, seed=22)"
        options.append("sink=sink")
    if form == "other lengths":  # FlexAttention refuses them by name
        made = block_mask(
            rng, mask, empty, f"seqlen_q + {rng.randint(1, 40)}, seqlen_k + {rng.choice([0, 1, 40])}"
        )
        body = f"made = {made}\nrefuses(lambda: flashtile.attention(q, k, v, block_mask=made), 'block_mask')"
        return Call(body, sizes, spelled(tensors), (), fixed)
    if form == "flex":
        tensors = {
            name: text.replace("batch, seqlen_q, heads", "batch, heads, seqlen_q").replace(
                "batch, seqlen_k, heads_kv", "batch, heads_kv, seqlen_k"
            )
            for name, text in tensors.items()
        }
        body = """def exact(q, k, v, enable_gqa, **options):
    out, lse = oracle.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return out.transpose(1, 2), lse
def call(attend, NAMES):
    return attend(q, k, v, OPTIONS, enable_gqa=True, return_lse=True)
agree(call, OURS, exact, GIVEN)""".replace("OURS", in_surroundings(rng, "flashtile.flex_attention"))
        return Call(body, sizes, spelled(tensors), tuple(options), fixed)
    body = BODY.format(
        names="NAMES",
        positional="q, k, v",
        ours=in_surroundings(rng, "flashtile.attention"),
        exact="oracle.attention",
        last="return_lse=True",
    )
    return Call(body, sizes, spelled(tensors), tuple(options), fixed)
