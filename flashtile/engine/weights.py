"""A model's weights under Hugging Face's names: their shapes, and their values from safetensors or at random.

Only safetensors are read, because unpickling a checkpoint can run code. Tensors are loaded on request, so
loading needs little more memory than the model itself, even where tensors are concatenated.
"""

from __future__ import annotations

import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtile.engine.config import ConfigError, ModelConfig, read_json
from flashtile.engine.parallel import ALONE, Ranks
from flashtile.engine.upload import ByteRange, Upload
from flashtile.problems.linear import SCALE_BLOCK
from flashtile.reference.linear import scaled_weight
from flashtile.torch_private import version_of

Weights = Callable[[str], Tensor]
"""name -> this rank's part of the tensor, in the model's dtype and on its device.

A matrix that the checkpoint stores in e4m3 stays in e4m3. Its name followed by ``SCALE`` is the name of its
scales in float32: (rows,), or (rows / 128, columns / 128), rounded up, with a scale for each block. The
attribute ``in_e4m3``, if it exists, is the set of the names of these matrices.
"""
SCALE = "_scale"
E4M3 = "F8_E4M3"
FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
DTYPES = {**FLOATS, E4M3: torch.float8_e4m3fn}
logger = logging.getLogger("flashtile.engine")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = 4096
"""Rows of the head and the embedding that are compared at a time."""
OWN_HEAD = f"named_tensors must have the embedding as {HEAD} of tied embeddings, got another matrix"
IGNORED = "rotary_emb.inv_freq"
UNUSED_SCALES = (".input_scale", ".k_scale", ".v_scale")
"""Ends of the names of scales of activations, keys and values, which are not rounded by them here."""
SCALE_SUFFIXES = ("_scale_inv", "_scale")
INDEX = "model.safetensors.index.json"


class Parameter(NamedTuple):
    """Shape of a whole weight, and how tensor parallelism divides it.

    Attributes:
        shape: shape of the whole weight.
        split: the dimension that is divided among ranks, or None.
        parts: sizes of the matrices that are concatenated in this dimension. Each is divided among the ranks.
            (): the weight is one matrix.
    """

    shape: tuple[int, ...]
    split: int | None = None
    parts: tuple[int, ...] = ()

    def of_scales(self, shape: tuple[int, ...], kind: str, world: int) -> Parameter | None:
        """Return the Parameter of this matrix's scales, or None if they cannot have this shape.

        ``kind`` is ``ModelConfig.scales``.

        Raises:
            NotImplementedError: a block of the matrix would be divided among ``world`` ranks, or joined with
                a block of another matrix.
        """
        rows, columns = self.shape
        if kind != "block":
            for_rows, for_all = shape in ((rows,), (rows, 1)), math.prod(shape) == 1
            if for_rows and self.split == 0:
                return Parameter(shape, 0, self.parts)
            return Parameter(shape) if for_rows or for_all else None
        if shape != (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)):
            return None
        sizes = self.parts or (self.shape[self.split or 0],)
        if any(size % (SCALE_BLOCK * world) for size in sizes if world > 1 or self.split == 0):
            raise NotImplementedError(
                f"a matrix {self.shape} in e4m3 must be divided into whole blocks of {SCALE_BLOCK} in "
                f"dimension {self.split}, got {world} processes"
            )
        return Parameter(shape, self.split, tuple(size // SCALE_BLOCK for size in self.parts))

    def own(self, tensor: Tensor, ranks: Ranks) -> Tensor:
        """Return a rank's part of the whole weight, which may be a slice of a safetensors file."""
        if self.split is None:
            return tensor[()]  # a scalar has no dimension for [:]
        found, start, before = [], 0, [slice(None)] * self.split
        for size in self.parts or (self.shape[self.split],):
            part = ranks.slice(size)
            found.append(tensor[tuple([*before, slice(start + part.start, start + part.stop)])])
            start += size
        return found[0] if len(found) == 1 else torch.cat(found, self.split)


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Return the shape of every weight by name, with the dimension that is divided among ranks."""
    c, hidden = config, config.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = {EMBEDDING: Parameter((c.vocab_size, hidden))}

    def matrix(name: str, out: int, inner: int, split: int | None, bias: bool) -> None:
        found[f"{name}.weight"] = Parameter((out, inner), split)
        if bias:
            found[f"{name}.bias"] = Parameter((out,), 0 if split == 0 else None)

    def joined(block: str, names: tuple[str, ...], sizes: tuple[int, ...], bias: bool) -> None:
        """Add projections of ``sizes`` rows, under one name each or all under one name."""
        if len(names) == 1:
            found[f"{block}.{names[0]}.weight"] = Parameter((sum(sizes), hidden), 0, sizes)
        for name, size in zip(names, sizes, strict=True) if len(names) > 1 else ():
            matrix(f"{block}.{name}", size, hidden, 0, bias)

    for i in range(c.num_layers):
        layer, size = f"model.layers.{i}", c.intermediate_size
        for norm in filter(None, c.family.norms):
            found[f"{layer}.{norm}_layernorm.weight"] = Parameter((hidden,))
        attention = f"{layer}.self_attn"
        joined(attention, c.family.qkv, (q, kv, kv), c.qkv_bias)
        matrix(f"{attention}.o_proj", hidden, q, 1, c.o_bias)
        for name, heads in (("q_norm", q), ("k_norm", kv)) if c.family.qk_norm else ():
            norm_all = c.family.qk_norm == "all"
            one = Parameter((heads,), 0) if norm_all else Parameter((c.head_dim,))
            found[f"{attention}.{name}.weight"] = one
        if c.family.sinks:
            found[f"{attention}.sinks"] = Parameter((c.num_heads,), 0)
        if c.has_experts(i):
            found |= _expert_parameters(c, layer)
        else:
            joined(f"{layer}.mlp", c.family.gate_up, (size, size), c.mlp_bias)
            matrix(f"{layer}.mlp.down_proj", hidden, size, 1, c.mlp_bias)
    found["model.norm.weight"] = Parameter((hidden,))
    if not c.tie_word_embeddings:
        found[HEAD] = Parameter((c.vocab_size, hidden), 0)
    return found


def _expert_parameters(config: ModelConfig, layer: str) -> dict[str, Parameter]:
    """Return the weights of a layer's mixture of experts. Every expert is divided among the ranks."""
    e, inner, hidden = config.num_experts, config.expert_size, config.hidden_size
    names = config.family.experts
    assert names is not None
    block = f"{layer}.{names.block}"
    found = {f"{block}.{names.router}.weight": Parameter((e, hidden))}
    if names.stacked:
        found[f"{block}.{names.router}.bias"] = Parameter((e,))
        found[f"{block}.experts.gate_up_proj"] = Parameter((e, hidden, 2 * inner), 2)
        found[f"{block}.experts.gate_up_proj_bias"] = Parameter((e, 2 * inner), 1)
        found[f"{block}.experts.down_proj"] = Parameter((e, inner, hidden), 1)
        found[f"{block}.experts.down_proj_bias"] = Parameter((e, hidden))
        return found
    for expert in range(e):
        for name in names.gate_up:
            found[f"{block}.experts.{expert}.{name}.weight"] = Parameter((inner, hidden), 0)
        found[f"{block}.experts.{expert}.{names.down}.weight"] = Parameter((hidden, inner), 1)
    return found


def with_checkpoint_head(folder: Path, config: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """Untie the embeddings in ``config`` if the checkpoint's ``lm_head`` differs from its embedding.

    The ``lm_head`` is then used, and a warning is logged, as in Transformers 5.
    """
    if not has_own_head(folder, config, dtype):
        return config
    logger.warning(
        "%s: config.json has tie_word_embeddings=true, but the checkpoint's %s differs from %s and is used "
        "(set tie_word_embeddings=false to silence this warning)", folder, HEAD, EMBEDDING,
    )  # fmt: skip
    return replace(config, tie_word_embeddings=False)


def has_own_head(folder: Path, config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether embeddings are tied in ``config``, but the checkpoint's ``lm_head`` differs in ``dtype``."""
    if not config.tie_word_embeddings:
        return False
    slices = {
        name: file.get_slice(name)
        for _, file, names in _opened(folder)
        for name in names
        if name in (EMBEDDING, HEAD)
    }
    if len(slices) < 2:
        return False
    head, embedding = slices[HEAD], slices[EMBEDDING]
    return head.get_shape() != embedding.get_shape() or any(
        not torch.equal(head[row : row + ROWS].to(dtype), embedding[row : row + ROWS].to(dtype))
        for row in range(0, head.get_shape()[0], ROWS)
    )


def open_weights(
    folder: Path, config: ModelConfig, device: torch.device, dtype: torch.dtype, ranks: Ranks = ALONE
) -> Weights:
    """Open the safetensors of a folder, and check their headers against ``config``.

    Raises:
        ModuleNotFoundError: safetensors is not installed (``pip install 'flashtile[engine]'``).
        FileNotFoundError: the folder has no safetensors.
        ConfigError: a header is invalid, or a weight is missing, unknown, duplicated or of another shape.
        NotImplementedError: a block of a matrix in e4m3 would be divided.
    """
    files, expected, paths = {}, parameters(config), {}
    scales: dict[str, tuple[Any, Parameter]] = {}
    in_e4m3 = set()
    ignored = (IGNORED, *UNUSED_SCALES) if config.scales else IGNORED
    for path, file, names in _opened(folder):
        for name in names:
            if name.endswith(ignored) or (name == HEAD and config.tie_word_embeddings):
                continue
            part = file.get_slice(name)
            shape, kind = tuple(part.get_shape()), part.get_dtype()
            matrix = scaled_matrix(name) if config.scales else None
            if matrix in expected:
                divided = expected[matrix].of_scales(shape, config.scales, ranks.world)
                if divided is None or matrix in scales:
                    raise ConfigError(f"{path}: {name} must be the scales of {matrix}, got {[*shape]}")
                scales[matrix] = part, divided
                continue
            if name not in expected:
                family = config.model_type
                raise ConfigError(f"{path} has a weight that {family} does not have: {name!r:.120}")
            if name in files:
                raise ConfigError(f"{path}: expected each weight in one file, got {name!r} in a second one")
            if shape != expected[name].shape:
                wanted = expected[name].shape
                raise ConfigError(f"{path}: {name} must have shape {wanted} by config.json, got {shape}")
            if kind == E4M3 and may_have_scales(config, name, expected[name]):
                in_e4m3.add(name)
            elif kind not in FLOATS:
                raise ConfigError(f"{path}: {name} must be one of {', '.join(FLOATS)}, got {kind}")
            files[name], paths[name] = part, path
    missing = [name for name in expected if name not in files]
    if missing:
        raise ConfigError(
            f"{folder} has no weight {missing[0]!r} ({len(missing)} of {len(expected)} are missing)"
        )

    for name in in_e4m3 - scales.keys():
        raise ConfigError(f"{folder} has no scales of {name!r}, which is in {E4M3}")

    def scale(name: str) -> Tensor:
        part, divided = scales[name]
        found = divided.own(part, ranks).to(device, torch.float32)
        rows = expected[name].own(torch.empty(expected[name].shape, device="meta"), ranks).shape[0]
        return found.contiguous() if config.scales == "block" else found.reshape(-1).expand(rows).contiguous()

    def weights(name: str) -> Tensor:
        if name.endswith(SCALE):
            return scale(name.removesuffix(SCALE))
        parameter = expected[name]
        if upload is None:
            tensor = parameter.own(files[name], ranks)
        elif _is_row_range(parameter):
            tensor = upload(name)
        else:
            tensor = parameter.own(upload(name), ranks)
        tensor = tensor.to(device=device).contiguous()
        if name not in in_e4m3:
            return tensor.to(dtype)
        # No product takes a weight in e4m3 and inputs in float32, so the weight is widened.
        return scaled_weight(tensor, scale(name), dtype) if dtype == torch.float32 else tensor

    upload = None
    if device.type == "cuda" and hasattr(os, "preadv"):
        upload = Upload(byte_ranges({name: paths[name] for name in expected}, expected, ranks), device)
    weights.in_e4m3 = set() if dtype == torch.float32 else in_e4m3  # type: ignore[attr-defined]
    return weights


def given_weights(
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ranks: Ranks = ALONE,
    present: Iterable[Tensor] = (),
) -> Weights:
    """Return the weights that a caller gives, after a check of all names and shapes against ``config``.

    Each tensor is a whole weight, in any floating-point dtype on any device. It is converted when it is read.
    ``present`` are the tensors that will be overwritten meanwhile.

    Raises:
        TypeError, ValueError: a weight is missing, unknown, given twice, of another shape, no dense tensor,
            without memory, in the memory of ``present``, or overwritten by a later one.
        NotImplementedError: the model's matrices are stored in e4m3.
    """
    if config.scales:
        raise NotImplementedError(
            "named_tensors must be a folder for a model whose checkpoint has matrices in e4m3, got tensors"
        )
    expected, tied = parameters(config), config.tie_word_embeddings
    if tied:
        expected[HEAD] = expected[EMBEDDING]
    found: dict[str, Tensor] = {}
    places: dict[Any, tuple[str, int]] = {}
    overwritten = {one.untyped_storage().data_ptr() for one in present}
    pairs = "named_tensors must be a dict or (name, tensor) pairs"
    if isinstance(named_tensors, torch.nn.Module):
        name = type(named_tensors).__name__
        raise TypeError(f"{pairs}, got the module {name}: pass its state_dict()")
    items: Any = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    if not isinstance(items, Iterable):
        raise TypeError(f"{pairs}, got {type(items).__name__}")
    for i, item in enumerate(items):
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
            raise TypeError(f"{pairs}, got {type(item).__name__} as item {i}")
        name, tensor = item
        if name.endswith(IGNORED):
            continue
        if name not in expected:
            raise ValueError(f"named_tensors must be weights of {config.model_type}, got {name!r:.120}")
        if name in found:
            raise ValueError(f"named_tensors must have each weight once, got {name!r} twice")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"named_tensors must be floating-point tensors, got {got} for {name!r}")
        if hasattr(tensor, "full_tensor"):
            raise TypeError(f"named_tensors must be whole tensors, got a DTensor: call {name}.full_tensor()")
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else str(tensor.layout)
            raise TypeError(f"named_tensors must be dense tensors, got {kind} for {name!r}")
        memory = tensor.untyped_storage()
        if memory.device.type == "meta" or not memory.nbytes():
            raise ValueError(f"named_tensors must have memory, got none for {name!r} ({memory.device})")
        if tensor.shape != expected[name].shape:
            shape, given = expected[name].shape, tuple(tensor.shape)
            raise ValueError(f"named_tensors must have shape {shape} for {name!r}, got {given}")
        if overwritten and _address(tensor) in overwritten:
            raise ValueError(f"named_tensors must not be the engine's own tensors, got {name!r}: clone it")
        # A generator may fill one buffer again for each weight, but all are read after the last one.
        place = _address(tensor), tensor.storage_offset()
        version = 0 if tensor.is_inference() else version_of(tensor)
        other, before = places.setdefault(place, (name, version))
        if version != before:
            raise ValueError(
                f"named_tensors must keep their values, but the memory of {other!r} was written again for "
                f"{name!r}: clone each tensor"
            )
        found[name] = tensor.detach()
    needed = [name for name in expected if not (tied and name == HEAD)]
    missing = [name for name in needed if name not in found]
    if missing:
        count = f"{len(missing)} of {len(needed)} are missing"
        raise ValueError(f"named_tensors must have every weight, got none for {missing[0]!r} ({count})")
    if HEAD in found and tied and not torch.equal(found[HEAD].to(dtype), found[EMBEDDING].to(dtype)):
        raise ValueError(OWN_HEAD)
    return lambda name: expected[name].own(found[name], ranks).to(device, dtype).contiguous()


def _address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory, or None if it wraps other tensors."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def may_have_scales(config: ModelConfig, name: str, parameter: Parameter) -> bool:
    """Whether a weight may be stored in e4m3: the matrices of layers may, except the router of experts."""
    of_layer = name != HEAD and len(parameter.shape) == 2 and parameter.split is not None
    return bool(config.scales) and of_layer


def scaled_matrix(name: str) -> str | None:
    """Return the name of the matrix whose scales are called ``name``, or None if these are no scales."""
    return next((name.removesuffix(end) for end in SCALE_SUFFIXES if name.endswith(f"weight{end}")), None)


def byte_ranges(paths: dict[str, Path], expected: dict[str, Parameter], ranks: Ranks) -> dict[str, ByteRange]:
    """Return the byte range to read for each weight, in safetensors files whose headers have been checked.

    For a weight that is divided among ranks by rows, the range covers only this rank's rows. For any other
    weight, the range covers the whole tensor.
    """
    headers, found = {path: _header(path) for path in set(paths.values())}, {}
    for name, path in paths.items():
        entries, begin = headers[path]
        entry, shape = entries[name], expected[name].shape
        first, last = entry["data_offsets"]
        if _is_row_range(expected[name]):
            rows, size = ranks.slice(shape[0]), (last - first) // shape[0]
            first, last = first + rows.start * size, first + rows.stop * size
            shape = (rows.stop - rows.start, *shape[1:])
        found[name] = ByteRange(path, begin + first, last - first, DTYPES[entry["dtype"]], shape)
    return found


def _is_row_range(parameter: Parameter) -> bool:
    """Whether a rank's part of a weight is a range of its rows."""
    return parameter.split == 0 and not parameter.parts


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return (the header of a safetensors file, the offset of its data)."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def random_weights(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int = 0, ranks: Ranks = ALONE
) -> Weights:
    """Return random weights of the model's shapes, made on the device.

    The weights are scaled so that products preserve the variance of their inputs. A weight's values depend
    only on its name, the seed and, if the weight is divided among ranks, the rank. As with
    :func:`open_weights`, matrices that a checkpoint has in e4m3 are in e4m3, unless ``dtype`` is float32.
    """

    def weights(name: str) -> Tensor:
        matrix = name.removesuffix(SCALE)
        parameter = parameters_of[matrix]
        shape = parameter.own(torch.empty(parameter.shape, device="meta"), ranks).shape
        if name.endswith("norm.weight"):
            return torch.full(shape, 0.0 if config.family.unit_norm else 1.0, device=device, dtype=dtype)
        part = 0 if parameter.split is None else ranks.rank  # undivided weights must be equal on all ranks
        number = zlib.crc32(f"{seed} {part} {name}".encode())  # a CPU generator uses 32 bits of a seed
        generator = torch.Generator(device).manual_seed(number)
        fan_in = shape[-2] if ".experts." in name and len(shape) == 3 else shape[-1]
        std = 1.0 if name == EMBEDDING else fan_in**-0.5
        if name != matrix:
            blocks, rows = tuple(-(-size // SCALE_BLOCK) for size in shape), shape[:1]
            return torch.full(blocks if config.scales == "block" else rows, std, device=device)
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return values.to(torch.float8_e4m3fn) if name in in_e4m3 else values.mul_(std)

    parameters_of = parameters(config)
    in_e4m3 = {
        name for name, parameter in parameters_of.items()
        if dtype != torch.float32 and may_have_scales(config, name, parameter)
    }  # fmt: skip
    weights.in_e4m3 = in_e4m3  # type: ignore[attr-defined]
    return weights


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight (N, K) to e4m3. Each row is scaled so that its largest element becomes e4m3's largest.

    Return the rounded weight, and the scales (N,) float32 to multiply its rows by.
    """
    scale = weight.abs().amax(-1).float().clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (weight.float() / scale.unsqueeze(1)).to(torch.float8_e4m3fn), scale


def _opened(folder: Path) -> Iterator[tuple[Path, Any, list[str]]]:
    """Yield (path, open file, names of its weights) for each safetensors file of a folder."""
    from safetensors import SafetensorError, safe_open

    for path in _files(folder):
        try:
            file = safe_open(path, framework="pt", device="cpu")  # maps the file without reading weights
            names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from None
        yield path, file, names


def _files(folder: Path) -> list[Path]:
    """Return the paths of a folder's safetensors files.

    If the folder has an index, these are the files that the index names. Otherwise this is model.safetensors
    or, if that file does not exist, all safetensors files of the folder. Other files are not read, because in
    some folders they hold the same weights again.
    """
    index = folder / INDEX
    if index.is_file():
        files = read_json(index).get("weight_map")
        names = set(files.values()) if isinstance(files, dict) else None
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ConfigError(f"{index}: weight_map must map weights to files of this folder")
        paths = [folder / name for name in sorted(names)]
    elif (folder / "model.safetensors").is_file():
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    absent = [path for path in paths if not path.is_file()]
    if absent or not paths:
        what = absent[0].name if absent else "*.safetensors (other formats are not read: they may run code)"
        raise FileNotFoundError(f"{folder} has no {what}")
    return paths
