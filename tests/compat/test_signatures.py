"""Functions under the names of other libraries have the parameters and the defaults of the originals.

``flash_attention_interface.json`` has the parameters of FlashAttention's functions by module, as of its
commit 0251105a (August 2026).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention import flex_attention

from flashtile.compat import MODULES, flex
from flashtile.integrations import diffusers, sdpa
from flashtile.integrations import torch as torch_kernels
from flashtile.masks import block_mask, causal
from walk import walk

RECORD = json.loads((Path(__file__).parent / "flash_attention_interface.json").read_text())
REQUIRED = inspect.Parameter.empty


def defaults(function) -> dict:
    """Return the default of each parameter by its name, in their order; REQUIRED if it has none."""
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def recorded(module) -> dict:
    """Return the defaults of each recorded function of a module by its name."""
    return {name: defaults(eval(f"lambda {text}: None")) for name, text in RECORD[module].items()}


def run_anew(name: str) -> ModuleType:
    """Run a module in this test, even if it is imported already: recorders of lines see the dependency."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_schema(operator) -> dict:
    return {
        argument.name: argument.default_value if argument.has_default_value() else REQUIRED
        for argument in operator._schema.arguments
    }


@walk(("module", "name"), [(module, name) for module in RECORD for name in RECORD[module]])
def test_functions_of_flash_attention(module, name):
    """A parameter that this original requires may have the default that its name has in another original."""
    assert module in MODULES
    originals = recorded(module)
    usual = {
        key: value for some in originals.values() for key, value in some.items() if value is not REQUIRED
    }
    theirs = originals[name]
    function = attrgetter(name)(run_anew(f"flashtile.compat.{module}"))
    ours = defaults(function)
    kinds = {key: parameter.kind for key, parameter in inspect.signature(function).parameters.items()}
    assert {kinds[key] for key in theirs} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert list(ours)[: len(theirs)] == list(theirs)
    for key, default in theirs.items():
        allowed = (default,) if default is not REQUIRED else (REQUIRED, usual.get(key, REQUIRED))
        assert repr(ours[key]) in map(repr, allowed), key


ATEN = torch.ops.aten
TORCH = {
    "flex_attention": (flex.flex_attention, defaults(flex_attention.flex_attention)),
    "sdpa": (sdpa.sdpa().attend, of_schema(ATEN.scaled_dot_product_attention.default)),
    "Diffusers": (diffusers._function(sdpa.sdpa()), of_schema(ATEN.scaled_dot_product_attention.default)),
    "flash_forward": (torch_kernels._attend, of_schema(ATEN._flash_attention_forward.default)),
    "flash_backward": (torch_kernels.flash_backward, of_schema(ATEN._flash_attention_backward.default)),
    "sdpa_forward": (
        torch_kernels.sdpa_forward,
        of_schema(ATEN._scaled_dot_product_flash_attention.default),
    ),
}


@walk("name", TORCH)
def test_functions_of_torch(name):
    """Releases of torch differ in their last parameters, so only those of both are compared."""
    function, theirs = TORCH[name]
    ours = defaults(function)
    both = [key for key in theirs if key in ours]
    assert len(both) >= 7
    assert {key: ours[key] for key in both} == {key: theirs[key] for key in both}
    assert [key for key in ours if key in theirs] == both


def test_block_masks_take_the_arguments_of_flex_attention():
    theirs, ours = map(defaults, (flex_attention.create_block_mask, block_mask.create_block_mask))
    ours.pop("flex_options")
    assert theirs.keys() - ours.keys() <= block_mask.FLEX_OPTIONS
    block_mask.create_block_mask(causal(), None, None, 16, 16, **dict.fromkeys(block_mask.FLEX_OPTIONS, True))
    with pytest.raises(TypeError, match=r"create_block_mask\(\) has no argument 'block_size'"):
        block_mask.create_block_mask(causal(), None, None, 16, 16, block_size=16)
