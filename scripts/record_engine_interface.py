"""Record what vLLM or SGLang asks of an attention backend, from a checkout or a wheel, without importing it.

``tests/integrations/vllm_interface.json`` and ``sglang_interface.json`` have the record of each release. The
tests build classes from it and run flashtile's backends on them. A signature that has changed then shows
without an installed engine.

    python scripts/record_engine_interface.py --checkout /path/to/vllm-0.33.0
    python scripts/record_engine_interface.py --checkout /path/to/sglang-0.5.23
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "tests" / "integrations"
Names = dict[str, tuple[str, ...]]
"""What is recorded of a file: classes, functions and lists. A class with names is recorded only so far as
these attributes and methods; attributes may also be set in ``__init__``. A dotted name stands for the calls
of that method."""
BATCH = (
    "forward_mode batch_size req_pool_indices seq_lens out_cache_loc out_cache_loc_is_physical "
    "extend_num_tokens extend_seq_lens extend_seq_lens_cpu _attn_output"
)
MODES = "EXTEND DECODE MIXED IDLE TARGET_VERIFY is_decode_or_idle is_extend_or_draft_extend_or_mixed"
LAYER = (
    "layer_id tp_q_head_num tp_k_head_num qk_head_dim v_head_dim scaling logit_cap sliding_window_size "
    "attn_type is_cross_attention use_irope pos_encoding_mode logit_capping_method xai_temperature_len "
    "k_scale v_scale"
)
POOL = "get_key_buffer get_value_buffer set_kv_buffer"
ENGINES: dict[str, dict[str, Names]] = {
    "vllm": {
        "v1/attention/backend.py": {
            "AttentionType": (),
            "MultipleOf": (),
            "AttentionBackend": (),
            "AttentionMetadata": (),
            "CommonAttentionMetadata": (),
            "AttentionCGSupport": (),
            "AttentionMetadataBuilder": (),
            "AttentionImplBase": (),
            "AttentionImpl": (),
            "MLAAttentionImpl": (),
        },
        "v1/attention/backends/registry.py": {"AttentionBackendEnum": ("CUSTOM",), "register_backend": ()},
        "model_executor/layers/attention/mla_attention.py": {
            "QueryLenSupport": (),
            "MLACommonBackend": ("get_supported_head_sizes", "is_mla"),
            "MLACommonPrefillMetadata": ("query_start_loc", "max_query_len", "chunked_context"),
            "MLACommonDecodeMetadata": ("block_table", "seq_lens"),
            "MLACommonMetadata": ("num_decodes", "decode"),
            "MLACommonMetadataBuilder": ("query_len_support",),
            "MLACommonImpl": ("__init__", "forward_mqa"),
            "impl.forward_mqa": (),
            "prefill_backend.run_prefill_new_tokens": (),
            "prefill_backend.run_prefill_context_chunk": (),
        },
        "model_executor/layers/attention/attention.py": {"impl.do_kv_cache_update": (), "impl.forward": ()},
        "v1/attention/backends/mla/prefill/base.py": {"MLAPrefillBackend": ()},
        "v1/attention/backends/mla/prefill/registry.py": {
            "MLAPrefillBackendEnum": ("CUSTOM",),
            "register_mla_prefill_backend": (),
        },
    },
    "sglang": {
        "srt/layers/attention/base_attn_backend.py": {"AttentionBackend": ()},
        "srt/layers/attention/attention_registry.py": {"register_attention_backend": ()},
        "srt/layers/radix_attention.py": {"AttentionType": (), "RadixAttention": tuple(LAYER.split())},
        "srt/model_executor/forward_batch_info.py": {
            "ForwardMode": tuple(MODES.split()),
            "ForwardBatch": tuple(BATCH.split()),
        },
        "srt/mem_cache/memory_pool.py": {"KVWriteLoc": (), "MHATokenToKVPool": tuple(POOL.split())},
        "srt/mem_cache/swa_memory_pool.py": {
            "SWAKVPool": ("layers_mapping", "swa_layer_nums", "translate_loc_from_full_to_swa", *POOL.split())
        },
        "srt/configs/model_config.py": {
            "AttentionArch": (),
            "ModelConfig": ("attention_arch", "is_encoder_decoder", "is_local_attention_model"),
        },
        "srt/model_executor/model_runner.py": {
            "ModelRunner": ("kv_cache_dtype", "kv_cache_dtype_str", "page_size", "model_config")
        },
        "srt/runtime_context.py": {"get_exec": (), "get_parallel": (), "get_spec": ()},
        "srt/arg_groups/choices.py": {
            "ATTENTION_BACKEND_CHOICES": (),
            "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": (),
            "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": (),
        },
    },
}


def without_types(function: ast.FunctionDef) -> str:
    """Return the function as one line: its decorators, name and parameters."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    decorators = [f"@{ast.unparse(d)} " for d in function.decorator_list if isinstance(d, ast.Name)]
    return f"{''.join(decorators)}def {function.name}({ast.unparse(function.args)})"


def described(node: ast.ClassDef, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the header, the attributes and the methods of a class, as lines of source; ``names`` selects."""
    attributes, methods = [], []
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and (child.name == "__init__" or child.name[0] != "_"):
            methods.append(without_types(child))
        elif isinstance(child, ast.AnnAssign):
            value = "" if child.value is None else f" = {ast.unparse(child.value)}"
            attributes.append(f"{ast.unparse(child.target)}: Any{value}")
        elif isinstance(child, ast.Assign):
            attributes.append(ast.unparse(child))
    if names:
        attributes = [line for line in attributes if re.split("[: ]", line)[0] in names]
        methods = [line for line in methods if line.split("def ")[1].split("(")[0] in names]
        known = {re.split("[: ]", line)[0] for line in attributes}
        attributes += [f"{name}: Any = None" for name in names if name in assigned_to_self(node) - known]
    decorators = "".join(f"@{ast.unparse(d)} " for d in node.decorator_list)
    header = f"{decorators}class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    return {"header": header, "attributes": attributes, "methods": methods}


def assigned_to_self(node: ast.ClassDef) -> set[str]:
    """Return the names of the attributes that the methods of a class set."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and ast.unparse(part.value) == "self"
    }


def interface_of(package: Path) -> dict[str, Any]:
    """Return the described classes, functions without types, lists, and lists of calls, by name.

    Raises:
        LookupError: a class, function, list, call or selected attribute is missing, so the engine has moved
            its interface.
    """
    found: dict[str, Any] = {}
    missing = []
    for file, wanted in ENGINES[package.name].items():
        tree = ast.parse((package / file).read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for name in [name for name in wanted if "." in name]:
            texts = [ast.unparse(call) for call in calls if ast.unparse(call.func).endswith(f".{name}")]
            found |= {name: texts} if texts else {}
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in wanted:
                found[node.name] = described(node, wanted[node.name])
            elif isinstance(node, ast.FunctionDef) and node.name in wanted:
                found[node.name] = without_types(node)
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in wanted:
                found[ast.unparse(node.targets[0])] = ast.unparse(node)
        for name, names in wanted.items():
            lines = json.dumps(found.get(name, ""))
            missing += [name] * (name not in found) + [part for part in names if part not in lines]
    if missing:
        raise LookupError(f"{package} has no {', '.join(sorted(missing))}")
    return found


def release_of(package: Path) -> str:
    """Return the release, such as "0.33.0", of an unpacked wheel or a built checkout.

    Raises:
        LookupError: the package has no ``_version.py``, and ``--release`` is needed.
    """
    version = package / "_version.py"
    text = version.read_text() if version.exists() else ""
    found = re.search(r"^__version__ = .*'(\d+\.\d+\.\d+)", text, re.M)
    if found is None:
        raise LookupError(f"{version} names no version: give --release")
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkout", type=Path, required=True, help="folder that contains vllm/ or sglang/")
    parser.add_argument("--release", help="its release, if _version.py does not say it")
    arguments = parser.parse_args()
    packages = [arguments.checkout / name for name in ENGINES if (arguments.checkout / name).is_dir()]
    if len(packages) != 1:
        parser.error(
            f"expected one of {', '.join(ENGINES)} in {arguments.checkout}, got {len(packages)} of them"
        )
    package = packages[0]
    path = RECORDS / f"{package.name}_interface.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record[arguments.release or release_of(package)] = interface_of(package)
    path.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    print(f"{path.name}: {', '.join(sorted(record))}")


if __name__ == "__main__":
    main()
