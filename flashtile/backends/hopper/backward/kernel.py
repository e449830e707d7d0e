"""Attention backward for Hopper: all three gradients in one kernel of five products, in Gluon.

After FlashAttention-2 (Dao 2023, arXiv:2307.08691, Algorithm 2) in FlashAttention-3's form (Shah et al. 2024,
arXiv:2407.08608, section 3 and appendix). A work tile is BLOCK_N keys of one key head. Its program visits the
query rows that see these keys, in every query head of the key head. If programs share the keys, each visits a
part of the rows or of the heads (``schedule``). Per step (``step``), with keys as rows:

    S^T = K Q^T     P^T = exp2(S^T - lse)     dV += P^T dO
    dP^T = V dO^T   dS^T = P^T (dP^T - delta)  dK += dS^T Q     dQ += dS K

Two *consumer* warpgroups own 64 keys each. P^T and dS^T are computed in the registers from which the products
dV and dK read their left operands. dS^T also goes to shared memory, and each warpgroup computes one half of
dQ from it. A *producer* warp loads by TMA. Another warp adds dQ to an fp32 accumulator in global memory, also
by TMA. *Postprocess* warps convert the accumulator to dQ (``dq_accum``).

The product dQ lags one step behind, so that the tensor cores have work queued during other operations. dQ of
the step before runs during the exponentials, dP^T while dQ is passed on, dV during dS, and dK while -lse of
the next step is loaded.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from flashtile.backends.common.jit import gluon_kernel
from flashtile.backends.hopper import work_queue
from flashtile.backends.hopper.backward.dq_accum import (
    POSTPROCESS_WARPS,
    accum_of,
    accum_row,
    make_chunks,
    postprocess,
    signal,
    wait_until_zeroed,
)
from flashtile.backends.hopper.backward.schedule import (
    block_of_step,
    blocks_of_head,
    count_tiles,
    dq_order,
    find_work_tile,
    gradient_head,
    group_size,
    has_rows,
    head_and_block,
    head_of_batch,
    in_order,
    own_row_blocks,
    own_rows,
    padded_row,
    query_head,
    row_block,
    row_list,
    row_shift,
)
from flashtile.backends.hopper.backward.scores import QueryHead, key_modifiers, row_of
from flashtile.backends.hopper.backward.step import StepState, dq_product, pass_dq, step
from flashtile.backends.hopper.backward.tiles import (
    BackwardDescriptors,
    load_keys,
    load_rows,
    store_gradient,
)
from flashtile.backends.hopper.channels import make_channel
from flashtile.backends.hopper.compat import async_add, async_load, gluon
from flashtile.backends.hopper.constants import WARPGROUP_ROWS, accumulator_layout
from flashtile.backends.hopper.modifiers import bias as bias_tiles
from flashtile.backends.hopper.work_tiles import slope_of


class Shared(NamedTuple):
    """Shared memory of a program: channels, mbarriers, then tiles."""

    q: Any
    do: Any
    bias: Any
    """The channel of the bias, which uses the memory of ``ds``; 0 without a bias."""
    kv_full: Any
    kv_empty: Any
    ds_full: Any
    dq_full: Any
    dq_empty: Any
    k: Any
    v: Any
    neg_lse: Any
    """-lse of the rows in each slot of q."""
    neg_delta: Any
    """-delta of the rows in each slot of do."""
    ds: Any
    dq: Any
    gradient: Any


@gluon.jit
def producer(C: gl.constexpr, queue, shared, descs, pointers):
    """Takes work tiles from the work queue and loads what they need."""
    q, do, schedule = shared.q, shared.do, pointers.scalars.schedule
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc = descs
    num_tiles = count_tiles(C, pointers, schedule)
    i = 0
    t = 0
    tile_index = gl.atomic_add(pointers.counters, 1)
    work_queue.put(queue, t, tile_index)
    while tile_index < num_tiles:
        work = find_work_tile(C, tile_index, pointers, schedule)
        rows = own_rows(C, tile_index, work, pointers, schedule)
        following = tile_index
        mbarrier.wait(shared.kv_empty, (t & 1) ^ 1)
        if rows.begin < rows.end:
            mbarrier.expect(shared.kv_full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_keys(C, k_desc, work, shared.kv_full, shared.k.index(0))
            load_keys(C, v_desc, work, shared.kv_full, shared.v.index(0))
        else:
            mbarrier.arrive(shared.kv_full, count=1)
        group = group_size(C, schedule)
        for g in range(group):
            head = query_head(C, work, g, schedule)
            statistics = head_of_batch(C, work, g, schedule)
            for j in range(rows.count):
                # The atomic is issued before the last loads of a work tile, which hide its latency.
                if (g == group - 1) & (j == rows.count - 1):
                    following = gl.atomic_add(pointers.counters, 1)
                    work_queue.put(queue, t + 1, following)
                m = row_block(C, rows, j)
                row = m * C.BLOCK_M
                column = padded_row(C, work, row)
                slot = q.acquire(i)
                barrier = q.full.index(slot)
                mbarrier.expect(barrier, q_desc.block_type.nbytes + neg_lse_desc.block_type.nbytes)
                load_rows(C, q_desc, work, row, head, barrier, q.tiles.index(slot))
                async_load(neg_lse_desc, [statistics, column], barrier, shared.neg_lse.index(slot))
                slot = do.acquire(i)
                barrier = do.full.index(slot)
                mbarrier.expect(barrier, do_desc.block_type.nbytes + neg_delta_desc.block_type.nbytes)
                load_rows(C, do_desc, work, row, head, barrier, do.tiles.index(slot))
                async_load(neg_delta_desc, [statistics, column], barrier, shared.neg_delta.index(slot))
                if C.HAS_BIAS:
                    bias_tiles.load_keys(C, shared.bias, bias_desc, work, head, row, i, schedule)
                i += 1
        if rows.begin >= rows.end:
            following = gl.atomic_add(pointers.counters, 1)
            work_queue.put(queue, t + 1, following)
        t += 1
        tile_index = following


@gluon.jit
def accumulate_dq(C: gl.constexpr, queue, shared, dq_add_desc, dbias_desc, pointers, accum):
    """Adds both halves of dQ of each step to ``dq_accum``.

    With DETERMINISTIC, a step waits until all earlier additions to its block of dQ are signalled
    (``dq_order``). It signals its own additions one step later, when they have reached memory. If a step has
    to wait, it first signals the additions of the step before, so programs cannot deadlock.
    """
    DQ_COLUMNS: gl.constexpr = C.BLOCK_D // 2 if C.BLOCK_M == WARPGROUP_ROWS else C.BLOCK_D
    schedule = pointers.scalars.schedule
    num_tiles = count_tiles(C, pointers, schedule)
    blocks = blocks_of_head(C, pointers, schedule)
    i = 0
    t = 0
    tile_index = work_queue.peek(queue, t, 1)
    pending = tile_index * 0 - 1  # the block of dQ whose addition is not signalled yet
    while tile_index < num_tiles:
        work = find_work_tile(C, tile_index, pointers, schedule)
        rows = own_rows(C, tile_index, work, pointers, schedule)
        key_head, _ = head_and_block(C, tile_index, blocks, schedule)
        wait_until_zeroed(key_head, blocks << row_shift(C, schedule), accum)
        for g in range(group_size(C, schedule)):
            head = head_of_batch(C, work, g, schedule)
            for j in range(rows.count):
                m = row_block(C, rows, j)
                row = accum_row(C, work, key_head, g, m * C.BLOCK_M, schedule, accum)
                accum_block = row // C.BLOCK_M
                if C.STORES_DS:
                    of_bias = query_head(C, work, g, schedule)
                    row = m * C.BLOCK_M
                    bias_tiles.store_ds(C, shared.bias, dbias_desc, shared.ds_full, work, of_bias, row, i)
                if C.DETERMINISTIC:
                    block = head * accum.sizes.row_blocks + padded_row(C, work, m * C.BLOCK_M) // C.BLOCK_M
                    order = dq_order(C, work, m, schedule)
                    signalled = gl.load(accum.dq_semaphores + block, volatile=True)
                    if signalled != order:
                        if pending >= 0:
                            signal(accum.dq_semaphores + pending, 0)
                        pending = block * 0 - 1
                        while signalled != order:
                            signalled = gl.load(accum.dq_semaphores + block, volatile=True)
                for w in gl.static_range(2):
                    mbarrier.wait(shared.dq_full.index(w), i & 1)
                    async_add(dq_add_desc, [(accum_block * 2 + w) * (DQ_COLUMNS // 4), 0], shared.dq.index(w))
                if C.DETERMINISTIC:
                    if pending >= 0:
                        signal(accum.dq_semaphores + pending, 2)
                    pending = block
                tma.store_wait(1)
                mbarrier.arrive(shared.dq_empty.index(0), count=1)
                tma.store_wait(0)
                mbarrier.arrive(shared.dq_empty.index(1), count=1)
                i += 1
        if C.DETERMINISTIC:  # noqa: SIM102 - a constexpr condition needs an if of its own
            if pending >= 0:
                signal(accum.dq_semaphores + pending, 0)
                pending = tile_index * 0 - 1
        signal(accum.added_blocks + key_head, 0)
        queue.release(t)
        t += 1
        tile_index = work_queue.peek(queue, t, 1)


@gluon.jit
def sum_gradients(
    C: gl.constexpr, W: gl.constexpr, i, work, ranges, modifiers, zeros, dk, dv, shared, pointers
):
    """Add the contributions of a work tile's rows to dK and dV of warpgroup W's keys.

    dQ of the rows is passed to ``accumulate_dq``. ``i`` counts steps. Returns (dk, dv, the new ``i``).
    """
    scalars = pointers.scalars
    schedule = scalars.schedule
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_M)
    rows = in_order(C, ranges, modifiers.blocks)
    start = row_of(shared.neg_lse.index(shared.q.wait(i)).reshape([C.BLOCK_M]), s_layout) + zeros[:, None]
    last = i + rows.count * group_size(C, schedule) - 1
    m = block_of_step(0, rows.begin, rows.end, rows.masked, rows.before, rows.full)
    head = QueryHead(slope_of(C, work, query_head(C, work, 0, schedule), pointers, schedule), modifiers)
    state = step(
        C, W, True, C.MASKED, i, m, min(last - i, 1), work, head, StepState(dk, dv, start), shared, scalars
    )
    i += 1
    for g in range(group_size(C, schedule)):
        slope = slope_of(C, work, query_head(C, work, g, schedule), pointers, schedule)
        own = key_modifiers(C, W, work, g, modifiers.bias, modifiers.blocks, pointers, schedule)
        head = QueryHead(slope, own)
        done = max(1 - g, 0)  # the first step of the first head is done above
        if C.MASKED:
            for j in range(done, rows.masked):
                m = block_of_step(j, rows.begin, rows.end, rows.masked, rows.before, rows.full)
                state = step(
                    C, W, False, True, i, m, min(last - i, 1), work, head, state, shared, scalars
                )  # fmt: skip
                i += 1
            done = max(done, rows.masked)
        for j in range(done, rows.count):
            m = rows.full - rows.masked + j
            state = step(C, W, False, False, i, m, min(last - i, 1), work, head, state, shared, scalars)
            i += 1
    before = i - 1
    mbarrier.wait(shared.ds_full.index(before & 1), (before >> 1) & 1)
    ds, k = shared.ds.index(before & 1), shared.k.index(0)
    dq = dq_product(C, W, ds, k.reshape([C.BLOCK_N, C.BLOCK_D]))
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(shared.kv_empty, count=1)
    pass_dq(W, shared, dq, before)
    return state.dk, state.dv, i


@gluon.jit
def consumer(C: gl.constexpr, W: gl.constexpr, queue, shared, dk_desc, dv_desc, pointers):
    """Warpgroup W: compute dK and dV of keys 64 W to 64 W + 63 of every work tile."""
    ROWS: gl.constexpr = WARPGROUP_ROWS
    schedule, numbers = pointers.scalars.schedule, pointers.scalars.numbers
    dk_layout: gl.constexpr = accumulator_layout(C.BLOCK_D)
    dv_layout: gl.constexpr = accumulator_layout(C.BLOCK_DV)
    s_layout: gl.constexpr = accumulator_layout(C.BLOCK_M)
    zeros = (gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout)) + 1).to(gl.float32) * numbers.zero
    num_tiles = count_tiles(C, pointers, schedule)
    i = 0
    t = 0
    tile_index = work_queue.peek(queue, t, 4)
    while tile_index < num_tiles:
        work = find_work_tile(C, tile_index, pointers, schedule)
        ranges = own_row_blocks(C, tile_index, work, schedule)
        mbarrier.wait(shared.kv_full, t & 1)
        dk = gl.full([ROWS, C.BLOCK_D], 0.0, gl.float32, dk_layout)
        dv = gl.full([ROWS, C.BLOCK_DV], 0.0, gl.float32, dv_layout)
        listed = row_list(C, work, pointers, schedule)
        modifiers = key_modifiers(C, W, work, 0, shared.bias, listed, pointers, schedule)
        if has_rows(C, ranges, listed):
            dk, dv, i = sum_gradients(C, W, i, work, ranges, modifiers, zeros, dk, dv, shared, pointers)
        else:
            mbarrier.arrive(shared.kv_empty, count=1)
        tile_index = work_queue.read(queue, t, 4)
        work = find_work_tile(C, tile_index, pointers, schedule)
        head = gradient_head(C, tile_index, work, schedule)
        if C.HAS_DROPOUT:
            dv = dv * numbers.keep_scale
        store_gradient(C, W, dv_desc, work, head, shared.gradient.index(W), dv, schedule)
        store_gradient(C, W, dk_desc, work, head, shared.gradient.index(W), dk * numbers.scale, schedule)
        queue.release(t)
        t += 1
        tile_index = work_queue.peek(queue, t, 4)
    tma.store_wait(0)


@gluon.jit
def wait_for_preprocess():
    """Wait for the preprocess kernel: with programmatic dependent launch, programs start before it ends."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [gl.to_tensor(1)], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon_kernel(do_not_specialize=("pointers",))
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, dq_add_desc, dq_accum_desc, dk_desc,
    dv_desc, bias_desc, dbias_desc, pointers, C: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV.

    Grid: at most one program per multiprocessor; each takes work tiles from the work queue.
    ``dq_add_desc`` and ``dq_accum_desc`` describe the same memory. Unused descriptors are None.
    """
    wait_for_preprocess()
    accum = accum_of(pointers.scalars.sizes, pointers)
    dtype: gl.constexpr = q_desc.dtype
    q = make_channel(q_desc, C.STAGES, 2, 1)
    do = make_channel(do_desc, C.STAGES, 2, 1)
    k = gl.allocate_shared_memory(dtype, [1] + k_desc.block_type.shape, k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1] + v_desc.block_type.shape, v_desc.layout)
    neg_lse = gl.allocate_shared_memory(
        gl.float32, [C.STAGES] + neg_lse_desc.block_type.shape, neg_lse_desc.layout
    )
    neg_delta = gl.allocate_shared_memory(
        gl.float32, [C.STAGES] + neg_delta_desc.block_type.shape, neg_delta_desc.layout
    )
    # dS has keys as rows, but keys as columns if it is stored as a bias's gradient.
    DS_ROWS: gl.constexpr = C.BLOCK_M if C.STORES_DS else C.BLOCK_N
    DS_COLUMNS: gl.constexpr = C.BLOCK_N if C.STORES_DS else C.BLOCK_M
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([DS_ROWS, DS_COLUMNS], dtype)
    ds = gl.allocate_shared_memory(dtype, [2, DS_ROWS, DS_COLUMNS], ds_layout)
    bias = bias_tiles.over_ds(C, bias_desc, ds)
    dq_parts = gl.allocate_shared_memory(gl.float32, [2] + dq_add_desc.block_type.shape, dq_add_desc.layout)
    gradient = gl.allocate_shared_memory(dk_desc.dtype, [2] + dk_desc.block_type.shape, dk_desc.layout)
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
    shared = Shared(
        q, do, bias, kv_full, kv_empty, ds_full, dq_full, dq_empty, k, v, neg_lse, neg_delta, ds, dq_parts,
        gradient,
    )  # fmt: skip
    descs = BackwardDescriptors(q_desc, k_desc, v_desc, do_desc, neg_lse_desc, neg_delta_desc, bias_desc)
    queue = work_queue.make_work_queue(3)
    chunks = make_chunks(dq_accum_desc)
    gl.warp_specialize(
        [
            (consumer, (C, 0, queue, shared, dk_desc, dv_desc, pointers)),
            (consumer, (C, 1, queue, shared, dk_desc, dv_desc, pointers)),
            (producer, (C, queue, shared, descs, pointers)),
            (accumulate_dq, (C, queue, shared, dq_add_desc, dbias_desc, pointers, accum)),
            (postprocess, (
                C, chunks, dq_accum_desc, pointers, pointers.scalars.schedule, accum,
                pointers.scalars.numbers.scale,
            )),
        ],
        [4, 1, 1, POSTPROCESS_WARPS],
        [C.CONSUMER_REGISTERS, C.PRODUCER_REGISTERS, C.PRODUCER_REGISTERS, C.PRODUCER_REGISTERS],
    )  # fmt: skip
