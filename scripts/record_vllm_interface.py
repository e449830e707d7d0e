"""Record what vLLM asks of an attention backend, from a checkout or an unpacked wheel, without importing it.

``tests/integrations/vllm_interface.json`` has the record of each release. The tests build classes from it and
run flashtile's backend on them. A signature that has changed then shows without an installed vLLM.

    python scripts/record_vllm_interface.py --checkout /path/to/vllm-0.33.0
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[1] / "tests" / "integrations" / "vllm_interface.json"
CLASSES = {
    "vllm/v1/attention/backend.py": (
        "AttentionType",
        "MultipleOf",
        "AttentionBackend",
        "AttentionMetadata",
        "CommonAttentionMetadata",
        "AttentionCGSupport",
        "AttentionMetadataBuilder",
        "AttentionImplBase",
        "AttentionImpl",
    ),
    "vllm/v1/attention/backends/registry.py": ("AttentionBackendEnum",),
}


def without_types(function: ast.FunctionDef) -> str:
    """Return the function as one line: its decorators, name and parameters."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    decorators = [f"@{ast.unparse(d)} " for d in function.decorator_list if isinstance(d, ast.Name)]
    return f"{''.join(decorators)}def {function.name}({ast.unparse(function.args)})"


def described(node: ast.ClassDef) -> dict[str, Any]:
    """Return the header, the attributes and the methods of a class, as lines of source."""
    attributes, methods = [], []
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and (child.name == "__init__" or child.name[0] != "_"):
            methods.append(without_types(child))
        elif isinstance(child, ast.AnnAssign):
            value = "" if child.value is None else f" = {ast.unparse(child.value)}"
            attributes.append(f"{ast.unparse(child.target)}: Any{value}")
        elif isinstance(child, ast.Assign):
            attributes.append(ast.unparse(child))
    decorators = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
    header = f"{decorators}class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    return {"header": header, "attributes": attributes, "methods": methods}


def interface_of(checkout: Path) -> dict[str, Any]:
    """Return the described classes, and ``register_backend`` without types, by name.

    Raises:
        LookupError: a class or function is missing, so that vLLM has moved its interface.
    """
    found: dict[str, Any] = {}
    for file, names in CLASSES.items():
        tree = ast.parse((checkout / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in names:
                found[node.name] = described(node)
            elif isinstance(node, ast.FunctionDef) and node.name == "register_backend":
                found[node.name] = without_types(node)
    names = found["AttentionBackendEnum"]
    names["attributes"] = [line for line in names["attributes"] if line.startswith("CUSTOM ")]
    expected = {"register_backend", *(name for names in CLASSES.values() for name in names)}
    missing = expected - set(found)
    if missing:
        raise LookupError(f"{checkout} has no {', '.join(sorted(missing))}")
    return found


def release_of(checkout: Path) -> str:
    """Return the release, such as "0.33.0", of an unpacked wheel or a built checkout.

    Raises:
        LookupError: the checkout has no ``vllm/_version.py``, and ``--release`` is needed.
    """
    version = checkout / "vllm" / "_version.py"
    text = version.read_text() if version.exists() else ""
    found = re.search(r"^__version__ = .*'(\d+\.\d+\.\d+)", text, re.M)
    if found is None:
        raise LookupError(f"{version} names no version: give --release")
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True, help="folder that contains vllm/")
    parser.add_argument("--release", help="its release, if vllm/_version.py does not say it")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    release = arguments.release or release_of(arguments.checkout)
    record[release] = interface_of(arguments.checkout)
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    print(f"{RECORD.name}: {', '.join(sorted(record))}")


if __name__ == "__main__":
    main()
