"""After the warm-up no step compiles, in whatever way it is asked: the ways of a GPU, taken on a CPU."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from engine_models import folder_with_pairs

from flashtile.op.operation import remembering
from targets import INTERPRETING

pytest.importorskip("triton")
pytest.importorskip("llguidance")
if INTERPRETING:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from flashtile.backends.portable.linear import kernel
from flashtile.compilation.calls import Call, calls_of
from flashtile.engine import LLM, groups, model, runner, sampling, step_calls
from flashtile.engine.device import graph_batch
from flashtile.engine.llm import _import_kernels, _steps_of
from flashtile.engine.step_calls import calls_of_all
from needed_kernels import kernel_of, kernels, lacking, traffic

DENSE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES = {
    "vocab_size": 410, "num_hidden_layers": 2, "max_position_embeddings": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "hidden_size": 128, "intermediate_size": 64}
EVERY_KIND = (
    {}, {"top_p": 0.9}, {"min_p": 0.1, "top_k": 9}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 2.0}},
    {"logprobs": 2}, {"prompt_logprobs": 1}, {"temperature": 0}, {"allowed_token_ids": [*range(20, 90)]},
    {"structured_outputs": {"regex": "[a-f]{3}(g|hi){2,9}"}},
)  # fmt: skip
CAPTURED = {
    # model: (config, whether its matrices are in e4m3)
    "dense": (DENSE, False),
    "mixtral": ({**EXPERTS, "model_type": "mixtral"}, False),
    "gpt_oss": ({**EXPERTS, "model_type": "gpt_oss", "head_dim": 64}, False),
    "blocks": ({**DENSE, "hidden_size": 128, "num_attention_heads": 2, "head_dim": 128}, True),
    "groups": ({**DENSE, "num_attention_heads": 4, "head_dim": 128}, False),
    "windows": (
        {
            **DENSE,
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 14,
            "max_window_layers": 1,
        },
        False,
    ),
    "invariant": ({**EXPERTS, "model_type": "mixtral"}, False),
}
GROUPED = ("groups", "windows")


def kind_of(argument):
    """Return all that a kernel's variant depends on: of a tensor dtype and alignment, all of other values."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, tuple):
        return type(argument), *map(kind_of, argument)
    return argument


class Recorder:
    """A kernel that writes zeros to its result, and whose launches are noted: ``used`` identifies them."""

    def __init__(self, kernel, result, used: set):
        self.kernel, self.result, self.used = kernel, result, used
        self._known: set[tuple] = set()

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *arguments, **options):
        kind = (*map(kind_of, arguments), *options.items())
        if kind not in self._known:  # to find the kernel of a launch takes milliseconds
            self._known.add(kind)
            self.used |= kernel_of(functools.partial(self.kernel.warmup, *arguments, grid=grid, **options))
        self.result(arguments).zero_()


def as_on_a_gpu(llm: LLM, patch: pytest.MonkeyPatch) -> set:
    """Let an engine on a CPU take the ways of a GPU: padded steps, grouped experts, the sampling kernel.

    Returns the set to which the launches of kernels that belong to no operation are added.
    """

    def choose(logits, choice, positions, adjusted):
        filtered = choice.any_top_k or choice.any_top_p or choice.any_min_p
        drawn, _ = sampling.sample(logits, *choice[:5], positions, filtered, adjusted)
        likeliest = logits.argmax(-1)
        drawn = likeliest if choice.greedy else torch.where(drawn == 0, likeliest, drawn)
        return drawn, logits.gather(1, drawn.unsqueeze(1)).squeeze(1)

    used: set = set()
    rows, run = llm.engine.scheduler.max_num_seqs, llm.engine.runner
    patch.setattr(model, "FakeTensor", torch.Tensor)
    patch.setattr(runner, "choose", choose)
    patch.setattr(runner, "has_kernel", lambda logits: True)
    patch.setattr(kernel, "family", lambda device: "hopper")
    products = Recorder(kernel.grouped_kernel, lambda arguments: arguments[0].y, used)
    patch.setattr(kernel, "grouped_kernel", products)
    draws = Recorder(sampling.sample_kernel, lambda arguments: arguments[9], used)
    patch.setattr(sampling, "sample_kernel", draws)
    run.capture = lambda step: step
    run._logits = run._logits.new_zeros(graph_batch(rows), run._logits.shape[1])
    return used


def noted(forms: list, form_of, schedule):
    """The result of :meth:`Runner._form`, whose form is also noted."""
    form, captured = form_of(schedule)
    forms.append(form)
    return form, captured


@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss",
        "blocks",
        *GROUPED,
        "invariant",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("dense", "mixtral")),
    ],
)
def test_no_captured_step_needs_a_kernel_that_the_warm_up_lacks(tmp_path, name):
    """Of models with and without experts and e4m3, asked in all ways: penalties, structures, prefixes."""
    folder_with_pairs(tmp_path)
    config, in_e4m3 = CAPTURED[name]
    config = {**SIZES, **config}
    if in_e4m3:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(
        tmp_path, device="cpu", dtype="bfloat16", load_format="dummy", num_gpu_blocks_override=48,
        block_size=4, max_num_seqs=6, max_num_batched_tokens=20, warmup=False,
        cascade_attention=name in GROUPED, batch_invariant=name == "invariant",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, remembering() as remembered:
        patch.setattr(groups, "MIN_SAVED_BYTES", 1)
        for module in (groups, runner, step_calls):
            patch.setattr(module, "MAX_NEW_TOKENS", 8)
        patch.setattr(runner, "SHORT_BYTES", 2**12)  # 8 keys of 128, 16 of 64
        patch.setattr(model, "SHORT_TILES", 4)
        forms, form_of = list[runner.Form](), llm.engine.runner._form
        patch.setattr(llm.engine.runner, "_form", functools.partial(noted, forms, form_of))
        used = as_on_a_gpu(llm, patch)
        traffic(llm, 25, EVERY_KIND)
    has_experts = "num_local_experts" in config
    assert {key[0] for key in used} == {"sample_kernel", *["grouped_kernel"] * has_experts}
    listed = calls_of_all(_steps_of(llm.engine.runner, name in GROUPED))
    assert (llm.get_metrics().kv_reads_saved > 0) == (name in GROUPED)
    assert {form.short for form in forms} == ({False} if name == "invariant" else {False, True})
    levels = {len(form.levels) for form in forms}
    assert any(form.few is not None for form in forms) == (name in GROUPED)
    assert levels == {"groups": {0, 1}, "windows": {0, 1, 2}}.get(name, {0})
    assert used - kernels([source for source in listed if not isinstance(source, Call)]) == set()
    assert lacking(calls_of(remembered), listed)[0] == set()


def test_modules_that_are_imported_ahead_exist(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    _import_kernels(torch.device("cuda"))
