"""Pack items into rows by best-fit decreasing, and shuffle the rows."""

import numpy as np

from data_prep.sampling import Integers, permute


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items into bins of `capacity`: (int64 bin of each item, number of bins).

    Best-fit decreasing: items from long to short, each into the fullest bin it fits. Open bins are listed by the room
    they have left, and the bits of one big integer mark the lists that have bins. So an item takes a few operations,
    however many bins there are.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    assert order.size == 0 or (lengths[order[-1]] > 0 and lengths[order[0]] <= capacity)
    bins_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set while a bin with room r is open
    bins = 0
    bin_numbers = []
    for length in lengths[order].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # by the lowest set bit: the fullest bin
            same_room = bins_by_room[room]
            bin_number = same_room.pop()
            if not same_room:
                rooms ^= 1 << room
        else:
            room, bin_number = capacity, bins
            bins += 1
        bin_numbers.append(bin_number)
        room -= length
        if room:  # a full bin is never open
            bins_by_room[room].append(bin_number)
            rooms |= 1 << room
    result = np.empty(order.size, dtype=np.int64)
    result[order] = bin_numbers
    return result, bins


def pack_shuffled(lengths: np.ndarray, capacity: int, key: Integers) -> list[np.ndarray]:
    """Pack items; returns the items of each row, with the rows shuffled by `key` as packing puts long items first."""
    row_of_item, rows = pack(lengths, capacity)
    row_of_item = permute(row_of_item, max(rows, 1), key)
    items = np.argsort(row_of_item, kind="stable")
    return np.split(items, np.searchsorted(row_of_item[items], np.arange(1, rows)))
