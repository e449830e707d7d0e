"""shared_prompts: answers that share a prompt learn what separate sequences learn."""

from __future__ import annotations

import copy

import pytest
import torch

from walk import walk

transformers = pytest.importorskip("transformers", minversion="5.17")

from hugging_face import SMALL, registered  # noqa: E402, F401 - a fixture

import flashtile  # noqa: E402
from flashtile.integrations.transformers import shared_prompts, unregister  # noqa: E402

pytestmark = pytest.mark.quick

WINDOW = {"sliding_window": 5}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8, **WINDOW}
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
GPT2 |= dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
MODELS = {
    "Llama": {},
    "Mistral": WINDOW,
    "Mistral with a window that hides nothing": {"sliding_window": 17},
    "Qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "Gemma3": LAYERS,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, **LAYERS},  # with sinks
}


def drawn(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


PROMPTS = drawn(9, 1, 14)
ANSWERS = [drawn(4, 1, 7), drawn(3, 5), drawn(2)]


def small(name: str, **more):
    kind = name.split()[0]
    text = "Text" if kind == "Gemma3" else ""
    config = getattr(transformers, f"{kind}{text}Config")(**SMALL | MODELS.get(name, {}) | more)
    return made(f"{kind}ForCausalLM", config)


def made(kind: str, config, implementation: str = "flashtile"):
    torch.manual_seed(0)
    return getattr(transformers, kind)._from_config(config, attn_implementation=implementation)


def separate(model) -> torch.Tensor:
    """The log-probabilities of the answers' tokens, each answer after its prompt alone."""
    found = []
    for prompt, of_prompt in zip(PROMPTS, ANSWERS, strict=True):
        for answer in of_prompt:
            logits = model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].log_softmax(-1)
            own = logits[len(prompt) - 1 : -1]
            found.append(own.gather(1, torch.tensor(answer)[:, None])[:, 0])
    return torch.cat(found)


def check(ours, plain) -> None:
    batch = shared_prompts(ours, PROMPTS, ANSWERS)
    found, expected = batch.log_probs(ours(**batch).logits), separate(plain)
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(0), dtype=found.dtype)
    for numbers in (found, expected):
        (numbers * weights).sum().backward()
    of_model = torch.nn.utils.parameters_to_vector
    gradients = [
        of_model(weight.grad for weight in model.parameters() if weight.grad is not None)
        for model in (ours, plain)
    ]
    # Transformers computes norms and rotations in float32 for any dtype.
    for one, other in ((found, expected), gradients):
        bound = 64 * torch.finfo(torch.float32).eps * other.detach().abs().max()
        assert (one - other).abs().max() <= bound


@pytest.mark.parametrize("name", MODELS)
def test_it_learns_what_separate_sequences_learn(name):
    ours = small(name)
    if name != "GptOss":  # torch's grouped product takes no float64
        ours = ours.double()
    plain = copy.deepcopy(ours)
    plain.set_attn_implementation("eager")
    check(ours, plain)


def test_absolute_positions_are_those_in_the_path():
    ours = made("GPT2LMHeadModel", transformers.GPT2Config(**GPT2)).double()
    plain = copy.deepcopy(ours)
    plain.set_attn_implementation("eager")
    check(ours, plain)


def test_in_a_graph_with_checkpoints_and_within_other_modules():
    ours, plain = small("Gemma3"), small("Gemma3")
    plain.set_attn_implementation("eager")
    ours.gradient_checkpointing_enable()
    ours.train()
    check(ours, plain)
    torch.compiler.reset()
    for model in (ours, plain):
        model.zero_grad()
    ours.gradient_checkpointing_disable()
    check(torch.compile(ours, backend="aot_eager", fullgraph=True), plain)


def test_prompts_are_stored_once():
    """A segment of an answer begins with the prompt's last token, and each of its tokens predicts one."""
    batch = shared_prompts(small("Llama"), [[5, 6, 7], torch.tensor([8])], [[[9, 10], [11]], [[12, 13, 14]]])
    assert batch.input_ids.tolist() == [[5, 6, 7, 9, 7, 8, 12, 13]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2]]
    assert batch.logits_to_keep.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.labels.tolist() == [[9, 10, 11, 12, 13, 14]]
    assert batch.answer_ids.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 5, 5, 8]
    assert batch.parent.tolist() == [-1, 0, 0, -1, 3]
    parts = batch.unpack(batch.labels[0])
    assert [[part.tolist() for part in of_prompt] for of_prompt in parts] == [[[9, 10], [11]], [[12, 13, 14]]]
    q, k, v = torch.randn(3, 8, 2, 16).unbind()
    of_tree = flashtile.tree_attention(q, k, v, batch.cu_seqlens, batch.parent)
    (mask,) = batch.block_mask.values()
    torch.testing.assert_close(of_tree, flashtile.attention(q[None], k[None], v[None], block_mask=mask)[0])


def test_the_loss_of_the_model_itself():
    """Transformers' own loss takes the labels, which belong to the kept logits."""
    model = small("Llama")
    batch = shared_prompts(model, PROMPTS, ANSWERS)
    found = model(**batch, labels=batch.labels, shift_labels=batch.labels).loss
    torch.testing.assert_close(found, -separate(model).mean(), atol=1e-5, rtol=1e-5)
    whole = batch.log_probs(model(**dict(batch) | {"logits_to_keep": 0}).logits)
    torch.testing.assert_close(whole, batch.log_probs(model(**batch).logits), atol=1e-5, rtol=1e-5)


def test_models_with_another_attention_refuse_a_batch():
    """They would ignore the tree: the log-probabilities would be others."""
    kinds = {"Llama": {}, "Gemma3": {}, "Mixtral": {"num_local_experts": 4, "output_router_logits": True}}
    for name, more in kinds.items():
        model = small(name, **more)
        batch = shared_prompts(model, PROMPTS, ANSWERS)
        assert model(**batch, labels=batch.labels, shift_labels=batch.labels).loss.isfinite()
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            with pytest.raises(ValueError, match='model must have attn_implementation="flashtile"'):
                model(**batch)
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(Exception, match='model must have attn_implementation="flashtile"'):
            compiled(**batch)
    gpt2 = made("GPT2LMHeadModel", transformers.GPT2Config(**GPT2), "eager")
    drops = made("NemotronForCausalLM", transformers.NemotronConfig(**SMALL))
    for model in (gpt2, drops):
        with pytest.raises(ValueError, match="layers that pass block_mask on"):
            model(**copy.deepcopy(batch))


def test_the_balance_of_experts_counts_a_prompt_once():
    model = small("Mixtral", num_local_experts=4, output_router_logits=True)
    batch = shared_prompts(model, PROMPTS, ANSWERS)
    given = dict(batch)
    del given["attention_mask"]
    assert model(**batch).aux_loss.equal(model(**given).aux_loss)
    assert type(model(**batch).aux_loss) is torch.Tensor


@walk(
    ("prompts", "answers", "error", "words"),
    [
        ([[1], [2]], [[[3]]], ValueError, "answers must have a list for each of the 2 prompts, got 1"),
        ([[]], [[[1]]], ValueError, r"prompts\[0\] must have at least one token"),
        ([[1], [2]], [[[3]], []], ValueError, r"answers\[1\] must have at least one answer"),
        ([[1], [2]], [[[3]], [[4], []]], ValueError, r"answers\[1\]\[1\] must have at least one token"),
        ([[1]], [[3]], TypeError, r"answers\[0\]\[0\] must be a list of token ids .* got int 3"),
        ([["a"]], [[[3]]], TypeError, r"prompts\[0\] must be a list of token ids"),
        ([[1.5]], [[[3]]], TypeError, r"prompts\[0\] must be int32 or int64, got torch.float32"),
        ([[1]], [[[3, 96]]], ValueError, r"answers\[0\]\[0\] must be from 0 to 95 .* got 96 at entry 1"),
        ([], [], ValueError, "prompts must have at least one prompt"),
        (3, [[[3]]], TypeError, "prompts must be a list with at least one prompt, got int 3"),
        ([[1]], [3], TypeError, r"answers\[0\] must be a list with at least one answer, got int 3"),
    ],
)
def test_bad_prompts_and_answers_are_refused(prompts, answers, error, words):
    with pytest.raises(error, match=words):
        shared_prompts(small("Llama"), prompts, answers)


def test_results_that_are_refused():
    model = small("Llama")
    batch = shared_prompts(model, PROMPTS, ANSWERS)
    got = "got CausalLMOutputWithPast"
    with pytest.raises(TypeError, match=rf"logits must .*, model\(\*\*batch\).logits, {got}"):
        batch.log_probs(model(**batch))
    with pytest.raises(TypeError, match=r"logits must .* got a torch.int64 tensor of 2 dim"):
        batch.log_probs(batch.labels)
    with pytest.raises(ValueError, match=r"logits must have shape \(1, 22 or 43, vocabulary\), got"):
        batch.log_probs(model(**batch).logits[0])
    for values in (model(**batch), [1.0] * 22):
        with pytest.raises(TypeError, match=f"values must be a tensor .* got {type(values).__name__}"):
            batch.unpack(values)


def test_dropout_is_refused_by_its_name_in_the_config():
    for model, field in (
        (small("Llama", attention_dropout=0.1), "attention_dropout"),
        (made("GPT2LMHeadModel", transformers.GPT2Config(**GPT2 | {"attn_pdrop": 0.1})), "attn_pdrop"),
    ):
        batch = shared_prompts(model, PROMPTS, ANSWERS)
        with pytest.raises(NotImplementedError, match=rf"dropout_p \({field} in the model's config\)"):
            model.train()(**batch)


def test_models_that_read_the_order_in_memory_are_refused():
    tiny = {name: SMALL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    lfm2 = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    two_ways = transformers.Gemma3TextConfig(**SMALL | LAYERS, use_bidirectional_attention=True)
    for kind, config, reason in (
        ("Lfm2ForCausalLM", lfm2, "layers of type 'conv'"),
        ("Gemma3ForCausalLM", two_ways, "attention that is not causal"),
        ("FalconForCausalLM", transformers.FalconConfig(**SMALL, alibi=True), "ALiBi"),
        ("FalconForCausalLM", transformers.FalconConfig(**SMALL), "FalconModel, which drops block_mask"),
        ("NemotronForCausalLM", transformers.NemotronConfig(**SMALL), "NemotronDecoderLayer, which drops"),
        ("PhimoeForCausalLM", transformers.PhimoeConfig(**SMALL | WINDOW), "windows in its masks only"),
    ):
        with pytest.raises(NotImplementedError, match=f"model must .* got {kind} with {reason}"):
            shared_prompts(made(kind, config), [[1, 2]], [[[3]]])
    mamba = made("MambaForCausalLM", transformers.MambaConfig(**tiny), "eager")
    llama = small("Llama")
    llama.set_attn_implementation("sdpa")
    for model in (mamba, llama):
        with pytest.raises(ValueError, match=r'model must have attn_implementation="flashtile", got'):
            shared_prompts(model, [[1, 2]], [[[3]]])
    with pytest.raises(TypeError, match="model must be or wrap a model of Transformers, got Linear"):
        shared_prompts(torch.nn.Linear(2, 2), [[1, 2]], [[[3]]])
    llama.set_attn_implementation("flashtile")
    unregister()
    with pytest.raises(ValueError, match=r"got 'flashtile': call register\(\)"):
        shared_prompts(llama, [[1, 2]], [[[3]]])
