"""Transposes tiles of V in shared memory, because FP8 products need V with contiguous keys.

FlashAttention-3 (Shah et al. 2024, section 3.3) uses LDSM.T and STSM. They move 16-bit units, each two
adjacent columns of a row of V. A register then holds two keys of two columns. Exchanging bytes between two
registers gives one register for each column, with four keys. These are the keys that one register of P holds,
so the keys of V^T are in P's order (``fp8_layout.key_order``) without a further step.
"""

from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import gluon, reinterpret
from flashtile.problems import fp8_layout as layout

GROUP = gl.constexpr(layout.KEY_GROUP)


@gluon.constexpr_function
def pair_layout(pairs, warps):
    """Layout of int16 [pairs of columns, GROUP keys] as LDSM.T distributes them over the threads."""
    key_registers = [[0, 1], [0, 8], [0, 16]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    rest = []
    step = 8
    while step < pairs:
        rest.append([step, 0])
        step *= 2
    of_warps = len(range(1, warps.bit_length()))
    return gl.DistributedLinearLayout(
        reg_bases=key_registers + rest[: len(rest) - of_warps],
        lane_bases=lanes,
        warp_bases=rest[len(rest) - of_warps :],
        block_bases=[],
        shape=[pairs, GROUP.value],
    )


@gluon.constexpr_function
def words(columns):
    """Shared layout of a tile with rows of ``columns`` bytes that TMA has written, in 16-bit elements."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(columns, 128), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def transposed_layout(block_n):
    """Shared layout of a tile [head_dim, BLOCK_N] of V^T, in 8-bit elements."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(block_n, 128), element_bitwidth=8, rank=2)


@gluon.jit
def transpose_tile(rows, transposed):
    """Transpose e4m3 ``rows`` [N, D] into ``transposed`` [D, N]. Both are in shared memory.

    The keys of ``transposed`` are in P's order (``fp8_layout.key_order``).
    """
    N: gl.constexpr = rows.shape[0]
    D: gl.constexpr = rows.shape[1]
    loaded: gl.constexpr = pair_layout(D // 2, gl.num_warps())
    source = reinterpret(rows, gl.int16, [N, D // 2], words(D))
    target = reinterpret(transposed, gl.int16, [D, N // 2], words(N))
    for group in gl.static_range(N // GROUP):
        # x[d, key] holds columns 2 d and 2 d + 1 of one row. Below, the axes a, b, t and c stand for key
        # 16 a + 8 b + 2 t + c of the group.
        x = source.slice(group * GROUP, GROUP, dim=0).permute((1, 0)).load(loaded)
        x = x.reshape([D // 2, 2, 2, 4, 2]).permute((0, 1, 3, 4, 2))  # [d, a, t, c, b]
        low_keys, high_keys = gl.split(x)
        even, odd = gl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
            "=r,=r,r,r",
            [low_keys, high_keys],
            dtype=(gl.int16, gl.int16),
            is_pure=True,
            pack=2,
        )  # even and odd columns, each [d, a, t, b]; an int16 holds the keys with c = 0 and c = 1
        y = gl.join(even, odd).permute((0, 4, 1, 2, 3)).reshape([D, GROUP // 2])
        target.slice(group * (GROUP // 2), GROUP // 2, dim=1).store(y)
