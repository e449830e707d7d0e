"""``flashtile explain``: the kernels that a call gets and why, in three lines, and its cost on a card."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flashtile.hardware.cards import CARDS, Card, card_of_device, find_card
from flashtile.tools.commands.options import MODEL_NAMES, Device, bad_parameters, console, parse_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flashtile.hardware.calls import Call

HERE = "here"
MOST, MAX_TOKENS, MAX_COSTED_TOKENS = 2**16, 2**31 - 1, 2**22
"""Upper bounds of options.

``MOST`` is for numbers of sequences, heads and head sizes. ``MAX_TOKENS`` is for tokens per sequence, and
``MAX_COSTED_TOKENS`` for tokens per sequence if costs are shown.
"""
MEASURED = (9, 0)
"""Compute capability of the cards on which flashtile has been measured."""
MODEL_SEQLENS = (2048, 8192, 32768, 131072)
OF_MODEL = ("model_name", "seqlens", "batch", "dtype", "card_name", "device")
"""Options that can be combined with ``--model``."""


def explain(
    context: typer.Context,
    batch: Annotated[int, typer.Option(min=0, max=MOST, help="Number of sequences.")] = 1,
    seqlen_q: Annotated[int, typer.Option(min=0, max=MAX_TOKENS, help="Queries of a sequence.")] = 1024,
    seqlen_k: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_TOKENS, help="Keys of a sequence. Default: as many as queries."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=MOST, help="Number of query heads.")] = 16,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Number of key/value heads. Default: --heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, max=MOST, help="Head size of q and k.")] = 128,
    head_dim_v: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Head size of v. Default: --head-dim.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of q. Default: bfloat16, or float32 on the CPU.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Causal mask.")] = False,
    window_left: Annotated[
        int, typer.Option(help="Keys before its own position that a query sees; -1: all.")
    ] = -1,
    window_right: Annotated[
        int, typer.Option(help="Keys after its own position that a query sees; -1: all.")
    ] = -1,
    attention_chunk: Annotated[
        int, typer.Option(help="Positions per chunk, whose queries see only its keys; 0: no chunks.")
    ] = 0,
    softcap: Annotated[float, typer.Option(help="Limit of the scores by tanh; 0: none.")] = 0.0,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi's linear bias.")] = False,
    sink: Annotated[bool, typer.Option("--sink", help="A sink: a learnable score per head.")] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="A batch of packed sequences.")] = False,
    packed: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            help="Lengths of packed sequences, separated by commas, instead of --batch and --seqlen-q. "
            "Adds the floor of this batch, and the products of the tiles that its kernels visit.",
        ),
    ] = None,
    seqused_k: Annotated[
        bool, typer.Option("--seqused-k", help="Each sequence uses some of its keys.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Gradients that are bitwise reproducible.")
    ] = False,
    page_size: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST, help="Keys are in a cache with pages of this many tokens; 0: a dense cache."
        ),
    ] = None,
    cache_dtype: Annotated[
        str | None, typer.Option(help="Dtype of the cache, e.g. float8_e4m3fn. Default: --dtype.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Use only this backend.")] = None,
    device: Device = None,
    card_name: Annotated[
        str | None,
        typer.Option(
            "--card",
            help=f"Show choice and costs on this card: {', '.join(CARDS)}; 'here' measures this machine for "
            "the costs. Default: this machine's GPU, whose costs --verbose shows.",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="Show each operation's configuration, reasons and problem, and the costs."
        ),
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show the memory of such calls by sequence length on the card.")
    ] = False,
    kv_cache: Annotated[
        bool,
        typer.Option(
            "--kv-cache", help="Show sizes of known models' key/value caches, and what fits on cards."
        ),
    ] = False,
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Show the memory of a model that reads --batch prompts of --seqlen tokens on --card: "
            f"{', '.join(MODEL_NAMES)}.",
        ),
    ] = None,
    seqlens: Annotated[
        str | None, typer.Option("--seqlen", help="With --model: lengths of prompts, separated by commas.")
    ] = None,
) -> None:
    """Say which kernels a call would get here or on a named card, why, and which backends were refused.

    This prints three lines. --verbose adds every field, and --card the costs: bytes, FLOPs and time floors.
    Kernels run only with --card here, to measure this machine. The tensors take no memory.
    """
    import torch

    from flashtile.api.decode import flash_attn_with_kvcache
    from flashtile.api.explain import explain
    from flashtile.backends.common.device import capability
    from flashtile.checks.conversions import as_masking
    from flashtile.hardware.calls import Call
    from flashtile.hardware.timing import measured_card
    from flashtile.learn.io_model.tables import kv_cache_table, memory_table
    from flashtile.torch_private import FakeTensorMode

    place = parse_device(device)
    if model_name is not None or seqlens is not None:
        _explain_model(context, place)
        return
    card = _card(card_name, place)
    on_gpu = place.type == "cuda" or card_name not in (None, HERE)
    dtype = _known_dtype(_default_dtype(card, on_gpu) if dtype is None else dtype)
    _check_cache_options(context.params, dtype)
    lengths = () if packed is None else _packed_lengths(context, packed)
    if lengths:
        varlen, batch, seqlen_q, seqlen_k = True, len(lengths), max(lengths), max(lengths)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    kv_heads = heads if kv_heads is None else kv_heads
    costed = verbose or card_name is not None
    if card is not None and (costed or memory):  # before a configuration is chosen, by costs of every block
        _check_costed(max(seqlen_q, seqlen_k), dtype, card)

    def tensor(seqlen: int, number: int, width: int) -> Tensor:
        rows = (sum(lengths) if lengths else batch * seqlen,) if varlen else (batch, seqlen)
        if math.prod((*rows, number, width)) >= 2**63:
            raise typer.BadParameter(f"{batch} x {seqlen} x {number} x {width} elements do not fit a tensor")
        return torch.empty((*rows, number, width), dtype=getattr(torch, dtype), device=place)

    def count(number: int) -> Tensor:
        return torch.empty(number, dtype=torch.int32, device=place)

    def cache(width: int) -> Tensor:
        pages = batch * -(-seqlen_k // page_size) if page_size else batch
        shape = (max(1, pages), page_size or seqlen_k, kv_heads, width)
        return torch.empty(shape, dtype=getattr(torch, cache_dtype or dtype), device=place)

    with bad_parameters(), FakeTensorMode():  # fake tensors take no memory
        q = tensor(seqlen_q, heads, head_dim)
        masking = as_masking(causal, (window_left, window_right), attention_chunk=attention_chunk)
        shared: dict[str, Any] = {
            **masking.arguments(),
            "softcap": softcap,
            "alibi_slopes": torch.empty(heads, device=place) if alibi else None,
            "sink": torch.empty(heads, device=place) if sink else None,
            "backend": backend,
            "card": None if card_name in (None, HERE) else card,
        }
        if page_size is None:
            offsets = count(batch + 1) if varlen else None
            explanation = explain(
                q,
                tensor(seqlen_k, kv_heads, head_dim),
                tensor(seqlen_k, kv_heads, head_dim_v or head_dim),
                cu_seqlens_q=offsets,
                cu_seqlens_k=offsets,
                max_seqlen_q=seqlen_q if varlen else None,
                max_seqlen_k=seqlen_k if varlen else None,
                seqused_k=count(batch) if seqused_k else None,
                deterministic=deterministic,
                **shared,
            )
            call = Call.from_problem(explanation.problem)
            if lengths:
                call = replace(call, lengths=tuple((length, length) for length in lengths))
        else:
            table = count(batch * -(-seqlen_k // page_size)).view(batch, -1) if page_size else None
            explanation = explain(
                flash_attn_with_kvcache, q, cache(head_dim), cache(head_dim_v or head_dim),
                cache_seqlens=count(batch), block_table=table, **shared,
            )  # fmt: skip
            call = Call(
                batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v, dtype,
                page_size=page_size, cache_dtype=cache_dtype, **vars(masking),
            )  # fmt: skip
    typer.echo(explanation.details if verbose else explanation)
    unmeasured = explanation.backend == "portable" and capability(explanation.problem.device) != MEASURED
    if costed and unmeasured:
        typer.echo("for this GPU the portable kernels are only compiled: no run on it has been measured")
    if card_name == HERE:
        card = measured_card(place, (dtype,))
    out = console()
    if card is not None and costed:
        _print_costs(call, card, out)
    elif verbose:
        typer.echo(
            "costs: --card NAME shows bytes, FLOPs and time floors on a known card, --card here on this one"
        )
    if lengths:
        typer.echo(explanation.floor(lengths))
    if memory:
        chosen = card or find_card("h100")
        out.print(*(memory_table(call, chosen, training) for training in (False, True)))
    if kv_cache:
        out.print(kv_cache_table(dtype))
    if explanation.backend is None:
        raise typer.Exit(1)


def _explain_model(context: typer.Context, place: torch.device) -> None:
    """Print the table of ``--model``. Raise an error if the user also gave options of a single call."""
    from flashtile.learn.io_model import find_model
    from flashtile.learn.io_model.tables import model_table

    given = context.params
    if given["model_name"] is None:
        raise typer.BadParameter("--seqlen is for --model; a call takes --seqlen-q and --seqlen-k")
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in OF_MODEL:
            allowed = "--seqlen, --batch, --dtype, --card and --device"
            raise typer.BadParameter(f"--model takes {allowed}, got {parameter.opts[0]}")
    if given["batch"] < 1:
        raise typer.BadParameter(f"--batch must be at least 1 with --model, got {given['batch']}")
    if given["card_name"] == HERE:
        raise typer.BadParameter(f"card must be one of {', '.join(CARDS)} with --model, got {HERE!r}")
    lengths = _lengths(given["seqlens"]) if given["seqlens"] is not None else MODEL_SEQLENS
    dtype = _known_dtype("float16" if given["dtype"] is None else given["dtype"])
    with bad_parameters():
        model, card = find_model(given["model_name"]), _card(given["card_name"], place) or find_card("a100")
        console().print(model_table(model, lengths, given["batch"], dtype, card))


def _lengths(text: str, option: str = "--seqlen", least: int = 1) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not any(lengths) or not all(least <= length <= MAX_COSTED_TOKENS for length in lengths):
        some = "" if least else ", not all of them 0"
        raise typer.BadParameter(
            f"{option} must be numbers from {least} to {MAX_COSTED_TOKENS} by commas{some}, got {text!r}"
        )
    return lengths


def _packed_lengths(context: typer.Context, text: str) -> tuple[int, ...]:
    """Return the numbers of ``--lengths``, which cannot be combined with other lengths."""
    for name in ("batch", "seqlen_q", "seqlen_k", "page_size"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--lengths are those of a whole batch, got --{option} as well")
    return _lengths(text, "--lengths", 0)


def _card(name: str | None, place: torch.device) -> Card | None:
    """Return the card (the GPU model) whose costs are shown.

    This is the card with the given name. If ``name`` is None or "here", it is the GPU ``place``, or None if
    ``place`` is not a known GPU.
    """
    import torch

    if name is None or name == HERE:
        return card_of_device(torch.cuda.get_device_name(place)) if place.type == "cuda" else None
    try:
        return find_card(name)
    except ValueError as error:
        raise typer.BadParameter(f"{error}, or {HERE!r}") from None


def _default_dtype(card: Card | None, on_gpu: bool) -> str:
    """Return bfloat16 (float16 on older cards), or float32 on the CPU."""
    if not on_gpu:
        return "float32"
    return "bfloat16" if card is None or card.capability >= (8, 0) else "float16"


def _known_dtype(dtype: str) -> str:
    from flashtile.hardware.timing import FP8
    from flashtile.problems.common import DTYPES

    known = (*(str(one).removeprefix("torch.") for one in DTYPES), FP8)
    if dtype not in known:
        raise typer.BadParameter(f"dtype must be one of {', '.join(known)}, got {dtype!r}")
    return dtype


def _check_cache_options(given: dict[str, Any], dtype: str) -> None:
    """Check ``--page-size`` and ``--cache-dtype`` of the options ``given`` against the others."""
    from flashtile.hardware.timing import FP8

    page_size, cache_dtype = given["page_size"], given["cache_dtype"]
    if cache_dtype is not None and page_size is None:
        raise typer.BadParameter("--cache-dtype is for --page-size, which puts the keys into a cache")
    for name in ("varlen", "seqused_k", "deterministic") if page_size is not None else ():
        if given[name]:
            option = name.replace("_", "-")
            raise typer.BadParameter(f"--page-size is for a cache, whose calls take no --{option}")
    if cache_dtype is not None and cache_dtype not in (dtype, FP8):
        raise typer.BadParameter(f"--cache-dtype must be {dtype} or {FP8}, got {cache_dtype!r}")


def _check_costed(tokens: int, dtype: str, card: Card) -> None:
    if tokens > MAX_COSTED_TOKENS:
        raise typer.BadParameter(f"costs are counted up to {MAX_COSTED_TOKENS} tokens, got {tokens}")
    with bad_parameters():
        card.peak_tflops(dtype)


def _print_costs(call: Call, card: Card, out: Console) -> None:
    from flashtile.learn.io_model import estimates
    from flashtile.learn.io_model.estimate import DECODE_ROWS, PASSES
    from flashtile.learn.io_model.tables import card_table, estimate_table

    few = call.page_size is not None or call.seqlen_q * call.group_size <= DECODE_ROWS
    passes = ("forward",) if few else PASSES
    with bad_parameters():
        found = [estimates(call, card, which) for which in passes]
    out.print(card_table(card, call.dtype), *(estimate_table(rows, card) for rows in found))
