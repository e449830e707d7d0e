"""Modules in place of SGLang's, with the interface of one release as it was recorded, and its pools."""

from __future__ import annotations

import inspect
import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import engine_stand_in
import torch

from flashtile.problems.decode import FP8

RECORD = json.loads((Path(__file__).parent / "sglang_interface.json").read_text())
PLUGIN = "flashtile.integrations.sglang"
BODIES = {
    "register_attention_backend": "return lambda create: registered.__setitem__(name, create)",
    "get_exec": "return state.exec",
    "get_parallel": "return state.parallel",
    "get_spec": "return state.spec",
    "ForwardMode.is_decode_or_idle": "return self.name in ('DECODE', 'IDLE')",
    "ForwardMode.is_extend_or_draft_extend_or_mixed": "return self.name in ('EXTEND', 'MIXED')",
    "KVWriteLoc.for_batch": "return cls(forward_batch.out_cache_loc, swa_loc, full_loc)",
}
FILES = {
    "sglang.srt.layers.attention.base_attn_backend": ("AttentionBackend",),
    "sglang.srt.layers.attention.attention_registry": ("register_attention_backend", "registered"),
    "sglang.srt.layers.radix_attention": ("AttentionType", "RadixAttention"),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardMode", "ForwardBatch"),
    "sglang.srt.mem_cache.memory_pool": ("KVWriteLoc", "MHATokenToKVPool"),
    "sglang.srt.mem_cache.swa_memory_pool": ("SWAKVPool",),
    "sglang.srt.configs.model_config": ("AttentionArch",),
    "sglang.srt.runtime_context": ("get_exec", "get_parallel", "get_spec", "state"),
    "sglang.srt.arg_groups.choices": (
        "ATTENTION_BACKEND_CHOICES",
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
    ),
}


def modules_of(release: str, deterministic: bool = False) -> dict[str, ModuleType]:
    """Return stand-ins by module name."""
    state = SimpleNamespace(
        exec=SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=deterministic)),
        parallel=SimpleNamespace(attn_cp_size=1, attn_dcp_size=1),
        spec=SimpleNamespace(speculative_algorithm=None),
    )
    names = dict(
        engine_stand_in.NAMES, registered={}, state=state, debug_kernel_api=lambda function: function
    )
    names |= dict.fromkeys(("ForwardBatchDeepSeekMHAMixin", "KVCache", "BaseSWAKVPool"), object)
    exec(engine_stand_in.source_of(RECORD[release], BODIES), names)
    contents: dict[str, dict[str, Any]] = {
        file: {key: names[key] for key in keys} for file, keys in FILES.items()
    }
    contents["sglang.version"] = {"__version__": release}
    return engine_stand_in.modules_from(contents)


def plugin(modules: dict[str, ModuleType]) -> AbstractContextManager[ModuleType]:
    """Return a context with the backend's module, imported with these modules."""
    return engine_stand_in.plugin(PLUGIN, modules)


class Pool:
    """SGLang's pool of keys and values by slots. Slots that were never written are NaN; page 0 is padding."""

    def __init__(
        self, recorded: type, slots: int, shape: tuple[int, int, int], page: int, dtype: Any, hnd: bool
    ):
        self.recorded, self.page = recorded, page
        heads, *dims = shape
        self.buffers = []
        for dim in dims:
            buffer = torch.full((slots, heads, dim), torch.nan).to(dtype)
            buffer = buffer.view(-1, page, heads, dim).transpose(1, 2).contiguous() if hnd else buffer
            self.buffers.append(buffer)

    def get_key_buffer(self, layer_id):
        return self.buffers[0]

    def get_value_buffer(self, layer_id):
        return self.buffers[1]

    def rows(self, number, slots):
        """Return keys (0) or values (1) of slots, (len(slots), heads, dim)."""
        buffer = self.buffers[number]
        if buffer.dim() == 3:
            return buffer.view(torch.uint8)[slots].view(buffer.dtype)
        return buffer.view(torch.uint8)[slots // self.page, :, slots % self.page].view(buffer.dtype)

    def set_kv_buffer(self, *arguments, **options):
        given = inspect.signature(self.recorded.set_kv_buffer).bind(self, *arguments, **options).arguments
        self.write(given["loc_info"].loc, given)

    def write(self, slots, given):
        for buffer, name in zip(self.buffers, "kv", strict=True):
            new, scale = given[f"cache_{name}"], given[f"{name}_scale"]
            if buffer.dtype == FP8 and scale is not None:
                new = new / scale
            bits, new = buffer.view(torch.uint8), new.to(buffer.dtype).contiguous().view(torch.uint8)
            if buffer.dim() == 3:
                bits[slots] = new
            else:
                bits[slots // self.page, :, slots % self.page] = new


def window_pool(recorded: type, full: Pool, window: Pool, mapping: torch.Tensor) -> Any:
    """Return a pool of two, for layer 0 and for layer 1 with a window; ``mapping`` is from slot to slot."""

    class WindowPool(recorded):
        swa_layer_nums = 1
        layers_mapping = {0: (0, False), 1: (0, True)}  # noqa: RUF012
        pools = full, window

        def get_key_buffer(self, layer_id):
            return self.pools[layer_id].get_key_buffer(0)

        def get_value_buffer(self, layer_id):
            return self.pools[layer_id].get_value_buffer(0)

        def translate_loc_from_full_to_swa(self, kv_indices):
            return mapping[kv_indices]

        def set_kv_buffer(self, layer, loc_info, *arguments):
            loc = loc_info.swa_loc if layer.layer_id else loc_info.loc
            self.pools[layer.layer_id].set_kv_buffer(layer, SimpleNamespace(loc=loc), *arguments)

    return WindowPool()
