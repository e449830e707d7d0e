"""V's tiles transposed in shared memory, for FP8 products, whose right operand has its keys contiguous.

FlashAttention-3 (Shah et al. 2024, section 3.3) does it with LDSM.T and STSM, which move 16-bit numbers: two
neighbours of a row of V together. They arrive with two keys in a register; exchanging bytes between the
registers of four keys separates the neighbours. The four keys of a register are those that P has in one, so
that V^T's keys come in P's order (``fp8.layout.key_order``) without a further step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashtile.backends.hopper.compat import reinterpret
from flashtile.problems import fp8_layout as layout

GROUP = gl.constexpr(layout.KEY_GROUP)


@gluon.constexpr_function
def pair_layout(pairs, warps):
    """[pairs of columns, GROUP keys] of int16 as LDSM.T leaves them: bit by bit, from the lowest."""
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
    """Shared memory of rows of ``columns`` bytes, as TMA stores them, seen as 16-bit numbers."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(columns, 128), element_bitwidth=16, rank=2)


@gluon.constexpr_function
def transposed_layout(block_n):
    """Shared memory of a tile [head_dim, BLOCK_N] of V^T."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(block_n, 128), element_bitwidth=8, rank=2)


@gluon.jit
def transpose_tile(rows, transposed):
    """rows: [N, D] of e4m3 in shared memory -> transposed: [D, N], keys in P's order."""
    N: gl.constexpr = rows.shape[0]
    D: gl.constexpr = rows.shape[1]
    loaded: gl.constexpr = pair_layout(D // 2, gl.num_warps())
    source = reinterpret(rows, gl.int16, [N, D // 2], words(D))
    target = reinterpret(transposed, gl.int16, [D, N // 2], words(N))
    for group in gl.static_range(N // GROUP):
        # Key 16 a + 8 b + 2 t + c of the group. Bytes: columns 2 d and 2 d + 1.
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
        )  # [d, a, t, b] each: the two keys c of a column
        y = gl.join(even, odd).permute((0, 4, 1, 2, 3)).reshape([D, GROUP // 2])
        target.slice(group * (GROUP // 2), GROUP // 2, dim=1).store(y)
