"""Work in several processes comes back in order."""

import os

import pytest

from tformer.base.workers import group_by_size, map_ordered


def test_tasks_come_back_in_order_and_few_are_under_way():
    seen = []

    def tasks():
        for i in range(60):
            seen.append(i)
            yield str(i)

    for i, found in enumerate(map_ordered(int, tasks(), num_workers=2)):
        assert found == i and len(seen) <= i + 6
    assert len(seen) == 60
    with pytest.raises(ValueError, match="num_workers"):
        list(map_ordered(int, [], num_workers=0))
    with pytest.raises(ValueError, match="invalid literal"):
        list(map_ordered(int, ["1", "x"], num_workers=2))


def test_a_process_that_dies_is_told_of():
    with pytest.raises(RuntimeError, match="a process died at its task"):
        list(map_ordered(os._exit, [1, 1, 1], num_workers=2))


def test_gather_fills_tasks():
    made = list(group_by_size(["abc", "", "de", "f" * 9, "g"], 5))
    assert made == [["abc", "de"], ["f" * 9], ["g"]]
