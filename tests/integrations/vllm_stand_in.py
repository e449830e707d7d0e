"""Modules in place of vLLM's, with the interface of one release as it was recorded, and no behaviour."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any, Generic

import engine_stand_in

RECORD = json.loads((Path(__file__).parent / "vllm_interface.json").read_text())
PLUGIN = "flashtile.integrations.vllm"


M = engine_stand_in.NAMES["M"]


class LatentBase(Generic[M]):
    """In place of ``MLACommonBaseImpl``, which 0.25 does not have."""


def modules_of(release: str, **environment: Any) -> dict[str, ModuleType]:
    """Return stand-ins by module name; ``environment`` sets fields of ``vllm.envs``."""
    names = dict(engine_stand_in.NAMES, registered={}, MLACommonBaseImpl=LatentBase)
    given = "vars(self).update(locals(), need_to_return_lse_for_decode=True)"  # by __new__ with several ranks
    bodies = {
        "register_backend": "registered[backend] = class_path",
        "register_mla_prefill_backend": "registered[backend] = class_path",
        "MLACommonImpl.__init__": given,
        "MLAPrefillBackend.prepare_metadata": "self._prefill_metadata = prefill_metadata",
    }
    exec(engine_stand_in.source_of(RECORD[release], bodies), names)
    return engine_stand_in.modules_from({
        "vllm.version": {
            "__version__": release, "__version_tuple__": tuple(int(part) for part in release.split(".")),
        },
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, **environment},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.model_executor.layers.attention.mla_attention": names,
        "vllm.v1.attention.backend": names,
        "vllm.v1.attention.backends.mla.prefill.base": names,
        "vllm.v1.attention.backends.mla.prefill.registry": names,
        "vllm.v1.attention.backends.registry": names,
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "NHD"},
    })  # fmt: skip


def plugin(modules: dict[str, ModuleType]) -> AbstractContextManager[ModuleType]:
    """Return a context with the backend's module, imported with these modules; for none, with real vLLM."""
    return engine_stand_in.plugin(PLUGIN, modules)
