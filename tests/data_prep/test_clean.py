from collections import Counter

import pytest

from data_prep.filters.clean import Counts, add_counts, clean_line, clean_lines, text_warnings

LINES: list[tuple[bytes, str, dict[str, int]]] = [
    ("Würde 尊厳".encode(), "Würde 尊厳", {}),
    (b"  a \xc2\xa0", "a", {}),
    (b"a\xffb", "a\ufffdb", {"invalid_utf8": 1}),
    (b"a\xed\xa0\x80b", "a\ufffd\ufffd\ufffdb", {"invalid_utf8": 1}),  # a surrogate is no UTF-8
    (b"a\x00b\x1bc\x7f", "abc", {"control_character": 1}),
    ("a\u009bb".encode(), "ab", {"control_character": 1}),
    (b"a\tb", "a\tb", {}),
    (b"a\r", "a", {"carriage_return": 1}),
    (b"a\r\r", "a", {"carriage_return": 1}),
    (b"a\rb\r", "a b", {"carriage_return_inside": 1}),
    (b"\xef\xbb\xbfa", "a", {"byte_order_mark": 1}),
    (" \ufeff\u3000\ufeff a\ufeffb".encode(), "a\ufeffb", {"byte_order_mark": 1}),
    ("\x00\ufeff\ra".encode(), "a", {"byte_order_mark": 1, "carriage_return_inside": 1, "control_character": 1}),
    (" \ufeff".encode(), "", {"byte_order_mark": 1}),
    ("a\u2028b\u0085c".encode(), "a\u2028b\u0085c", {}),
    (b"\x00\r", "", {"carriage_return": 1, "control_character": 1}),
]


@pytest.mark.parametrize(("raw", "text", "repaired"), LINES)
def test_a_line_is_repaired_and_the_repair_counted(raw: bytes, text: str, repaired: dict[str, int]) -> None:
    counter: Counter[str] = Counter()
    assert clean_line(raw, counter) == text
    assert counter == repaired


@pytest.mark.parametrize("more", [0, 1, 4000])
def test_many_lines_are_repaired_as_each_of_them(more: int) -> None:
    """Each between sound lines, and all together."""
    for lines in (*([line] for line in LINES), LINES, LINES[::-1]):
        counter = Counter[str]()
        found = clean_lines(b"\n".join([*[b" fine"] * more, *(raw for raw, *_ in lines), b"fine"]), counter)
        assert found == ["fine"] * more + [text for _, text, _ in lines] + ["fine"]
        assert counter == sum((Counter(repaired) for *_, repaired in lines), Counter())


@pytest.mark.parametrize(
    ("reason", "most"), [("invalid_utf8", 2), ("control_character", 10), ("carriage_return_inside", 10), ("unknown", 5)]
)
def test_text_with_more_than_so_many_per_cent_of_a_fault_is_doubted(reason: str, most: int) -> None:
    for number in (most, most + 1):
        unknown = number if reason == "unknown" else 0
        warnings = [*text_warnings(100, {reason: number}, 100, unknown)]
        assert [warning.partition("%")[0] for warning in warnings] == [str(number)] * (number > most)


def test_a_share_of_lines_is_no_more_than_all() -> None:
    """A line may need a repair in several parts; and a file may have no lines."""
    assert [next(text_warnings(lines, {"invalid_utf8": 3})).partition("%")[0] for lines in (4, 3, 2, 0)] == [
        "75", "100", "100", "100",
    ]  # fmt: skip


def test_lost_units_are_our_own_mistake() -> None:
    counts = Counts("pairs", units_in=3, units=2)
    with pytest.raises(AssertionError, match="pairs were lost"):
        counts.as_json()
    with pytest.raises(AssertionError, match="paragraphs were lost"):
        Counts("documents", units_in=1, units=1, paragraphs_in=2, paragraphs=1).as_json()
    counts.dropped["empty_side"] += 1
    assert counts.as_json()["pairs_in"] == 3


def test_counts_add_up_by_reason() -> None:
    a = Counts("documents", units_in=2, units=1, tokens=5, files=1, dropped=Counter(no_token=1))
    b = Counts("documents", units_in=2, units=2, files=1, repaired=Counter(invalid_utf8=3))
    total = add_counts(add_counts({}, a.as_json()), b.as_json())
    assert (total["documents_in"], total["documents"], total["tokens"], total["files"]) == (4, 3, 5, 2)
    assert (total["dropped"], total["repaired"]) == ({"no_token": 1}, {"invalid_utf8": 3})
