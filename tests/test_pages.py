"""Pages by number against a model in plain Python: what every slot reads is what it wrote, and nothing leaks."""

import itertools

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from smcdecode.engine.pages import NULL, BlockTable, PagePool
from smcdecode.errors import OutOfPages

SLOTS, WIDTH, PAGES = 4, 4, 11  # fewer pages than SLOTS · WIDTH, so that they run out

each_slot = st.lists(st.integers(0, SLOTS - 1), min_size=SLOTS, max_size=SLOTS)
each_length = st.lists(st.integers(0, WIDTH), min_size=SLOTS, max_size=SLOTS)
some_slots = st.sets(st.integers(0, SLOTS - 1), min_size=1)


class Pages(RuleBasedStateMachine):
    """``wrote[s][c]`` is what slot s has in column c; ``memory[page]`` what a page holds."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(PAGES)
        self.table = BlockTable(self.pool, SLOTS, WIDTH)
        self.wrote = [[] for _ in range(SLOTS)]
        self.memory = {}
        self.prefixes = []
        self.stamp = itertools.count()

    def page(self, slot, column):
        return int(self.table.rows[slot, column])

    def write(self, slot, column):
        page = self.page(slot, column)
        assert int(self.pool.counts[page]) == 1, "a page is written that another slot reads"
        self.memory[page] = next(self.stamp)
        self.wrote[slot][column : column + 1] = [self.memory[page]]

    @rule(chosen=some_slots, lengths=each_length)
    def grow(self, chosen, lengths):
        slots = sorted(chosen)
        need = sum(max(lengths[s] - len(self.wrote[s]), 0) for s in slots)
        grow = lambda: self.table.grow(torch.tensor(slots), torch.tensor([lengths[s] for s in slots]))  # noqa: E731
        if need > self.pool.free:
            with pytest.raises(OutOfPages, match=f"{need} pages wanted, {self.pool.free} of {PAGES} free: raise"):
                grow()
            return
        grow()
        for slot in slots:
            for column in range(len(self.wrote[slot]), lengths[slot]):
                self.write(slot, column)

    @rule(chosen=some_slots, columns=each_length)
    def own_and_write(self, chosen, columns):
        slots = sorted(s for s in chosen if columns[s] < len(self.wrote[s]))
        chosen_columns = [columns[s] for s in slots]
        before = self.table.rows.clone()
        try:
            source, copies = self.table.own(torch.tensor(slots).long(), torch.tensor(chosen_columns).long())
        except OutOfPages:
            assert torch.equal(self.table.rows, before)
            return
        shared = sum(int((before == before[s, c]).sum()) > 1 for s, c in zip(slots, chosen_columns, strict=True))
        assert len(source) <= shared
        for old, new in zip(source.tolist(), copies.tolist(), strict=True):
            self.memory[new] = self.memory[old]
        self.reads_what_it_wrote()
        pages = [self.page(s, c) for s, c in zip(slots, chosen_columns, strict=True)]
        assert len(set(pages)) == len(pages)
        for slot, column in zip(slots, chosen_columns, strict=True):
            self.write(slot, column)

    @rule(ancestors=each_slot, keep=each_length)
    def select(self, ancestors, keep):
        self.table.select(torch.tensor(ancestors), torch.tensor(keep))
        self.wrote = [
            list(self.wrote[a]) if a == i else self.wrote[a][: keep[i]] for i, a in enumerate(ancestors)
        ]  # fmt: skip

    @rule(chosen=some_slots)
    def clear(self, chosen):
        self.table.clear(torch.tensor(sorted(chosen)))
        for slot in chosen:
            self.wrote[slot] = []

    @rule(n=st.integers(0, 3))
    def take_prompt(self, n):
        if n <= self.pool.free:
            self.prefixes.append(self.pool.take(n))

    @rule(which=st.integers(0, 10))
    def release_prompt(self, which):
        if self.prefixes:
            self.pool.release(self.prefixes.pop(which % len(self.prefixes)))

    @invariant()
    def reads_what_it_wrote(self):
        for slot, values in enumerate(self.wrote):
            assert [self.memory[self.page(slot, c)] for c in range(len(values))] == values
            assert int(self.table.used[slot]) == len(values)
            assert (self.table.rows[slot, len(values) :] == NULL).all()

    @invariant()
    def counts_are_right(self):
        self.pool.audit([self.table.rows, *self.prefixes])
        held = {int(p) for t in (self.table.rows, *self.prefixes) for p in t.flatten() if p != NULL}
        assert (self.pool.used, self.pool.free) == (len(held), PAGES - len(held))
        assert self.pool.peak >= self.pool.used

    def teardown(self):
        self.table.clear(torch.arange(SLOTS))
        for prefix in self.prefixes:
            self.pool.release(prefix)
        assert self.pool.used == 0
        assert sorted(self.pool.take(PAGES).tolist()) == list(range(1, PAGES + 1))


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_a_failed_take_takes_nothing():
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 3 free"):
        pool.take(2)
    assert pool.free == 1


def test_audit_finds_a_leak_a_double_free_and_a_stale_free_list():
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(AssertionError, match=r"page \d is held 0 times but counted 1"):
        pool.audit([])
    with pytest.raises(AssertionError, match=r"is held 2 times but counted 1"):
        pool.audit([pages, pages])
    pool.audit([pages])
    pool._free = torch.cat([pool._free, pages[:1]])
    with pytest.raises(AssertionError, match="free list"):
        pool.audit([pages])


def test_sharers_who_all_write_need_one_copy_less():
    table = BlockTable(PagePool(8), 4, 1)
    table.grow(torch.tensor([0]), torch.tensor([1]))
    table.select(torch.tensor([0, 0, 0, 3]), torch.tensor([1, 1, 1, 0]))
    source, copies = table.own(torch.tensor([0, 1, 2]), torch.zeros(3, dtype=torch.int64))
    assert len(source) == len(copies) == 2
    assert len(set(table.rows[:3, 0].tolist())) == 3


def test_a_sharer_who_does_not_write_keeps_the_page():
    table = BlockTable(PagePool(8), 2, 1)
    table.grow(torch.tensor([0]), torch.tensor([1]))
    table.select(torch.tensor([0, 0]), torch.tensor([1, 1]))
    before = int(table.rows[1, 0])
    source, copies = table.own(torch.tensor([0]), torch.tensor([0]))
    assert (source.tolist(), int(table.rows[1, 0])) == ([before], before)
    assert int(table.rows[0, 0]) == copies.item() != before
