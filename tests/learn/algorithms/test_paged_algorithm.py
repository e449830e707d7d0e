"""PagedAttention's memory: where pages lie, who shares them, when they are copied."""

import pytest
import torch
from algorithm_heads import Head, attention, random_head

from flashtile.algorithms import Memory, Trace, paged


def make(num_pages: int, page_size: int, trace: Trace | None = None) -> tuple[paged.PagedCache, Head]:
    head = random_head(2, 40, 8, 6)
    memory = Memory(1 << 16, element_bytes=1, trace=trace)
    return paged.PagedCache(memory, num_pages, page_size, 8, 6, like=head.k), head


def append(cache: paged.PagedCache, head: Head, sequence: str, tokens: range) -> None:
    for token in tokens:
        cache.append(sequence, head.k[token : token + 1], head.v[token : token + 1])


def check(cache: paged.PagedCache, head: Head, sequence: str, tokens: list[int]) -> None:
    """The sequence's cache is that of these tokens, although its pages may lie anywhere."""
    out, lse = cache.attend(sequence, head.q[:1])
    expected = attention(Head(head.q[:1], head.k[tokens], head.v[tokens], head.dout[:1]), causal=True)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)


def test_pages_are_taken_as_tokens_come():
    cache, head = make(num_pages=5, page_size=4)
    append(cache, head, "A", range(5))
    append(cache, head, "B", range(10, 12))
    append(cache, head, "A", range(5, 9))
    assert cache.tables == {"A": [0, 1, 3], "B": [2]}  # A's third page lies behind B's
    assert cache.ref_counts == [1, 1, 1, 1, 0]
    check(cache, head, "A", list(range(9)))
    check(cache, head, "B", [10, 11])


def test_a_fork_shares_pages_until_one_of_them_writes():
    trace = Trace()
    cache, head = make(num_pages=6, page_size=4, trace=trace)
    append(cache, head, "A", range(6))
    written = cache.memory.hbm_written
    cache.fork("A", "B")
    assert cache.memory.hbm_written == written
    assert cache.tables["A"] == cache.tables["B"] == [0, 1]
    assert cache.ref_counts[:2] == [2, 2]

    append(cache, head, "B", range(20, 21))
    assert cache.tables == {"A": [0, 1], "B": [0, 2]}
    assert cache.ref_counts[:3] == [2, 1, 1]
    copied = 2 * (8 + 6)  # two tokens of the page
    assert cache.memory.hbm_written == written + copied + 8 + 6
    append(cache, head, "A", range(6, 7))  # alone with its page now: no copy
    assert cache.tables["A"] == [0, 1]
    check(cache, head, "A", list(range(7)))
    check(cache, head, "B", [*range(6), 20])

    changes = [e for e in trace.events if e.kind == "page" and e.op == "copy_on_write"]
    assert [(e.data["sequence"], e.data["block"], e.data["source"]) for e in changes] == [("B", 2, 1)]
    assert changes[0].data["tables"] == {"A": [0, 1], "B": [0, 2]}
    assert changes[0].data["ref_counts"] == [2, 1, 1, 0, 0, 0]


def test_a_full_last_page_is_shared_for_good():
    cache, head = make(num_pages=6, page_size=4)
    append(cache, head, "A", range(8))
    cache.fork("A", "B")
    append(cache, head, "A", range(8, 9))
    append(cache, head, "B", range(20, 21))
    assert cache.tables == {"A": [0, 1, 2], "B": [0, 1, 3]}
    assert cache.ref_counts == [2, 2, 1, 1, 0, 0]
    check(cache, head, "B", [*range(8), 20])


def test_freed_pages_are_taken_again():
    cache, head = make(num_pages=3, page_size=4)
    append(cache, head, "A", range(4))
    cache.fork("A", "B")
    append(cache, head, "A", range(4, 5))
    cache.free("A")
    assert cache.ref_counts == [1, 0, 0]
    append(cache, head, "B", range(20, 26))
    assert cache.tables == {"B": [0, 1, 2]}
    check(cache, head, "B", [*range(4), *range(20, 26)])
    with pytest.raises(MemoryError, match="all 3 pages are held: sequence 'B' cannot grow"):
        append(cache, head, "B", range(26, 29))


@pytest.mark.parametrize("prompt", [1, 7, 8, 39, 40])
@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_two_sequences_from_one_prompt(prompt, page_size):
    head = random_head(2, 40, 8)
    trace = Trace()
    memory = Memory(element_bytes=1, trace=trace)
    out, lse = paged.forked(*head[:3], memory, prompt=prompt, page_size=page_size)
    assert trace.totals() == memory.totals()
    for i in range(2):
        tokens = [*range(prompt), *range(prompt + i, 40, 2)]
        expected = attention(
            Head(head.q[i : i + 1], head.k[tokens], head.v[tokens], head.dout[:1]), causal=True
        )
        torch.testing.assert_close(out[i : i + 1], expected.out)
        torch.testing.assert_close(lse[i : i + 1], expected.lse)


@pytest.mark.parametrize("prompt", [0, 41])
def test_a_prompt_must_exist(prompt):
    with pytest.raises(ValueError, match=f"prompt must be from 1 to the 40 tokens of k, got {prompt}"):
        paged.forked(*random_head(2, 40, 8)[:3], Memory(), prompt=prompt)
