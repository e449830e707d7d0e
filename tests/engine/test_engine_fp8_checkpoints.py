"""Checkpoints in e4m3 with scales: what they compute is what their dequantised weights compute."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import SIZES, new_folder, prompts

from flashtile.compilation.calls import Call
from flashtile.engine import LLM, ConfigError, SamplingParams
from flashtile.engine.config import parse_config, read_config
from flashtile.engine.parallel import Ranks
from flashtile.engine.step_calls import Limits, step_calls
from flashtile.engine.weights import SCALE, open_weights, scaled_matrix
from targets import CUDA
from walk import walk

E4M3 = torch.float8_e4m3fn
BLOCKED = {**SIZES, "hidden_size": 192, "head_dim": 128, "intermediate_size": 256}
MODELS = {
    "qwen3": {"model_type": "qwen3"},
    "phi3": {"model_type": "phi3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    },
}  # fmt: skip
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy} | more
    group = {"targets": ["Linear"], "weights": weights, "input_activations": DYNAMIC}
    groups = {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", **groups}


KINDS = {
    "fp8 block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "_scale_inv"),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale"),
    "fp8 scalar tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale"),
    "block": (compressed("block", block_structure=[128, 128]), "_scale"),
    "channel": (compressed("channel"), "_scale"),
    "tensor": (compressed("tensor") | {"kv_cache_scheme": DYNAMIC | {"dynamic": False}}, "_scale"),
}  # fmt: skip


def rounded(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight in e4m3, its scales as checkpoints store them, and their product."""
    n, k = weight.shape
    tile = {"block": (128, 128), "channel": (1, k), "tensor": (n, k)}[kind.split()[-1]]
    over = tuple(-(-size // part) * part - size for size, part in zip(weight.shape, tile, strict=True))
    padded = torch.nn.functional.pad(weight, (0, over[1], 0, over[0]))
    largest = padded.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0])).abs().amax((1, 3))
    scale = largest / 448
    wide = scale.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[:n, :k]
    low = (weight / wide).to(E4M3)
    if kind.endswith("tensor"):
        scale = scale.reshape(() if "scalar" in kind else 1)
    return low, scale, low.float() * wide


@functools.cache
def folders(name: str, kind: str) -> tuple[Path, Path]:
    """A model in e4m3, and the same model in float32."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file, save_file

    root = new_folder("flashtile-fp8-")
    given = {**BLOCKED, **MODELS[name]}
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5).add_(parameter.dim() == 1)
    model.save_pretrained(root / "wide")
    shutil.copytree(root / "wide", root / "e4m3")
    wide, low = load_file(root / "wide" / "model.safetensors"), {}
    for weight, value in list(wide.items()):
        low[weight] = value
        if weight.endswith("_proj.weight"):
            low[weight], scale, wide[weight] = rounded(value, kind)
            low[weight + KINDS[kind][1]] = scale
            if kind.endswith("tensor"):  # static scales of activations, and of keys and values
                low[weight.replace("weight", "input_scale")] = torch.ones(1)
                attention = ".".join(weight.split(".")[:3]) + ".self_attn"
                low |= {f"{attention}.{one}_scale": torch.ones(1) for one in "kv"}
    save_file(wide, root / "wide" / "model.safetensors")
    save_file(low, root / "e4m3" / "model.safetensors")
    values = json.loads((root / "e4m3" / "config.json").read_text())
    values["quantization_config"] = KINDS[kind][0]
    (root / "e4m3" / "config.json").write_text(json.dumps(values))
    return root / "e4m3", root / "wide"


def answers(path: Path, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens, and log-probabilities of all tokens after the longest prompt."""
    llm = LLM(path, skip_tokenizer_init=True, warmup=False, **{"device": "cpu", **options})
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=5, logprobs=-1))
    entry = outputs[4].outputs[0].logprobs[0]
    scores = torch.tensor([entry[token].logprob for token in range(len(entry))])
    return [output.outputs[0].token_ids for output in outputs], scores


@walk(
    ("name", "kind"),
    [
        *(("qwen3", kind) for kind in KINDS),
        ("phi3", "block"),
        ("phi3", "channel"),
        ("qwen3_moe", "fp8 block"),
        ("qwen3_moe", "channel"),
    ],
)
def test_checkpoints_in_e4m3_compute_what_their_dequantised_weights_compute(name, kind):
    low, wide = folders(name, kind)
    expected, scores = answers(wide)
    found, same = answers(low)
    assert found == expected
    torch.testing.assert_close(same, scores, atol=1e-4, rtol=0)
    _, near = answers(low, dtype="bfloat16")
    _, rounded_near = answers(wide, dtype="bfloat16")
    assert (near - scores).norm() <= 2 * (rounded_near - scores).norm()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("kind", ["fp8 block", "channel"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_checkpoints_in_e4m3_on_a_gpu(name, kind):
    """In 16 bits, with the experts' products in one kernel and steps in graphs."""
    low, wide = folders(name, kind)
    _, scores = answers(wide)
    options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_memory_bytes": 2**26}
    (_, near), (_, rounded_near) = (answers(path, **options) for path in (low, wide))
    assert 0 < (near - scores).norm() <= 2 * (rounded_near - scores).norm()


@pytest.mark.parametrize("kind", ["block", "channel", "tensor", "fp8 scalar tensor"])
def test_matrices_stay_in_e4m3_and_are_divided_with_their_scales(kind):
    low, _ = folders("qwen3", kind)
    config = read_config(low)
    open_part = functools.partial(open_weights, low, config, torch.device("cpu"), torch.bfloat16)
    whole, parts = open_part(), [open_part(Ranks(rank, 2)) for rank in range(2)]
    for name, dim in (("self_attn.o_proj", 1), ("mlp.down_proj", 1), ("mlp.gate_proj", 0)):
        matrix = f"model.layers.1.{name}.weight"
        assert whole(matrix).dtype == E4M3
        found = torch.cat([part(matrix) for part in parts], dim)
        assert torch.equal(found.float(), whole(matrix).float())
        scales = [part(matrix + SCALE) for part in parts]
        if kind == "block" or dim == 0:
            assert torch.equal(torch.cat(scales, dim), whole(matrix + SCALE))
        else:
            assert torch.equal(scales[0], whole(matrix + SCALE))
    if kind == "block":
        with pytest.raises(NotImplementedError, match=r"into whole blocks of 128 in .*, got 4 processes"):
            open_part(Ranks(0, 4))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["block", "channel"])
def test_products_with_e4m3_are_compiled_ahead(name, kind):
    config = parse_config({**BLOCKED, **MODELS[name], "quantization_config": KINDS[kind][0]})
    limits = Limits(64, max_num_seqs=2, max_num_batched_tokens=8, num_blocks=8)
    calls = [call for call in step_calls(replace(config, dtype="bfloat16"), limits) if isinstance(call, Call)]
    products = [arguments for arguments in (dict(call.arguments) for call in calls) if "weight" in arguments]
    scales = {
        len(arguments["weight_scale"].shape)
        for arguments in products
        if arguments["weight"].dtype == "float8_e4m3fn"
    }
    assert scales == {2 if kind == "block" else 1}


@pytest.mark.parametrize("kind", ["fp8 block", "channel"])
def test_experts_stay_in_e4m3(kind):
    low, _ = folders("qwen3_moe", kind)
    options = {"device": "cpu", "skip_tokenizer_init": True, "warmup": False}
    for dtype, stored in (("bfloat16", E4M3), ("float32", torch.float32)):
        experts = LLM(low, dtype=dtype, **options).engine.runner.model.layers[0].mlp
        for matrix, rows in ((experts.gate_up, 256), (experts.down, 192)):
            assert matrix.weight.dtype == stored
            assert (matrix.scale is None) == (dtype == "float32")
            assert matrix.scale is None or matrix.scale.shape[:2] == (3, rows if kind == "channel" else 2)


@pytest.mark.parametrize("dummy", [False, True])
def test_weights_that_are_no_longer_in_e4m3_are_refused(dummy):
    """They would be rounded to e4m3 and multiplied by the scales of the old weights."""
    low, wide = folders("qwen3", "channel")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "warmup": False, "device": "cpu"}
    own = {"load_format": "dummy"} if dummy else {}
    llm = LLM(low, dtype="bfloat16", **own, **options)
    expected = llm.score(prompts()[:2])
    with pytest.raises(
        ValueError, match="named_tensors must have the same matrices in e4m3 as the model, got"
    ):
        llm.update_weights(wide)
    assert llm.score(prompts()[:2]) == expected
    llm.update_weights(low)
    assert llm.score(prompts()[:2]) == LLM(low, dtype="bfloat16", **options).score(prompts()[:2])
    llm = LLM(low, dtype="float32", **options)  # there all matrices are float32
    llm.update_weights(wide)
    assert llm.score(prompts()[:2]) == LLM(wide, dtype="float32", **options).score(prompts()[:2])


def test_names_of_scales():
    assert scaled_matrix("a.weight_scale_inv") == scaled_matrix("a.weight_scale") == "a.weight"
    assert scaled_matrix("a.k_scale") is None


@walk(
    "given",
    [
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": 3}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 3}},
        compressed("group", num_bits=4, type="int"),
        compressed("block", block_structure=[128, 64]),
        "bitsandbytes",
    ],
)  # fmt: skip
def test_other_quantisation_is_refused(given):
    with pytest.raises(
        NotImplementedError, match="quantization_config must be fp8 or compressed-tensors in e4m3"
    ):
        parse_config({**SIZES, "model_type": "llama", "quantization_config": given})


def test_a_matrix_needs_its_scales(tmp_path):
    from safetensors.torch import load_file, save_file

    low, _ = folders("qwen3", "channel")
    shutil.copytree(low, tmp_path / "model")
    weights = load_file(low / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    scale = weights.pop(f"{name}_scale")
    options = {"device": "cpu", "skip_tokenizer_init": True}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=f"has no scales of '{name}', which is in F8_E4M3"):
        LLM(tmp_path / "model", **options)
    save_file({**weights, f"{name}_scale": scale[:3]}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match="must be the scales of"):
        LLM(tmp_path / "model", **options)
