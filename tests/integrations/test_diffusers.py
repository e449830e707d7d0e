"""flashtile as attention backend of Diffusers, against its native backend: small models made from configs."""

from __future__ import annotations

import copy
import os

import pytest
import torch

from flashtile import testing

os.environ.setdefault("HF_HUB_OFFLINE", "1")
diffusers = pytest.importorskip("diffusers")

from flashtile.integrations.diffusers import register, unregister  # noqa: E402 - needs diffusers

pytestmark = pytest.mark.numerical

MODELS = {
    "Flux": lambda: diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ),
    "SD3": lambda: diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
    ),
    "Wan": lambda: diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    ),
    "PixArt": lambda: diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=2, in_channels=4,
        cross_attention_dim=16, caption_channels=12, out_channels=8, num_embeds_ada_norm=8,
        use_additional_conditions=False,
    ),
}  # fmt: skip


def inputs(name: str) -> dict[str, torch.Tensor]:
    image = torch.randn(2, 4, 8, 8)
    if name == "Flux":
        return {
            "hidden_states": torch.randn(2, 20, 4), "encoder_hidden_states": torch.randn(2, 8, 32),
            "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([1.0, 0.5]),
            "img_ids": torch.randn(20, 3), "txt_ids": torch.zeros(8, 3),
        }  # fmt: skip
    if name == "SD3":
        text = {"encoder_hidden_states": torch.randn(2, 7, 32), "pooled_projections": torch.randn(2, 64)}
        return {"hidden_states": image, "timestep": torch.tensor([1.0, 5.0]), **text}
    if name == "Wan":
        text = {"encoder_hidden_states": torch.randn(2, 9, 16)}
        return {"hidden_states": torch.randn(2, 4, 2, 8, 8), "timestep": torch.tensor([1.0, 5.0]), **text}
    mask = (torch.arange(7) < torch.tensor([7, 4])[:, None]).float()
    text = {"encoder_hidden_states": torch.randn(2, 7, 12), "encoder_attention_mask": mask}
    return {"hidden_states": image, "timestep": torch.tensor([1.0, 5.0]), **text}


def results(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's output, and the gradients of all its parameters in one vector."""
    out = model(**given, return_dict=False)[0]
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def door():
    yield register()
    unregister()


@pytest.mark.parametrize(("name", "calls"), [("Flux", 2), ("SD3", 2), ("Wan", 4), ("PixArt", 4)])
def test_a_model_keeps_the_error_rule(door, name, calls):
    torch.manual_seed(0)
    model, given = MODELS[name](), inputs(name)
    for parameter in model.parameters():  # some are 0 at first, and nothing would pass them
        torch.nn.init.normal_(parameter, std=0.1)
    native = results(model, given)
    exactly = copy.deepcopy(model).double(), {name: t.double() for name, t in given.items()}
    exact = results(*exactly)
    assert door.served == 0
    model.set_attention_backend("flashtile")
    ours = results(model, given)
    assert (door.served, door.passed) == (calls, {})
    for part, got, right, plain in zip(("out", "gradients"), ours, exact, native, strict=True):
        comparison = testing.compare(part, got, right, plain)
        assert comparison.holds, str(comparison)
    exactly[0].set_attention_backend("flashtile")
    torch.testing.assert_close(results(*exactly), exact, atol=1e-9, rtol=1e-9)
    model.set_attention_backend("native")
    results(model, given)
    assert door.served == 2 * calls


def test_masks_and_what_is_refused(door):
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry, dispatch_attention_fn

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 7, 4, 8), *torch.randn(2, 2, 9, 4, 8).unbind()
    padding = torch.arange(9) < torch.tensor([9, 5])[:, None]
    for options in (
        {"attn_mask": padding},  # (batch, keys)
        {"attn_mask": torch.randn(2, 1, 7, 9)},
        {"is_causal": True, "scale": 0.3},
    ):
        native, ours = (dispatch_attention_fn(q, k, v, **options, backend=b) for b in ("native", "flashtile"))
        torch.testing.assert_close(ours, native, atol=2e-6, rtol=1e-5)
    assert door.served == 3
    backends = _AttentionBackendRegistry._backends
    native, ours = (backends[diffusers.AttentionBackendName(b)](q, k, v) for b in ("native", "flashtile"))
    torch.testing.assert_close(ours, native, atol=2e-6, rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"^parallel_config is not supported"):
        dispatch_attention_fn(q, k, v, backend="flashtile", parallel_config=object())


def test_a_compiled_call_of_the_dispatcher(door):
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = torch.randn(3, 2, 7, 4, 8).unbind()
    backend = diffusers.AttentionBackendName("flashtile")
    attend = torch.compile(dispatch_attention_fn, backend="eager", fullgraph=True)
    got = attend(q, k, v, backend=backend)
    assert torch.equal(got, dispatch_attention_fn(q, k, v, backend=backend))


def test_registration_is_idempotent_and_undone():
    from diffusers.models import attention_processor

    names = diffusers.AttentionBackendName
    before = list(names)
    door = register()
    assert register() is door
    assert [*before, names("flashtile")] == list(names)
    with diffusers.attention_backend("flashtile"):
        assert attention_processor.F.relu is torch.nn.functional.relu
    unregister()
    unregister()
    assert list(names) == before
    assert not hasattr(names, "FLASHTILE")
    assert attention_processor.F is torch.nn.functional


def test_an_older_release_is_named(monkeypatch):
    monkeypatch.setattr(diffusers, "__version__", "0.36.0")
    with pytest.raises(NotImplementedError, match=r"^diffusers must be 0\.37 or newer, got 0\.36\.0"):
        register()
