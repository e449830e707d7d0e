"""Builds the repository that Hugging Face ``kernels`` loads: ``python scripts/make_hub.py [FOLDER]``.

Each folder of ``FOLDER/build`` is the package for one backend of torch, with ``metadata.json``. ``kernels``
imports it under a name of its own, so several versions can be loaded in one process. Imports are therefore
relative, and the operators have a namespace that contains a digest of the sources. ``kernels benchmark`` runs
``benchmarks/benchmark.py``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "flashtile"
BACKENDS = ("cpu", "cuda")
LEFT_OUT = (
    "__pycache__", "__main__.py", "algorithms.py", "assets", "cli.py", "demo.py", "engine", "io_model.py",
    "learn", "tools",
)  # fmt: skip
"""What attention does not need: the engine, the algorithms of the papers, and the command line."""

CARD = """---
license: bsd-3-clause
tags: [kernels]
---

flashtile: exact attention in Triton, with the functions of flash-attn.

```python
from kernels import get_kernel

flashtile = get_kernel("REPOSITORY")
out = flashtile.flash_attn_func(q, k, v, causal=True)
```

`kernels benchmark REPOSITORY` compares it with PyTorch's attention.
"""


def relative(source: str, depth: int, namespace: str) -> str:
    """Return a module's source with relative imports; ``depth`` counts its folders below the package."""
    dots, root = "." * (depth + 1), "__name__.partition('.')[0]"
    load = f"import importlib; flashtile = importlib.import_module('{dots}', __package__)"
    submodule = r"importlib.import_module(flashtile.__name__ + '\2')"
    for pattern, replacement in (
        (r"^(\s*)from flashtile import ", rf"\1from {dots} import "),
        (r"^(\s*)from flashtile\.([\w.]+) import ", rf"\1from {dots}\2 import "),
        (r"^(\s*)import flashtile$", rf"\1{load}"),
        (r"^(\s*)import flashtile(\.[\w.]+)$", rf"\1{load}; {submodule}"),
        (r'(?<![\w"`])f?"flashtile\.([\w.{}]+)"', rf'f"{{{root}}}.\1"'),  # names of modules
        (r'^_NAMESPACE = "flashtile"$', f'_NAMESPACE = "{namespace}"'),
        (r"\btorch\.ops\.flashtile\b", f"torch.ops.{namespace}"),
    ):
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


def digest_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in base64, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = (hashlib.sha256(path.read_bytes()).digest() for path in files)
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(found).decode()
        for path, found in zip(files, hashes, strict=True)
    }


def make(folder: Path, version: int = 1) -> list[Path]:
    """Write the repository to ``folder``, replacing its ``build``, and return the folder of each backend."""
    shutil.rmtree(folder / "build", ignore_errors=True)
    written = []
    for backend in BACKENDS:
        target = folder / "build" / f"torch-{backend}"
        shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
        identity = hashlib.sha256(json.dumps(digest_of(target)).encode()).hexdigest()[:12]
        for path in target.rglob("*.py"):
            depth = len(path.relative_to(target).parent.parts)
            path.write_text(relative(path.read_text(), depth, f"_flashtile_{identity}"))
        metadata = {
            "id": f"_flashtile_{backend}_{identity}",
            "name": "flashtile",
            "version": version,
            "license": "BSD-3-Clause",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digest_of(target)},
        }
        (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        written.append(target)
    (folder / "benchmarks").mkdir(exist_ok=True)
    shutil.copy(ROOT / "scripts" / "hub_benchmark.py", folder / "benchmarks" / "benchmark.py")
    (folder / "README.md").write_text(CARD)
    shutil.copy(ROOT / "LICENSE", folder)
    return written


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "hub"
    out.mkdir(parents=True, exist_ok=True)
    for path in make(out.resolve()):
        print(path)
