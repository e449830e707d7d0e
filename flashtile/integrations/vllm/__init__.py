"""flashtile as attention backend ``CUSTOM`` of vLLM. vLLM calls :func:`register` through an entry point.

:mod:`~flashtile.integrations.vllm.backend` is the backend, which vLLM imports when it is selected.
:mod:`~flashtile.integrations.vllm.mla` is the backend of models with multi-head latent attention.
:mod:`~flashtile.integrations.vllm.releases` contains what differs between vLLM's releases,
:mod:`~flashtile.integrations.vllm.private` the names that are not of vLLM's interface for backends.
"""

from __future__ import annotations

from typing import Any

from flashtile.integrations.vllm import private

OLDEST = (0, 25)
"""The oldest release of vLLM that is supported."""


def register() -> None:
    """Register flashtile in vLLM as attention backend ``CUSTOM``.

    This function is the entry point ``flashtile`` of the group ``vllm.general_plugins``. vLLM calls the entry
    points of this group in each of its processes. ``vllm serve MODEL --attention-backend CUSTOM`` then
    selects flashtile. A second call changes nothing. Only names are registered: the backend is not imported,
    and no GPU is used. For prompts of multi-head latent attention, the name is registered once more: the
    attention config's ``mla_prefill_backend``.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        NotImplementedError: vLLM is older than 0.25. vLLM logs the error and starts without the plug-in.

    Examples:
        >>> from flashtile.integrations.vllm import register
        >>> register()  # doctest: +SKIP
    """
    try:
        from vllm import version
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        text = "flashtile.integrations.vllm needs vllm, which is installed by its own instructions"
        raise ModuleNotFoundError(text) from None

    release = version.__version_tuple__[:2]
    if (0, 0) < release < OLDEST:  # a checkout without tags has version (0, 0)
        raise NotImplementedError(f"vllm must be 0.25 or newer, got {version.__version__}")
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.Backend")
    private.register_mla_prefill_backend(private.MLAPrefillBackendEnum.CUSTOM, f"{__name__}.mla.Prefill")


def __getattr__(name: str) -> Any:
    """Return the backend for the model that vLLM is loading, which has one name for plug-ins of all kinds."""
    if name != "Backend":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None and config.model_config is not None and config.model_config.use_mla:
        from flashtile.integrations.vllm.mla import LatentBackend

        return LatentBackend
    from flashtile.integrations.vllm.backend import Backend

    return Backend
