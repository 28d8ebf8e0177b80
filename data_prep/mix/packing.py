"""Items packed into rows: best-fit decreasing, and the rows shuffled."""

import numpy as np

from data_prep.sampling import Integers, permute


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items into bins of `capacity`: (int64 bin of each item, number of bins).

    Best-fit decreasing: items from long to short, each into the fullest bin it fits. Open bins are kept by the room
    they have left, and which rooms exist is one big integer: an item costs a few operations, however many the bins.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    assert order.size == 0 or (lengths[order[-1]] > 0 and lengths[order[0]] <= capacity)
    bins_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set when a bin with room r is open
    bins = 0
    chosen = []
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            same_room = bins_by_room[room]
            number = same_room.pop()
            if not same_room:
                rooms ^= 1 << room
        else:
            room, number = capacity, bins
            bins += 1
        chosen.append(number)
        room -= length
        if room:  # a full bin is never open
            bins_by_room[room].append(number)
            rooms |= 1 << room
    result = np.empty(order.size, dtype=np.int64)
    result[order] = chosen
    return result, bins


def pack_shuffled(lengths: np.ndarray, capacity: int, key: Integers) -> list[np.ndarray]:
    """Items of each row, rows in the order that `key` selects (packing itself puts long items into early rows)."""
    number, rows = pack(lengths, capacity)
    number = permute(number, max(rows, 1), key)
    items = np.argsort(number, kind="stable")
    return np.split(items, np.searchsorted(number[items], np.arange(1, rows)))
