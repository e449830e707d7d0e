"""Attention backward for Hopper: all three gradients in one kernel of five products, in Gluon.

After FlashAttention-2 (Dao 2023, arXiv:2307.08691, Algorithm 2) in FlashAttention-3's form (Shah et al. 2024,
arXiv:2407.08608, section 3 and appendix): a block of programs owns BLOCK_N keys of one key head and walks the
query rows that see them, of every query head that shares the key head. Per step, with keys as rows:

    S^T = K Q^T     P^T = exp2(S^T - lse)     dV += P^T dO
    dP^T = V dO^T   dS^T = P^T (dP^T - delta)  dK += dS^T Q     dQ += dS K

Two *consumer* warpgroups own 64 keys each, so that P^T and dS^T are, in the registers where they arise,
already the left operands of dV and dK. dS^T also goes to shared memory, and each warpgroup makes one half of
dQ from it. A *producer* warp loads by TMA, an *adder* warp adds dQ to a buffer in fp32, by TMA as well;
*keeper* warps make dQ of it (``backward_sums``).

The product dQ lags one step behind, so that the tensor cores always have work queued: dQ of the step before
and dP^T run under the exponentials, dV under dS, dK under the turn to the next step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flashtile.backends.common import launch
from flashtile.backends.common.kernel_cache import gluon_kernel
from flashtile.backends.hopper import config
from flashtile.backends.hopper.backward.dq_accum import (
    KEEPER_WARPS,
    Sums,
    await_room,
    count_up,
    keeper,
    make_keep,
    sums_row,
)
from flashtile.backends.hopper.backward.schedule import (
    Pointers,
    Schedule,
    block_of_item,
    block_of_step,
    blocks_of_head,
    find_keys,
    head_of_batch,
    load_keys,
    load_rows,
    padded_row,
    row_blocks,
    step_order,
    turn_of,
)
from flashtile.backends.hopper.backward.scores import (
    Numbers,
    bend,
    mask,
    row_of,
    slope_of,
)
from flashtile.backends.hopper.channels import make_channel
from flashtile.backends.hopper.compat import (
    aggregate,
    async_add,
    async_load,
    async_store,
)
from flashtile.backends.hopper.forward.queue import make_queue
from flashtile.backends.hopper.forward.schedule import item_count
from flashtile.backends.hopper.opaque import narrow, pin_halves, widen

WARPGROUP_ROWS = gl.constexpr(config.WARPGROUP_ROWS)
RAGGED_ROWS = gl.constexpr(launch.RAGGED_ROWS)


@aggregate
class Steps:
    """What the partitions of a program share in a step."""

    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    shift: gl.shared_memory_descriptor
    dp_shift: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    gradient: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, kv_full, kv_empty, ds_full, dq_full, dq_empty, k, v, shift, dp_shift, ds, dq, gradient
    ):
        self.kv_full = kv_full
        self.kv_empty = kv_empty
        self.ds_full = ds_full
        self.dq_full = dq_full
        self.dq_empty = dq_empty
        self.k = k
        self.v = v
        self.shift = shift
        self.dp_shift = dp_shift
        self.ds = ds
        self.dq = dq
        self.gradient = gradient


@gluon.jit
def producer(
    C: gl.constexpr, queue, q, do, s, q_desc, k_desc, v_desc, do_desc, shift_desc, dp_shift_desc, pointers,
    schedule,
):  # fmt: skip
    """Takes items and loads their tiles."""
    items = item_count(C, pointers, schedule)
    i = 0
    turn = 0
    item = gl.atomic_add(pointers.next_item, 1)
    queue.give(turn, item)
    while item < items:
        work = find_keys(C, item, pointers, schedule)
        begin, end, full_begin, full_end = row_blocks(C, work, schedule.left, schedule.right)
        cut, count, left, full = step_order(begin, end, full_begin, full_end)
        following = item
        mbarrier.wait(s.kv_empty, (turn & 1) ^ 1)
        if begin < end:
            mbarrier.expect(s.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_keys(C, k_desc, work, s.kv_full, s.k.index(0))
            load_keys(C, v_desc, work, s.kv_full, s.v.index(0))
        else:
            mbarrier.arrive(s.kv_full, count=1)
        for g in range(C.GROUP):
            head = work.head * C.GROUP + g
            statistics = head_of_batch(C, work, g, schedule.heads)
            for j in range(count):
                if (g == C.GROUP - 1) & (j == count - 1):  # here, tiles ahead hide that it takes its time
                    following = gl.atomic_add(pointers.next_item, 1)
                    queue.give(turn + 1, following)
                row = block_of_step(j, begin, end, cut, left, full) * C.BLOCK_M
                column = padded_row(C, work, row)
                slot = q.acquire(i)
                barrier = q.full.index(slot)
                mbarrier.expect(barrier, q_desc.block_type.nbytes + shift_desc.block_type.nbytes)
                load_rows(C, q_desc, work, row, head, barrier, q.tiles.index(slot))
                async_load(shift_desc, [statistics, column], barrier, s.shift.index(slot))
                slot = do.acquire(i)
                barrier = do.full.index(slot)
                mbarrier.expect(barrier, do_desc.block_type.nbytes + dp_shift_desc.block_type.nbytes)
                load_rows(C, do_desc, work, row, head, barrier, do.tiles.index(slot))
                async_load(dp_shift_desc, [statistics, column], barrier, s.dp_shift.index(slot))
                i += 1
        if begin >= end:
            following = gl.atomic_add(pointers.next_item, 1)
            queue.give(turn + 1, following)
        turn += 1
        item = following


@gluon.jit
def adder(C: gl.constexpr, queue, s, dq_desc, pointers, schedule, sums):
    """Adds both halves of dQ of each step to global memory.

    In a deterministic sum, a step's turn is passed on after the additions of the step behind it are issued,
    so that it has had their time to be done. But nobody waits for a turn without having passed on his own.
    """
    DQ_COLUMNS: gl.constexpr = C.BLOCK_D // 2 if C.BLOCK_M == WARPGROUP_ROWS else C.BLOCK_D
    items = item_count(C, pointers, schedule)
    blocks = blocks_of_head(C, pointers, schedule)
    i = 0
    turn = 0
    item = queue.wait(turn, 1)
    before = item * 0 - 1  # the block of dQ whose turn is still to be passed on
    while item < items:
        work = find_keys(C, item, pointers, schedule)
        begin, end, full_begin, full_end = row_blocks(C, work, schedule.left, schedule.right)
        cut, count, left, full = step_order(begin, end, full_begin, full_end)
        key_head, _ = block_of_item(C, item, blocks, schedule)
        await_room(key_head, blocks, sums)
        for g in range(C.GROUP):
            head = head_of_batch(C, work, g, schedule.heads)
            for j in range(count):
                m = block_of_step(j, begin, end, cut, left, full)
                sums_block = sums_row(C, work, key_head, g, m * C.BLOCK_M, sums) // C.BLOCK_M
                if C.DETERMINISTIC:
                    block = head * sums.q_blocks + padded_row(C, work, m * C.BLOCK_M) // C.BLOCK_M
                    my_turn = turn_of(C, work, m, schedule)
                    seen = gl.load(sums.turns + block, volatile=True)
                    if seen != my_turn:
                        if before >= 0:
                            count_up(sums.turns + before, 0)
                        before = block * 0 - 1
                        while seen != my_turn:
                            seen = gl.load(sums.turns + block, volatile=True)
                for w in gl.static_range(2):
                    mbarrier.wait(s.dq_full.index(w), i & 1)
                    async_add(dq_desc, [(sums_block * 2 + w) * (DQ_COLUMNS // 4), 0], s.dq.index(w))
                if C.DETERMINISTIC:
                    if before >= 0:
                        count_up(sums.turns + before, 2)
                    before = block
                tma.store_wait(1)
                mbarrier.arrive(s.dq_empty.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(s.dq_empty.index(1), count=1)
                i += 1
        if C.DETERMINISTIC:  # noqa: SIM102 - constants decide first, in an if of their own
            if before >= 0:
                count_up(sums.turns + before, 0)
                before = item * 0 - 1
        count_up(sums.added + key_head, 0)
        queue.release(turn)
        turn += 1
        item = queue.wait(turn, 1)


@gluon.jit
def dq_product(C: gl.constexpr, W: gl.constexpr, ds, k, zero):
    """This warpgroup's half of dS K, left in flight: half of the columns, or of 128 rows half."""
    ds_q = ds.permute((1, 0))
    if C.BLOCK_M == WARPGROUP_ROWS:
        half = k.slice(W * (C.BLOCK_D // 2), C.BLOCK_D // 2, 1)
        return warpgroup_mma(ds_q, half, zero, use_acc=False, is_async=True)
    else:
        rows = ds_q.slice(W * WARPGROUP_ROWS, WARPGROUP_ROWS, 0)
        return warpgroup_mma(rows, k, zero, use_acc=False, is_async=True)


@gluon.jit
def in_register_order(x):
    """[64, N] as [N / 4, 256]: each thread's registers, pair by pair, one row for all threads.

    In wgmma's accumulator, row 16 w + 8 a + r and column 8 j + 2 t + b is register (j, a, b) of thread
    (w, r, t). Stored so, a tile needs one address a thread and meets no bank twice; what reads the buffer
    knows the order (``backward_sums``).
    """
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute((3, 1, 0, 2, 4, 5))
    return x.reshape([N // 4, 256])


@gluon.jit
def hand_over(W: gl.constexpr, s, dq, i):
    """Half of dQ of step ``i`` to the adder."""
    mbarrier.wait(s.dq_empty.index(W), (i & 1) ^ 1)
    s.dq.index(W).store(in_register_order(dq))
    fence_async_shared()
    mbarrier.arrive(s.dq_full.index(W), count=1)


@gluon.jit
def step(
    C: gl.constexpr, W: gl.constexpr, FIRST: gl.constexpr, CUT: gl.constexpr, i, m, more, work, slope, dk, dv,
    start, q, do, s, schedule, numbers,
):  # fmt: skip
    """Step ``i``: rows of block ``m``; and dQ of the step before, unless this is the FIRST of an item."""
    dtype: gl.constexpr = s.k.dtype
    ROWS: gl.constexpr = WARPGROUP_ROWS
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_M, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_DV, 16])
    ds_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk_layout, k_width=2)
    p_operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv_layout, k_width=2)
    DQ_COLUMNS: gl.constexpr = C.BLOCK_D // 2 if C.BLOCK_M == ROWS else C.BLOCK_D
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    # Slot 0, said so that the compiler sees it change from step to step: what the products need to know of
    # tiles that never change it would keep in the registers of every thread, 32 of them.
    k = s.k.index(i >> 30).reshape([C.BLOCK_N, C.BLOCK_D])
    v = s.v.index(i >> 30).reshape([C.BLOCK_N, C.BLOCK_DV])
    my_k = k.slice(W * ROWS, ROWS, 0)
    my_v = v.slice(W * ROWS, ROWS, 0)
    # A zero that the compiler cannot see through, for each row: accumulators that are copies of one register
    # would be copied after the fence that orders them before the product, at the price of a wait.
    zeros = (gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout)) + 1).to(gl.float32) * numbers.zero

    slot = q.wait(i)
    q_tile = q.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_D])
    do_tile = do.tiles.index(slot).reshape([C.BLOCK_M, C.BLOCK_DV])
    scores = warpgroup_mma(my_k, q_tile.permute((1, 0)), start, use_acc=not C.BENT, is_async=True)
    if FIRST:
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        before = i - 1
        mbarrier.wait(s.ds_full.index(before & 1), (before >> 1) & 1)
        zero = gl.full([ROWS, DQ_COLUMNS], 0.0, gl.float32, dq_layout)
        dq = dq_product(C, W, s.ds.index(before & 1), k, zero)
        scores = warpgroup_mma_wait(1, deps=[scores])
    slack = 1.0
    if C.BENT:
        scores, slack = bend(C, W, scores, m, work, slope, numbers, s_layout)
        p = gl.exp2(scores + row_of(s.shift.index(slot).reshape([C.BLOCK_M]), s_layout))
    else:
        p = gl.exp2(scores * numbers.scale_log2)
    if CUT:
        p = mask(C, W, p, m, work, schedule, s_layout)
    weights = narrow(p * slack, dtype)  # what dS is of dP; P itself but under a soft-cap
    p = narrow(p, dtype)
    do.wait(i)
    dp_start = row_of(s.dp_shift.index(slot).reshape([C.BLOCK_M]), s_layout) + zeros[:, None]
    p = pin_halves(p)
    if not FIRST:
        dq = warpgroup_mma_wait(0, deps=[dq])
    dp = warpgroup_mma(my_v, do_tile.permute((1, 0)), dp_start, is_async=True)
    dv = warpgroup_mma(gl.convert_layout(p, p_operand), do_tile, dv, is_async=True)
    if not FIRST:
        hand_over(W, s, dq, i - 1)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = narrow(widen(weights) * dp, dtype)
    s.ds.index(i & 1).slice(W * ROWS, ROWS, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(s.ds_full.index(i & 1), count=1)
    dk = warpgroup_mma(gl.convert_layout(ds, ds_operand), q_tile, dk, is_async=True)
    # Of the next step, under dK; of this one again where there is no next.
    start = row_of(s.shift.index(q.wait(i + more)).reshape([C.BLOCK_M]), s_layout) + zeros[:, None]
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    do.release(i)
    q.release(i)
    return dk, dv, start


@gluon.jit
def store_gradient(
    C: gl.constexpr, W: gl.constexpr, desc, work, tile, gradient, COLUMN: gl.constexpr, schedule
):
    """TMA store of this warpgroup's keys, columns ``COLUMN`` and on, as many at a time as ``desc`` has; rows
    behind the last key are not written."""
    ROWS: gl.constexpr = gradient.shape[0]
    WIDTH: gl.constexpr = gradient.shape[1]
    PART: gl.constexpr = desc.block_type.shape[-1]
    if WIDTH > PART:
        left, right = gl.split(gradient.reshape([ROWS, 2, WIDTH // 2]).permute((0, 2, 1)))
        store_gradient(C, W, desc, work, tile, left, COLUMN, schedule)
        store_gradient(C, W, desc, work, tile, right, COLUMN + WIDTH // 2, schedule)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
        tma.store_wait(0)  # of the part before
        part = gl.convert_layout(gradient.to(desc.dtype), layout, assert_trivial=True)
        tile.reshape([ROWS, PART]).store(part)
        fence_async_shared()
        row = work.place * C.BLOCK_N + W * WARPGROUP_ROWS
        if C.VARLEN or C.SEQUSED:
            end = work.start_k + work.seqlen_k
            if C.SEQUSED and not C.VARLEN:  # k may have its sequences further apart than its gradient
                end = work.sequence * schedule.seqlen_k + work.seqlen_k
            place = RAGGED_ROWS - work.seqlen_k + row
            async_store(desc, [RAGGED_ROWS, end, place, work.head, COLUMN], tile)
        else:
            async_store(desc, [work.sequence, row, work.head, COLUMN], tile)


@gluon.jit
def consumer(
    C: gl.constexpr, W: gl.constexpr, queue, q, do, s, dk_desc, dv_desc, pointers, schedule, numbers
):
    """Warpgroup W: keys 64 W to 64 W + 63 of every block."""
    ROWS: gl.constexpr = WARPGROUP_ROWS
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_DV, 16])
    DQ_COLUMNS: gl.constexpr = C.BLOCK_D // 2 if C.BLOCK_M == ROWS else C.BLOCK_D
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.BLOCK_M, 16])
    zeros = (gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout)) + 1).to(gl.float32) * numbers.zero
    items = item_count(C, pointers, schedule)
    i = 0
    turn = 0
    item = queue.wait(turn, 4)
    while item < items:
        work = find_keys(C, item, pointers, schedule)
        begin, end, full_begin, full_end = row_blocks(C, work, schedule.left, schedule.right)
        mbarrier.wait(s.kv_full, turn & 1)
        dk_sum = gl.full([ROWS, C.BLOCK_D], 0.0, gl.float32, dk_layout)
        dv_sum = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, dv_layout)
        if begin < end:
            cut, count, left, full = step_order(begin, end, full_begin, full_end)
            start = row_of(s.shift.index(q.wait(i)).reshape([C.BLOCK_M]), s_layout) + zeros[:, None]
            last = i + count * C.GROUP - 1
            m = block_of_step(0, begin, end, cut, left, full)
            slope = slope_of(C, work, 0, pointers, schedule)
            dk_sum, dv_sum, start = step(
                C, W, True, C.MASKED, i, m, min(last - i, 1), work, slope, dk_sum, dv_sum, start, q, do, s,
                schedule, numbers,
            )  # fmt: skip
            i += 1
            for g in range(C.GROUP):
                slope = slope_of(C, work, g, pointers, schedule)
                done = max(1 - g, 0)  # of the first head, the step above
                if C.MASKED:
                    for j in range(done, cut):
                        m = block_of_step(j, begin, end, cut, left, full)
                        dk_sum, dv_sum, start = step(
                            C, W, False, True, i, m, min(last - i, 1), work, slope, dk_sum, dv_sum, start, q,
                            do, s, schedule, numbers,
                        )  # fmt: skip
                        i += 1
                    done = max(done, cut)
                for j in range(done, count):
                    dk_sum, dv_sum, start = step(
                        C, W, False, False, i, full - cut + j, min(last - i, 1), work, slope, dk_sum, dv_sum,
                        start, q, do, s, schedule, numbers,
                    )  # fmt: skip
                    i += 1
            before = i - 1
            mbarrier.wait(s.ds_full.index(before & 1), (before >> 1) & 1)
            zero = gl.full([ROWS, DQ_COLUMNS], 0.0, gl.float32, dq_layout)
            dq = dq_product(C, W, s.ds.index(before & 1), s.k.index(0).reshape([C.BLOCK_N, C.BLOCK_D]), zero)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(s.kv_empty, count=1)
            hand_over(W, s, dq, before)
        else:
            mbarrier.arrive(s.kv_empty, count=1)
        work = find_keys(C, queue.read(turn, 4), pointers, schedule)
        store_gradient(C, W, dv_desc, work, s.gradient.index(W), dv_sum, 0, schedule)
        store_gradient(C, W, dk_desc, work, s.gradient.index(W), dk_sum * numbers.scale, 0, schedule)
        queue.release(turn)
        turn += 1
        item = queue.wait(turn, 4)
    tma.store_wait(0)


@gluon.jit
def await_preparation():
    """With programmatic dependent launch, programs may begin before the kernel in front of them has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(1)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon_kernel(do_not_specialize=(*Schedule._fields, *Sums._fields[:4]))
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, shift_desc, dp_shift_desc, dq_desc, sums_desc, dk_desc, dv_desc,
    table, seqused_k, alibi_slopes, turns, dq, counters,
    items, blocks, heads, seqlen_q, seqlen_k, rows_k, left, right, alibi_stride, section, q_blocks, all_heads,
    kept, vectors, scale, scale_log2, softcap_rate, softcap_log2, zero, C: gl.constexpr,
):  # fmt: skip
    """Grid: one program for each multiprocessor at most; each takes the next items when it has time.

    dq_desc and sums_desc are the same memory; counters: next_item, next_part, and for each key head added and
    cleared.
    """
    await_preparation()
    dtype: gl.constexpr = q_desc.dtype
    q = make_channel(q_desc, C.STAGES, 2, 1)
    do = make_channel(do_desc, C.STAGES, 2, 1)
    k = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)
    shift = gl.allocate_shared_memory(gl.float32, [C.STAGES] + shift_desc.block_type.shape, shift_desc.layout)
    dp_shift = gl.allocate_shared_memory(
        gl.float32, [C.STAGES] + dp_shift_desc.block_type.shape, dp_shift_desc.layout
    )
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.BLOCK_N, C.BLOCK_M], dtype)
    ds = gl.allocate_shared_memory(dtype, [2, C.BLOCK_N, C.BLOCK_M], ds_layout)
    dq_parts = gl.allocate_shared_memory(gl.float32, [2] + dq_desc.block_type.shape, dq_desc.layout)
    gradient = gl.allocate_shared_memory(dtype, [2] + dk_desc.block_type.shape, dk_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(dq_full.index(i), count=1)
        mbarrier.init(dq_empty.index(i), count=1)
    s = Steps(kv_full, kv_empty, ds_full, dq_full, dq_empty, k, v, shift, dp_shift, ds, dq_parts, gradient)
    queue = make_queue(3)
    keep = make_keep(sums_desc)
    added = counters + 2
    pointers = Pointers(table, seqused_k, alibi_slopes, counters)
    schedule = Schedule(items, blocks, heads, seqlen_q, seqlen_k, rows_k, left, right, alibi_stride, section)
    sums = Sums(q_blocks, all_heads, kept, vectors, turns, dq, counters + 1, added, added + all_heads)
    numbers = Numbers(scale, scale_log2, softcap_rate, softcap_log2, zero)
    gl.warp_specialize(
        [
            (consumer, (C, 0, queue, q, do, s, dk_desc, dv_desc, pointers, schedule, numbers)),
            (consumer, (C, 1, queue, q, do, s, dk_desc, dv_desc, pointers, schedule, numbers)),
            (producer, (
                C, queue, q, do, s, q_desc, k_desc, v_desc, do_desc, shift_desc, dp_shift_desc, pointers,
                schedule,
            )),
            (adder, (C, queue, s, dq_desc, pointers, schedule, sums)),
            (keeper, (C, keep, sums_desc, pointers, schedule, sums, scale)),
        ],
        [4, 1, 1, KEEPER_WARPS],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS, C.PRODUCER_REGISTERS, C.PRODUCER_REGISTERS],
    )  # fmt: skip
