"""Pack items into rows by best-fit decreasing, and shuffle the rows."""

import numpy as np

from data_prep.sampling import Integers, permute


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack items of these lengths into bins of `capacity`. Returns (bin of each item, int64 [items]; number of bins).

    Best-fit decreasing: the items are packed from long to short, each into the fullest bin in which it fits. There is a
    list of open bins for each amount of room that is left in them, and the bits of one big integer mark the lists that
    are not empty. So an item takes a few operations, however many bins there are.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    assert order.size == 0 or (lengths[order[-1]] > 0 and lengths[order[0]] <= capacity)
    bins_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    open_rooms = 0  # bit r is set while a bin with room r is open
    bins = 0
    bin_of_sorted_item = []  # from the longest item to the shortest
    for length in lengths[order].tolist():
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1  # the lowest bit: the fullest bin that fits
            same_room = bins_by_room[room]
            item_bin = same_room.pop()
            if not same_room:
                open_rooms ^= 1 << room
        else:
            room, item_bin = capacity, bins
            bins += 1
        bin_of_sorted_item.append(item_bin)
        room -= length
        if room:  # a full bin is never open
            bins_by_room[room].append(item_bin)
            open_rooms |= 1 << room
    bin_of_item = np.empty(order.size, dtype=np.int64)
    bin_of_item[order] = bin_of_sorted_item
    return bin_of_item, bins


def pack_shuffled(lengths: np.ndarray, capacity: int, key: Integers) -> list[np.ndarray]:
    """Pack items of these lengths into rows; returns the indices of the items in each row.

    The rows are shuffled by `key`, because packing puts the longest items into the first rows.
    """
    row_of_item, rows = pack(lengths, capacity)
    row_of_item = permute(row_of_item, max(rows, 1), key)
    items = np.argsort(row_of_item, kind="stable")
    return np.split(items, np.searchsorted(row_of_item[items], np.arange(1, rows)))
