"""Choice of the product for a problem: from the measured table if it has the shape, else by rules.

A row of the table names a kernel, its tile and its time for some numbers of rows of x. Measured tiles are
used only on the card that was measured. On another card, the nearest shape in the table decides the kind of
product, and the tile comes from :data:`DEFAULTS`.

A *place* is an output column of the product, or a pair of columns that the epilogue joins: gate and up, or
two columns that rotary embedding rotates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashtile.backends.common.device import Target, multiprocessors
from flashtile.hardware import linear_table as table
from flashtile.hardware.linear_table import FLAT, GEMV, LIBRARY
from flashtile.problems.linear import PLAIN, LinearProblem

MAX_GEMV_ROWS = 4
"""Maximum rows of x of a GEMV. None with more is measured."""
GEMV_INSTEAD_ROWS = 2
"""Up to this many rows of x, the table's GEMV is taken if its flat product is of another backend."""
MAX_FLAT_ROWS = 64
"""Maximum rows of x of a flat product. With more rows there are two blocks of rows, and each reads W."""
MAX_HEAD_NORM_ROWS = 32
"""Maximum rows of x of a flat product that normalises queries and keys. Its tiles have whole heads, so they
have many sums, and K is divided until multiprocessors have work. With 64 rows and a weight (4096, 1024) on an
H200, torch's product and its end take 3.5 us less, and the fastest of four other tiles 2.7 us less. With an
FP8 weight, which torch's product would convert, flat products serve up to MAX_FLAT_ROWS."""
FEW_OUTPUTS = 16, 256, 4, 4
"""(BLOCK_N, BLOCK_K, num_warps, num_stages) on Hopper for 64 rows of x, if N is so small that K would be
divided into eight. The last program of a tile adds its parts while others rest. On an H200, weights
(1024, 2048) and (1024, 3072) take 10 us with tiles of 64 and eight parts of K, and 0.8 and 0.3 us less with
these tiles and two parts. Fewer rows of x were not measured."""
KERNEL_US = 2.5
"""Microseconds that a kernel before or after torch's product costs more than a fused epilogue.

Measured on an H200 with Llama-3-8B: the output projection with a residual at 64 rows, gate and up at 32 and
64.
"""
KERNELS_BEFORE_NORM = 6
"""Number of torch kernels that prepare a result for a norm (``reference.linear.before_norm``)."""
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class LinearConfig:
    """The configuration of a call. Torch's product (LIBRARY) has no tile."""

    kind: str
    BLOCK_M: int = 0
    BLOCK_N: int = 0
    BLOCK_K: int = 0
    num_warps: int = 4
    num_stages: int = 1
    splits: int = 1
    ahead: int = 0
    """Blocks of W to prefetch before the previous kernel has ended, if ``problem.prefetch``."""
    whole_waves: bool = False
    """Whether tiles are shrunk so that every multiprocessor gets the same number of programs."""


DEFAULTS = {
    ("hopper", GEMV): (8, 512, 4, 4),
    ("hopper", FLAT): (64, 128, 4, 4),
    ("ampere", GEMV): (8, 512, 4, 4),
    ("ampere", FLAT): (64, 128, 4, 3),
    ("other", GEMV): (8, 256, 4, 3),
    ("other", FLAT): (32, 128, 4, 3),
}
"""(family, kind) -> (BLOCK_N, BLOCK_K, num_warps, num_stages), for shapes that were not measured.

Only Hopper's were timed, as candidates of the table."""


def padded_rows(rows: int, kind: str) -> int:
    """Return BLOCK_M for ``rows`` rows of x: a power of two, at least 8 for tensor cores."""
    power = 1 << max(rows - 1, 0).bit_length()
    return min(power, MAX_GEMV_ROWS) if kind == GEMV else min(max(power, 8), MAX_FLAT_ROWS)


def device_name(device: torch.device | Target) -> str:
    """Return the name of a GPU in the tables of measurements, or "" if the device is not a GPU."""
    if isinstance(device, Target):
        from flashtile.hardware.cards import CARDS

        return next((card.device_name for card in CARDS.values() if card.name == device.name), device.name)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def found_row(problem: LinearProblem) -> table.Found | None:
    """Look up the measurements of a problem's shape in the tables."""
    names = [str(dtype).removeprefix("torch.") for dtype in (problem.dtype, problem.weight_dtype)]
    return table.find(device_name(problem.device), problem.N, problem.K, *names)


def kind_of(problem: LinearProblem, found: table.Found | None) -> str:
    """Return the kind of product for a problem: GEMV, FLAT, or LIBRARY for torch's product.

    ``found`` holds the measurements of this shape, or of the most similar shape in the table. Without
    measurements, the number of rows of x decides.
    """
    if problem.dtype not in SIXTEEN_BIT:
        return LIBRARY
    if found is None:
        kind = GEMV if problem.M == 1 else FLAT if problem.M <= MAX_FLAT_ROWS else LIBRARY
    else:
        kind = found.row.kind(problem.M)
        if kind == LIBRARY and problem.M <= MAX_FLAT_ROWS:
            flat, library = (found.row.measured(problem.M, name) for name in (FLAT, LIBRARY))
            if flat and library and flat["us"] < library["us"] + KERNEL_US * kernels_around(problem):
                return FLAT
    return FLAT if kind == GEMV and problem.M > MAX_GEMV_ROWS else kind


def needs_end(problem: LinearProblem) -> bool:
    """Whether torch's product must be followed by an epilogue kernel.

    Torch's product adds a bias or a residual itself, but not both.
    """
    behind = problem.epilogue != PLAIN or problem.x_scale or problem.scales != "none"
    return behind or (problem.residual and problem.bias)


def kernels_around(problem: LinearProblem) -> int:
    """Return how many kernels run before and after torch's product, for steps that the flat kernel fuses.

    A residual that torch's product adds itself counts as one kernel, because it is copied first.
    """
    return problem.norm + (needs_end(problem) or problem.residual) + KERNELS_BEFORE_NORM * problem.next_norm


def choose(problem: LinearProblem) -> LinearConfig:
    """Return the configuration for a problem."""
    if problem.invariant:  # one variant, and therefore one order of sums, for every number of rows
        problem = replace(problem, M=MAX_FLAT_ROWS)
    if problem.heads is not None and problem.heads.norm:  # a tile must have whole heads; none is in the table
        most = MAX_HEAD_NORM_ROWS if problem.weight_dtype in SIXTEEN_BIT else MAX_FLAT_ROWS
        few = problem.invariant or most >= problem.M
        kind = FLAT if few and problem.dtype in SIXTEEN_BIT else LIBRARY
        return default(problem, kind) if kind == FLAT else LinearConfig(LIBRARY)
    found = found_row(problem)
    kind = FLAT if problem.invariant else kind_of(problem, found)
    if kind == LIBRARY:
        return LinearConfig(LIBRARY)
    if found is not None and found.row.card == device_name(problem.device):
        # The fastest flat product in the table may be a kernel of another backend, which does not serve this
        # call. With few rows of x, the GEMV in the table is tried next.
        for name in (kind, GEMV) if problem.M <= GEMV_INSTEAD_ROWS else (kind,):
            measured = found.row.measured(problem.M, name)
            if measured is not None and measured["backend"] == "portable":
                config = adapted(problem, name, *measured["config"])
                same_shape = (found.row.N, found.row.K) == (problem.N, problem.K)
                return config if same_shape or name == GEMV else filled(problem, config)
    return default(problem, kind)


def default(problem: LinearProblem, kind: str) -> LinearConfig:
    """Return a configuration by rules, for shapes that were not measured."""
    from flashtile.backends.portable.config import family

    BLOCK_N, BLOCK_K, num_warps, num_stages = DEFAULTS[family(problem.device), kind]
    if problem.heads is not None and problem.heads.norm and problem.heads.head_dim > BLOCK_N:
        BLOCK_N, BLOCK_K = problem.heads.head_dim, 64
        num_warps = BLOCK_N // 32
    config = adapted(problem, kind, BLOCK_N, BLOCK_K, num_warps, num_stages, 1, 2)
    return filled(problem, config) if kind == FLAT else config


def filled(problem: LinearProblem, config: LinearConfig) -> LinearConfig:
    """Divide K into up to eight splits, until nearly all multiprocessors have work.

    The configuration's own splits were measured for another shape. Here they may take a second round. Instead
    of eight splits of many rows of x, tiles are smaller (``FEW_OUTPUTS``).
    """
    from flashtile.backends.portable.config import family

    splits, tiles = 1, tiles_of(problem, replace(config, splits=1))
    measured = config.BLOCK_M == MAX_FLAT_ROWS and problem.weight_dtype in SIXTEEN_BIT
    if measured and family(problem.device) == "hopper" and 8 * tiles <= multiprocessors(problem.device):
        config = adapted(problem, FLAT, *FEW_OUTPUTS, 1, 4)
        tiles = tiles_of(problem, config)
    while 2 * tiles * splits <= multiprocessors(problem.device) and splits < 8:
        splits *= 2
    return replace(config, splits=min(splits, -(-problem.K // config.BLOCK_K)))


def adapted(
    problem: LinearProblem, kind: str, BLOCK_N: int, BLOCK_K: int, num_warps: int, num_stages: int,
    splits: int, ahead: int, whole_waves: int = False,
) -> LinearConfig:  # fmt: skip
    """Return a configuration with the given tile, adapted to a problem.

    The tile may have been measured for a larger problem, or for fewer rows of x.
    """
    if problem.scales == "block":
        BLOCK_K = min(BLOCK_K, 128)
    blocks = -(-problem.K // BLOCK_K)
    return LinearConfig(
        kind, padded_rows(problem.M, kind), max(BLOCK_N, halves(problem)), BLOCK_K, num_warps, num_stages,
        max(1, min(splits, blocks)), ahead, bool(whole_waves),
    )  # fmt: skip


def tiles_of(problem: LinearProblem, config: LinearConfig) -> int:
    """Return the number of tiles that the rows of W are divided into, each of at most BLOCK_N rows.

    With ``whole_waves`` the number is rounded up, so that every multiprocessor gets equally many programs.
    """
    tiles = -(-problem.places // (config.BLOCK_N // halves(problem)))
    if not config.whole_waves:
        return tiles
    wave = max(1, multiprocessors(problem.device) // config.splits)
    return min(-(-tiles // wave) * wave, problem.places)


def halves(problem: LinearProblem) -> int:
    """Return the rows of W per place: 1 if a place is an output column, 2 if it is a pair of columns."""
    return 1 if problem.places == problem.N else 2


def candidates(problem: LinearProblem) -> Iterator[LinearConfig]:
    """Yield the configurations that ``flashtile profile`` measures."""
    if problem.M <= MAX_GEMV_ROWS:
        for tile in _GEMV_TILES:
            yield adapted(problem, GEMV, *tile)
    if problem.M <= MAX_FLAT_ROWS:
        for tile in _FLAT_TILES:
            # A tile with fewer rows of W than of x would waste the tensor cores.
            if tile[0] >= min(problem.M, 32):
                yield adapted(problem, FLAT, *tile)


_GEMV_TILES: tuple[tuple[int, ...], ...] = (
    (4, 1024, 4, 3, 1, 1),
    (4, 2048, 4, 3, 1, 1),
    (8, 512, 4, 4, 1, 1),
    (8, 1024, 4, 4, 1, 1),
    (8, 256, 1, 6, 1, 2),
)
_FLAT_TILES: tuple[tuple[int, ...], ...] = (
    (16, 256, 1, 6, 1, 2),
    (32, 128, 2, 5, 1, 2),
    (32, 256, 4, 4, 1, 2),
    (64, 64, 4, 6, 1, 2),
    (64, 128, 4, 4, 1, 2),
    (64, 128, 4, 4, 2, 2),
    (64, 128, 4, 6, 2, 2),
    (64, 128, 4, 6, 1, 2, True),
    (128, 64, 4, 4, 1, 2),
    (128, 64, 4, 5, 2, 2),
    (128, 64, 8, 5, 4, 2),
    *(
        (BLOCK_N, 64, warps, stages, splits, 2, True)
        for BLOCK_N, warps, stages in ((64, 4, 6), (128, 4, 4), (128, 4, 6), (128, 8, 8), (256, 8, 5))
        for splits in (1, 2, 4)
    ),
    (64, 128, 4, 4, 1, 2, True),
)
"""(BLOCK_N, BLOCK_K, num_warps, num_stages, splits, ahead, whole_waves)"""
