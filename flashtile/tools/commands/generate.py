"""``flashtile generate``: streams texts from a model in a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flashtile.tools.commands.options import CacheDtype, Device, MaxModelLen, ModelDtype, bad_models

DEMO = Path("flashtile-demo") / "model"


def generate(
    model: Annotated[
        Path, typer.Argument(help="A folder in Hugging Face's format, or what `flashtile demo` trained.")
    ] = DEMO,
    prompts: Annotated[list[str] | None, typer.Argument(help="Texts to continue, all in one batch.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many of the likeliest tokens; 0 is all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    n: Annotated[int, typer.Option("-n", help="Answers per prompt.")] = 1,
    beams: Annotated[int, typer.Option(help="Number of beams of a beam search; 0 samples.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages of a chat.")] = False,
    dtype: ModelDtype = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    device: Device = None,
) -> None:
    """Continue texts with a model, and report its speed and memory."""
    if model == DEMO and not model.is_dir():
        raise typer.BadParameter(
            f"a model's folder must be given: there is no {DEMO}, which flashtile demo makes"
        )
    from flashtile.engine import LLM, BeamSearchParams, RequestOutputKind, SamplingParams

    console = Console(markup=False, highlight=False, soft_wrap=True)
    texts = prompts or ["def "]
    with bad_models():
        if beams and (n != 1 or stop):
            raise ValueError("-n and --stop must be left out with --beams")
        params = SamplingParams(
            n=n, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens,
            stop=stop, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        search = BeamSearchParams(beams, max_tokens) if beams else None
        llm = LLM(
            model, dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_model_len=max_model_len, device=device,
            warmup=False,
        )  # fmt: skip
        engine, tokenizer = llm.engine, llm.get_tokenizer()
        for i, text in enumerate(texts):
            prompt: Any = text
            if chat:
                asked = tokenizer.apply_chat_template([{"role": "user", "content": text}])
                prompt = {"prompt_token_ids": tokenizer.encode(asked, add_special_tokens=False)}
            engine.add_request(str(i), prompt, search or params)
    single = len(texts) == 1 and n == 1 and search is None
    if single and not chat:
        console.print(texts[0], end="", style="dim")
    written = [[""] * max(n, beams) for _ in texts]
    tokens, steps, saved, started = 0, 0, [], time.perf_counter()
    while engine.has_unfinished:
        steps += 1
        for output in engine.step():
            for one in output.outputs:
                written[int(output.request_id)][one.index] += one.text
                tokens += len(one.token_ids)
                if single:
                    console.print(one.text, end="")
                if one.finish_reason == "error":
                    console.print(f"\nfailed: {one.stop_reason}", style="red")
            if output.finished and max(n, beams) > 1:
                saved.append(output.metrics.memory_saved)
    seconds = time.perf_counter() - started
    if single:
        console.print()
    for text, answers in zip(texts, written, strict=True):
        for answer in () if single else answers:
            console.rule(align="left")
            console.print(text, end="", style="dim")
            console.print(answer)
    shared = f"; shared blocks saved {sum(saved) / len(saved):.0%} of the memory" if saved else ""
    console.print(
        f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s), {steps} steps{shared}",
        style="dim",
    )
