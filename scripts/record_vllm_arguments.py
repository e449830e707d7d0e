"""Record the arguments of vLLM's ``LLM``, ``vllm serve`` and ``SamplingParams``, without importing vLLM.

``tests/engine/server/vllm_arguments.json`` has the names and defaults of each release. A test asks whether
flashtile takes each default, so a new argument of vLLM shows when a new release is recorded.

    python scripts/record_vllm_arguments.py --checkout /path/to/vllm-0.33.0
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from record_engine_interface import release_of

RECORD = Path(__file__).parents[1] / "tests" / "engine" / "server" / "vllm_arguments.json"
UNKNOWN = "<computed>"
"""Recorded for defaults that only vLLM can compute."""


def classes_of(*files: Path) -> dict[str, ast.ClassDef]:
    trees = [ast.parse(file.read_text()) for file in files]
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def fields_of(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the annotated attributes of a class with their defaults, without private ones."""
    fields = (child for child in node.body if isinstance(child, ast.AnnAssign))
    found = {field.target.id: field.value for field in fields if isinstance(field.target, ast.Name)}
    return {name: value for name, value in found.items() if name[0] != "_"}


def default_of(value: ast.expr | None, configs: dict[str, ast.ClassDef]) -> Any:
    """Return a default as JSON. It may be a literal, or that of a field of another class."""
    if isinstance(value, ast.Call):
        name, *rest = ast.unparse(value.func), *value.args
        named = {keyword.arg: keyword.value for keyword in value.keywords}
        if name == "get_field" and isinstance(rest[0], ast.Name) and isinstance(rest[1], ast.Constant):
            return default_of(fields_of(configs[rest[0].id]).get(str(rest[1].value)), configs)
        if name in ("Field", "field") and "default" in named:
            return default_of(named["default"], configs)
        factory = ast.unparse(named["default_factory"]) if "default_factory" in named else ""
        return {"list": [], "dict": {}, "set": []}.get(factory, UNKNOWN)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id in configs:
        return default_of(fields_of(configs[value.value.id]).get(value.attr), configs)
    try:
        return UNKNOWN if value is None else ast.literal_eval(value)
    except ValueError:
        return UNKNOWN


def parameters_of(function: ast.FunctionDef, configs: dict[str, ast.ClassDef]) -> dict[str, Any]:
    """Return the parameters of a method and their defaults."""
    names = [*function.args.posonlyargs, *function.args.args][1:]
    defaults: list[ast.expr | None] = [None] * (len(names) - len(function.args.defaults))
    pairs = list(zip(names, [*defaults, *function.args.defaults], strict=True))
    pairs += zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    return {name.arg: default_of(value, configs) for name, value in pairs}


def options_of(file: Path, function: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options that a function gives to a parser itself: (defaults by name, short names)."""
    tree = ast.parse(file.read_text())
    body = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    options: dict[str, Any] = {}
    short: dict[str, str] = {}
    for call in (node for node in ast.walk(body) if isinstance(node, ast.Call)):
        names = [one.value for one in call.args if isinstance(one, ast.Constant)]
        if getattr(call.func, "attr", "") != "add_argument" or not str(names[0]).startswith("-"):
            continue
        long = next(str(name) for name in names if str(name).startswith("--"))
        short |= {str(name): long for name in names if name != long and not str(name).startswith("--")}
        default = next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)
        options[long[2:].replace("-", "_")] = default_of(default, {}) if default is not None else None
    return options, short


def arguments_of(package: Path) -> dict[str, Any]:
    """Return the arguments of each constructor and of the command, with their defaults."""
    configs = classes_of(*(package / "config").rglob("*.py"))
    known = configs | classes_of(package / "engine" / "arg_utils.py")
    engine = {name: default_of(value, known) for name, value in fields_of(known["EngineArgs"]).items()}
    files = [package / "entrypoints" / "llm.py", package / "entrypoints/generate/beam_search/offline.py"]
    classes = [node for file in files for node in classes_of(file).values()]
    methods = {node.name: node for one in classes for node in one.body if isinstance(node, ast.FunctionDef)}
    given = parameters_of(methods["__init__"], known)
    given.pop("model")
    front = next(package.glob("entrypoints/**/cli_args.py"))
    fronts = classes_of(front)
    asynchronous = fields_of(known["AsyncEngineArgs"]).items()
    serve = engine | {name: default_of(value, known) for name, value in asynchronous}
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        if name in fronts:
            serve |= {one: default_of(value, known) for one, value in fields_of(fronts[name]).items()}
    direct, short = options_of(front, "make_arg_parser")
    _, engine_short = options_of(package / "engine" / "arg_utils.py", "add_cli_args")
    parameters = classes_of(package / "sampling_params.py")
    return {
        "LLM": engine | given,
        **{name: parameters_of(methods[name], known) for name in ("generate", "chat", "beam_search")},
        "serve": serve | direct,
        "short": short | engine_short,
        **{
            name: {one: default_of(value, known) for one, value in fields_of(parameters[name]).items()}
            for name in ("SamplingParams", "BeamSearchParams", "StructuredOutputsParams")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True, help="folder that contains vllm/")
    parser.add_argument("--release", help="its release, if _version.py does not say it")
    arguments = parser.parse_args()
    package = arguments.checkout / "vllm"
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[arguments.release or release_of(package)] = arguments_of(package)
    RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1, sort_keys=True) + "\n")
    print(f"{RECORD.name}: {', '.join(sorted(record))}")


if __name__ == "__main__":
    main()
