"""flashtile as SGLang's attention backend ``flashtile``, which SGLang finds through an entry point.

:mod:`~flashtile.integrations.sglang.backend` is the backend, which is imported when it is selected.
:mod:`~flashtile.integrations.sglang.private` has the names that are not of SGLang's interface for backends.
"""

from __future__ import annotations

import re
from typing import Any

from flashtile.integrations.sglang import private

NAME = "flashtile"
"""The backend's name on SGLang's command line."""
OLDEST = (0, 5, 23)
"""The oldest release of SGLang that is supported."""


def register() -> None:
    """Register flashtile in SGLang as an attention backend.

    This function is the entry point ``flashtile`` of the group ``sglang.srt.plugins``. SGLang calls the entry
    points of this group in each of its processes, before it reads its arguments.
    ``sglang serve --model-path MODEL --attention-backend flashtile`` then selects flashtile, also with
    ``--enable-deterministic-inference``. A second call changes nothing. The backend itself is not imported,
    and no GPU is used.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
        NotImplementedError: SGLang is older than 0.5.23. SGLang logs the error and starts without the
            plug-in.

    Examples:
        >>> from flashtile.integrations.sglang import register
        >>> register()  # doctest: +SKIP
    """
    try:
        from sglang import version
    except ModuleNotFoundError as error:
        if error.name != "sglang":
            raise
        text = "flashtile.integrations.sglang needs sglang, which is installed by its own instructions"
        raise ModuleNotFoundError(text) from None
    release = tuple(int(part) for part in re.findall(r"\d+", version.__version__)[:3])
    if (0, 0, 0) < release < OLDEST:  # a checkout without tags has version (0, 0, 0)
        raise NotImplementedError(f"sglang must be 0.5.23 or newer, got {version.__version__}")

    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    for names in (
        private.ATTENTION_BACKEND_CHOICES,
        private.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        private.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if NAME not in names:
            names.append(NAME)
    register_attention_backend(NAME)(_create)


def _create(model_runner: Any) -> Any:
    from flashtile.integrations.sglang.backend import Backend

    return Backend(model_runner)
