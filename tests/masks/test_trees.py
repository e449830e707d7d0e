"""Trees of packed segments: each token sees its path from the root, and the shared part is there once."""

from __future__ import annotations

import itertools
import pickle
from random import Random

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import masks, testing
from targets import INTERPRETING, Target
from walk import walk

pytestmark = [pytest.mark.numerical, pytest.mark.quick]

Forest = tuple[list[int], list[int]]
"""(length of each segment, parent of each segment)."""

PROMPT: Forest = [37, 20, 9, 0, 26], [-1, 0, 0, 0, 0]
TURNS: Forest = [19, 30, 11, 23, 5, 40], [-1, 0, 1, 1, -1, 4]
SHUFFLED: Forest = [20, 9, 33, 14, 27], [2, 4, -1, 0, 2]  # parents behind their children, siblings apart


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def paths(forest: Forest) -> list[Tensor]:
    """The tokens of each segment's path from its root, the segment included."""
    lengths, parent = forest
    starts, found = offsets(lengths).tolist(), []
    for i in range(len(lengths)):
        path: list[int] = []
        at = i
        while at >= 0:
            path = [*range(starts[at], starts[at + 1]), *path]
            at = parent[at]
        found.append(torch.tensor(path, dtype=torch.int64))
    return found


def dense(forest: Forest, total: int, window_left: int = -1) -> Tensor:
    """The mask of all scores, (total, total) bool, from the paths."""
    seen = torch.zeros(total, total, dtype=torch.bool)
    for length, path in zip(forest[0], paths(forest), strict=True):
        for place in range(len(path) - length, len(path)):
            first = max(place - window_left, 0) if window_left >= 0 else 0
            seen[path[place], path[first : place + 1]] = True
    return seen


def random_forest(rng: Random, segments: int, longest: int) -> Forest:
    order = rng.sample(range(segments), segments)
    parent = [-1] * segments
    for n in range(1, segments):
        if rng.random() < 0.85:
            parent[order[n]] = order[rng.randrange(n)]
    return [rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(segments)], parent


def tensors(total: int, heads_kv: int = 2, head_dim: int = 16, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(total)
    shapes = (4, heads_kv, heads_kv)
    made = (torch.randn(total, heads, head_dim, dtype=dtype, generator=generator) for heads in shapes)
    return [tensor.requires_grad_() for tensor in made]


def both_passes(attend, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    out, lse = attend(*inputs)
    dout = testing.random_tensor(out.shape, out.dtype, out.device)
    return out, lse, *torch.autograd.grad(out, inputs, dout)


def check(forest: Forest, tail: int = 0, size: int | tuple[int, int] = 16, window_left: int = -1) -> None:
    total = sum(forest[0]) + tail
    cu_seqlens, parent = offsets(forest[0]), torch.tensor(forest[1], dtype=torch.int32)
    seen = dense(forest, total, window_left)
    mask = masks.create_tree_mask(cu_seqlens, parent, total, BLOCK_SIZE=size, window_left=window_left)
    places = torch.arange(total)
    assert torch.equal(mask.mask_mod(0, 0, places[:, None], places), seen)
    inputs = tensors(total)

    def plain(*qkv):
        out, lse = flashtile.attention(*(t[None] for t in qkv), mask=seen, return_lse=True)
        return out[0], lse[0]

    def by_blocks(*qkv):
        out, lse = flashtile.attention(*(t[None] for t in qkv), block_mask=mask, return_lse=True)
        return out[0], lse[0]

    def tree(*qkv):
        return flashtile.tree_attention(*qkv, cu_seqlens, parent, window_left=window_left, return_lse=True)

    expected = both_passes(plain, inputs)
    for attend in (by_blocks, tree):
        torch.testing.assert_close(both_passes(attend, inputs), expected)


@walk("forest", [PROMPT, TURNS, SHUFFLED])
@walk("tail", [0, 5])
def test_a_token_sees_its_path(forest: Forest, tail: int) -> None:
    check(forest, tail)


@walk("seed", range(12))
def test_random_forests(seed: int) -> None:
    rng = Random(seed)
    forest = random_forest(rng, rng.choice([1, 2, 5, 13]), 30)
    check(forest, rng.choice([0, 3]), window_left=rng.choice([-1, 0, 12, 40]))


@pytest.mark.parametrize("size", [(16, 32), (32, 16)])
def test_blocks_of_two_sizes(size: tuple[int, int]) -> None:
    for forest in (PROMPT, TURNS, SHUFFLED):
        check(forest, size=size)
        check(forest, size=size, window_left=21)


def test_no_segments() -> None:
    check(([], []))
    check(([], []), 3)
    check(([0, 0], [1, -1]))


def test_a_chain_is_one_causal_sequence() -> None:
    """Fifty segments, each the only child of the one before, in an order of no meaning."""
    order = Random(0).sample(range(50), 50)
    parent, place = [-1] * 50, torch.empty(0, dtype=torch.int64)
    for before, after in itertools.pairwise(order):
        parent[after] = before
    lengths = [1 + n % 5 for n in range(50)]
    place = paths((lengths, parent))[order[-1]]
    inputs = tensors(len(place))
    out = flashtile.tree_attention(*inputs, offsets(lengths), torch.tensor(parent))
    expected = flashtile.attention(*(t[None, place] for t in inputs), causal=True)
    torch.testing.assert_close(out[place], expected[0])


@pytest.mark.parametrize("forest", [PROMPT, TURNS, SHUFFLED])
def test_gradients_are_those_of_repeated_prefixes(forest: Forest) -> None:
    """Each path from root to leaf as its own sequence: dk and dv of a prefix are sums over its copies."""
    lengths, parent = forest
    leaves = [i for i in range(len(lengths)) if i not in parent]
    packed = [paths(forest)[leaf] for leaf in leaves]
    index = torch.cat(packed)
    inputs = tensors(sum(lengths))
    weight = testing.random_tensor((sum(lengths), 4, 16), torch.float64, "cpu")

    def loss(out: Tensor) -> Tensor:
        return (out * weight).sum()

    tree = flashtile.tree_attention(*inputs, offsets(lengths), torch.tensor(parent))
    cu_seqlens, longest = offsets([len(path) for path in packed]).int(), max(map(len, packed))
    repeated = flashtile.flash_attn_varlen_func(
        *(t[index] for t in inputs), cu_seqlens, cu_seqlens, longest, longest, causal=True
    )
    first = {token: row for row, token in reversed([*enumerate(index.tolist())])}  # one copy of each token
    once = repeated[[first[token] for token in range(len(tree))]]
    torch.testing.assert_close(once, tree)
    found = torch.autograd.grad(loss(tree), inputs)
    torch.testing.assert_close(torch.autograd.grad(loss(once), inputs), found)


def test_blocks_beyond_a_window_are_skipped() -> None:
    """A row of blocks has those that the window meets: three, for 32 keys in blocks of 16."""
    mask = masks.create_tree_mask(
        offsets([160, 80]), torch.tensor([-1, 0]), 240, BLOCK_SIZE=16, window_left=31
    )
    exact = masks.create_block_mask(mask.mask_mod, None, None, 240, 240, BLOCK_SIZE=16)
    for ours, wanted in zip(mask.lists, exact.lists, strict=True):
        assert torch.equal(ours, wanted)
    assert int((mask.kv_num_blocks + mask.full_kv_num_blocks).max()) == 3


@pytest.mark.parametrize("forest", [PROMPT, TURNS])
def test_blocks_in_depth_first_order_are_exact(forest: Forest) -> None:
    total = sum(forest[0])
    mask = masks.create_tree_mask(offsets(forest[0]), torch.tensor(forest[1]), total, BLOCK_SIZE=16)
    exact = masks.create_block_mask(mask.mask_mod, None, None, total, total, BLOCK_SIZE=16)
    for ours, wanted in zip(mask.lists, exact.lists, strict=True):
        assert torch.equal(ours, wanted)


def test_backends(target: Target) -> None:
    lengths, parent = SHUFFLED
    mask = masks.create_tree_mask(
        offsets(lengths), torch.tensor(parent), sum(lengths), target.device, BLOCK_SIZE=16, window_left=35
    )
    shapes = [(1, sum(lengths), heads, 16) for heads in (2, 1, 1, 2)]
    dtype = torch.float16
    q, k, v, dout = (testing.random_tensor(s, dtype, target.device, seed=i) for i, s in enumerate(shapes))
    testing.check(q, k, v, dout=dout, block_mask=mask, backend=target.backend)


def test_options() -> None:
    lengths, parent = PROMPT
    total, sink = sum(lengths), torch.randn(4, dtype=torch.float64)
    options = {"softmax_scale": 0.3, "softcap": 2.0, "sink": sink}
    q, k, v = (t.detach() for t in tensors(total))
    arguments = offsets(lengths), torch.tensor(parent)
    out, lse = flashtile.tree_attention(q, k, v, *arguments, **options, return_lse=True, deterministic=True)
    expected = flashtile.attention(
        q[None], k[None], v[None], mask=dense(PROMPT, total), **options, return_lse=True
    )
    torch.testing.assert_close((out[None], lse[None]), expected)
    with pytest.raises(NotImplementedError, match="hopper"):
        flashtile.tree_attention(q, k, v, *arguments, backend="hopper")


def test_a_mask_pickles() -> None:
    lengths, parent = TURNS
    mask = masks.create_tree_mask(offsets(lengths), torch.tensor(parent), sum(lengths), window_left=9)
    q, k, v = (t[None] for t in tensors(sum(lengths)))
    again = pickle.loads(pickle.dumps(mask))
    assert torch.equal(
        flashtile.attention(q, k, v, block_mask=again), flashtile.attention(q, k, v, block_mask=mask)
    )


CU_SEQLENS, PARENT = offsets(PROMPT[0]), torch.tensor(PROMPT[1])


@walk(
    ("error", "words", "wrong"),
    [
        (TypeError, "cu_seqlens must be a torch.Tensor, got list", {"cu_seqlens": [0, 5]}),
        (TypeError, "parent must be int32 or int64, got torch.float32", {"parent": PARENT.float()}),
        (ValueError, r"cu_seqlens must have shape \(segments \+ 1,\)", {"cu_seqlens": CU_SEQLENS[None]}),
        (ValueError, r"parent must have shape \(segments,\) = \(5,\)", {"parent": PARENT[1:]}),
        (ValueError, "cu_seqlens must start with 0, got 1", {"cu_seqlens": CU_SEQLENS + 1}),
        (ValueError, "cu_seqlens must not decrease", {"cu_seqlens": torch.tensor([0, 9, 7, 7, 8, 9])}),
        (ValueError, "cu_seqlens must end within the tensor's 92 tokens", {"cu_seqlens": CU_SEQLENS * 2}),
        (ValueError, "parent must be from -1 to 4 .* got 5", {"parent": PARENT + 5}),
        (ValueError, "parent must be from -1 to 4 .* got -2", {"parent": PARENT - 1}),
        (ValueError, "parent .* got a cycle above segment 1", {"parent": torch.tensor([-1, 2, 3, 1, 0])}),
        (ValueError, "parent .* got a cycle above segment 0", {"parent": torch.arange(5)}),
        (TypeError, "window_left must be an int, got tuple", {"window_left": (4, 0)}),
        (ValueError, "window_left must be from -1 to", {"window_left": -2}),
        (TypeError, "q must be a torch.Tensor", {"q": None}),
        (ValueError, "q must have shape", {"q": torch.zeros(1, 92, 4, 16)}),
        (ValueError, "v must have shape .* total of q, got shape", {"v": torch.zeros(91, 2, 16)}),
    ],
)
def test_what_is_refused(error, words, wrong) -> None:
    q, k, v = (t.detach() for t in tensors(92))
    good = {"q": q, "k": k, "v": v, "cu_seqlens": CU_SEQLENS, "parent": PARENT}
    with pytest.raises(error, match=words):
        flashtile.tree_attention(**good | wrong)


def test_the_arguments_of_a_mask_alone() -> None:
    for wrong, words in ((-1, "total must be"), ("9", "total must be"), (91, "end within the tensor's 91")):
        with pytest.raises((TypeError, ValueError), match=words):
            masks.create_tree_mask(CU_SEQLENS, PARENT, wrong)
    with pytest.raises(ValueError, match="BLOCK_SIZE must be"):
        masks.create_tree_mask(CU_SEQLENS, PARENT, 92, BLOCK_SIZE=8)


def attend_in_tree(q, k, v, cu_seqlens, parent):
    return flashtile.tree_attention(q, k, v, cu_seqlens, parent)


def attend_by_mask(q, k, v, mask):
    return flashtile.attention(q[None], k[None], v[None], block_mask=mask)[0]


@pytest.mark.parametrize("attend", [attend_in_tree, attend_by_mask])
def test_one_compiled_graph_serves_all_trees(attend) -> None:
    """The sizes of the first call all differ, because torch assumes that equal ones stay equal."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    for lengths, parent in (
        ([130, 61, 40, 9, 31, 22], [-1, 0, 0, 1, 0, -1]),
        ([350, *[30] * 7], [-1] + [0] * 7),
    ):
        q, k, v = (t.detach() for t in tensors(sum(lengths), dtype=torch.float32))
        cu_seqlens, parents = offsets(lengths), torch.tensor(parent)
        expected = flashtile.tree_attention(q, k, v, cu_seqlens, parents)
        tree = (cu_seqlens, parents)
        if attend is attend_by_mask:
            tree = (masks.create_tree_mask(*tree, sum(lengths)),)
        torch.testing.assert_close(compiled(q, k, v, *tree), expected)
    assert len(graphs) == 1
    torch._dynamo.reset()


@pytest.mark.skipif(INTERPRETING, reason="interpreted kernels are not compiled")
@pytest.mark.parametrize("head_dim", [64, 256])
def test_another_tree_needs_no_new_kernel(head_dim: int) -> None:
    pytest.importorskip("triton")
    from flashtile.backends.common.device import Target as Gpu
    from flashtile.compilation.calls import calls_of
    from flashtile.compilation.compiling import _wanted
    from flashtile.op.operation import remembering

    gpus = [Gpu("H200", (9, 0), 132), Gpu("A100", (8, 0), 108)]
    trees = (([200, 190, 67], [-1, 0, 0]), ([90, 71, 61, 58, 55, 160], [-1, 0, 1, 1, -1, 4]))
    kernels = []
    with remembering() as remembered:
        for lengths, parent in trees:
            inputs = tensors(sum(lengths), 4, head_dim, torch.bfloat16)
            flashtile.tree_attention(*inputs, offsets(lengths), torch.tensor(parent)).sum().backward()
            wanted, failures = _wanted(calls_of(remembered), gpus)
            assert not failures
            kernels.append(len(wanted))
    assert kernels[0] == kernels[1] >= 6
