"""The numbers in the plots of `stats`, read from the SVG images by their axes."""

import io
import re
from base64 import b64decode
from collections import Counter
from math import log
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

from data_prep.inspect.stats_plots import dropped_text_plot, length_plot, share_plot
from data_prep.inspect.stats_tables import EDGES, StatsLine, dropped_text_table

SVG = "{http://www.w3.org/2000/svg}"


def parts(svg: bytes, kind: str) -> list[ElementTree.Element]:
    """The groups of an image whose ids are `kind` and a number; comments, which hold the text of labels, stay."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    groups = ElementTree.fromstring(svg, parser).iter(f"{SVG}g")
    return [group for group in groups if re.fullmatch(rf"{kind}_\d+", group.get("id", ""))]


def places(group: ElementTree.Element) -> list[tuple[float, float]]:
    """Where a group has its marks."""
    marks = (mark for mark in group.iter(f"{SVG}use") if mark.get("x"))
    return [(float(mark.get("x", "")), float(mark.get("y", ""))) for mark in marks]


def ticks(axes: ElementTree.Element, kind: str) -> dict[str, float]:
    """Where the labelled ticks of an axis are, by their labels."""
    found = {}
    for tick in parts(ElementTree.tostring(axes), kind):
        comments = [str(part.text) for part in tick.iter() if part.tag is ElementTree.Comment]
        texts = ["".join(text.itertext()) for text in tick.iter(f"{SVG}text")]
        if comments or texts:
            label = re.sub(r"\$(?:\\mathdefault\{(.*)\})?\$", r"\1", (comments or texts)[0].strip())
            found[label] = places(tick)[0][kind == "ytick"]
    return found


def bars(axes: ElementTree.Element, across: bool = False) -> list[tuple[float, float]]:
    """(lower end, upper end) of each bar of an axes, in the numbers at its ticks; `across`: the bars lie."""
    numbers = ticks(axes, "xtick" if across else "ytick")
    (low, start), *_, (high, end) = sorted((float(label), place) for label, place in numbers.items())
    found = []
    for path in axes.iter(f"{SVG}path"):
        corners = np.array(re.findall(r"[-\d.]+", path.get("d", "")), float)
        if path.get("clip-path") and len(corners) == 8:
            ends = low + (corners[0 if across else 1 :: 2] - start) / (end - start) * (high - low)
            found.append((float(ends.min()), float(ends.max())))
    return found


def test_shares_repeats_unknown_tokens_and_tokens_a_character() -> None:
    line = StatsLine("aa", 800, 9, 3, 0, 0, 200, 4, 400, 0.8, 0.5, used=30, available=10)
    other = StatsLine("bb", 900, 9, 7, 0, 0, 100, 6, 50, 0.1, 0.4, used=20, available=20)
    svg = share_plot([line, other], 0.7)
    _, *axes = parts(svg, "axes")
    tops = [[top for _, top in bars(each)] for each in axes]
    assert tops == [pytest.approx(values, abs=0.01) for values in ((3, 1), (2, 6), (0.5, 2))]
    before, after = ([y for _, y in places(group)] for group in parts(svg, "PathCollection")[:2])
    decade = (before[1] - before[0]) / log(0.8 / 0.1)  # log scale; y goes down
    assert (after[1] - after[0]) / decade == pytest.approx(log(0.5 / 0.4), abs=0.01)
    assert (after[0] - before[0]) / decade == pytest.approx(log(0.8 / 0.5), abs=0.01)


def test_losses_are_stacked() -> None:
    """By hand: of ten pairs two, three and one, of a hundred thirty; the reason of most pairs is lowest."""
    table = dropped_text_table("pairs", {"aa": 10, "bb": 100}, {"aa": Counter(x=2, y=3, z=1), "bb": Counter(x=30)})
    assert table.names == ["aa", "bb"]
    (axes,) = parts(dropped_text_plot(table), "axes")
    expected = [(0, 20), (0, 30), (20, 50), (30, 30), (50, 60), (30, 30)]
    assert bars(axes) == [pytest.approx(ends, abs=0.01) for ends in expected]


def test_records_of_each_length() -> None:
    """From the shortest to the longest bin that has any; labels at the powers of two."""
    lengths = {name: np.zeros(len(EDGES), int) for name in ("aa", "bb")}
    for name, edge, records in (("aa", 4, 3), ("aa", 8, 1), ("bb", 8, 1), ("bb", 22, 2)):
        lengths[name][EDGES.index(edge)] = records
    by_name, overall = parts(length_plot(lengths), "axes")
    assert bars(overall, across=True) == [pytest.approx((0, records), abs=0.01) for records in (3, 0, 2, 0, 0, 2)]
    # The shades of the columns: a half of aa's and a third of bb's records; the largest share has the darkest one.
    (image,) = by_name.iter(f"{SVG}image")
    data = image.get("{http://www.w3.org/1999/xlink}href", "").partition("base64,")[2]
    shades = imread(io.BytesIO(b64decode(data)))  # from the lowest bin up: the page turns it over
    height, width, _ = shades.shape
    centres = shades[np.arange(1, 12, 2) * height // 12][:, np.arange(1, 4, 2) * width // 4]
    shares = np.array([[3, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 2]]).T / [4, 3]
    assert centres == pytest.approx(colormaps["Blues"](shares / shares.max()), abs=0.02)
    labels = [part.text for part in by_name.iter() if part.tag is ElementTree.Comment]
    assert [label.strip() for label in labels] == ["aa", "bb", "4", "8", "16", "tokens, from"]
