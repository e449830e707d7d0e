"""Modules in place of vLLM's, with the interface of one release as it was recorded, and no behaviour."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import engine_stand_in

RECORD = json.loads((Path(__file__).parent / "vllm_interface.json").read_text())
PLUGIN = "flashtile.integrations.vllm"


def modules_of(release: str, **environment: Any) -> dict[str, ModuleType]:
    """Return stand-ins by module name; ``environment`` sets fields of ``vllm.envs``."""
    names = dict(engine_stand_in.NAMES, registered={})
    bodies = {"register_backend": "registered[backend] = class_path"}
    exec(engine_stand_in.source_of(RECORD[release], bodies), names)
    return engine_stand_in.modules_from({
        "vllm.version": {
            "__version__": release, "__version_tuple__": tuple(int(part) for part in release.split(".")),
        },
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False, **environment},
        "vllm.v1.attention.backend": names,
        "vllm.v1.attention.backends.registry": names,
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "NHD"},
    })  # fmt: skip


def plugin(modules: dict[str, ModuleType]) -> AbstractContextManager[ModuleType]:
    """Return a context with the backend's module, imported with these modules; for none, with real vLLM."""
    return engine_stand_in.plugin(PLUGIN, modules)
