"""Open positions after sentences: the layout against one row at a time, the draws, and that neither order nor company
matters."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rows import write_data
from tests.small import item, rows_of
from xlme_ds.config import DataConfig, ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.loader import Loader
from xlme_ds.data.masking import masked_count
from xlme_ds.data.pseudo_parallel import PseudoSides
from xlme_ds.data.schema import BOS, EOS, PAD, UNK, Rows
from xlme_ds.objectives import objective_of

FRACTIONS = (0.05, 0.1, 0.15, 0.2)


def sentences(*lengths: int, width: int) -> Rows:
    rng = np.random.default_rng(len(lengths))
    return rows_of([[item(rng, length)] for length in lengths], width)


def opened(
    rows: Rows, fractions: tuple[float, ...] = FRACTIONS, languages: int = 3, first: int = 0, seed: int = 5
) -> Batch:
    numbers = np.arange(len(rows.tokens)) + first
    return PseudoSides(fractions, tuple(range(languages))).collate([(0, rows, numbers)], seed, 0.15)


@pytest.mark.parametrize("fraction", FRACTIONS)
@pytest.mark.parametrize("width", [8, 48])
def test_layout(width: int, fraction: float) -> None:
    """From one token to a full row, some of which have a document's end inside: of n tokens all stay that leave
    room."""
    rows = sentences(*range(1, width - 1), width=width)
    rows.tokens[6:, 3] = EOS
    batch = opened(rows, (fraction,))
    for row, n in enumerate(range(1, width - 1)):
        kept = max(m for m in range(n + 1) if m + fraction * m + 3 <= width)
        places = max(1, int(fraction * kept + 0.5))
        expected = [BOS, *rows.tokens[row, 1 : kept + 1].tolist(), EOS, *[PAD] * places, EOS]
        inside = len(expected)
        assert inside <= width
        assert batch.tokens_BT[row].tolist() == expected + [PAD] * (width - inside)
        assert batch.positions_BT[row].tolist() == [*range(inside)] + [0] * (width - inside)
        assert batch.segments_BT[row].tolist() == [1] * inside + [0] * (width - inside)
        assert batch.sides_BT[row].tolist() == [0] * (kept + 2) + [1] * (places + 1) + [0] * (width - inside)
        masked = [flat - row * width for flat in batch.masked_M.tolist() if flat // width == row]
        assert all(1 <= column <= kept and batch.tokens_BT[row, column] > UNK for column in masked)
        assert len(masked) == masked_count(sum(token > UNK for token in expected), 0.15)


def test_languages() -> None:
    """The sentence keeps its own, its second side has another, all others alike: 400 draws within 4 standard
    deviations."""
    batch = opened(sentences(*[20] * 1200, width=32), languages=4)
    first = batch.languages_BT[:, 0]
    drawn = Counter(zip(first.tolist(), batch.languages_BT.max(1).values.tolist(), strict=True))
    for row in range(1200):
        language, other = int(first[row]), batch.languages_BT[row][batch.sides_BT[row] == 1]
        assert (batch.languages_BT[row][(batch.sides_BT[row] == 0) & (batch.segments_BT[row] > 0)] == language).all()
        assert (other == other[0]).all() and other[0] != language and 0 <= other[0] < 4
        assert (batch.languages_BT[row][batch.segments_BT[row] == 0] == 0).all()
    others = Counter(int(batch.languages_BT[r][batch.sides_BT[r] == 1][0]) for r in range(1200) if first[r] == 0)
    assert set(others) == {1, 2, 3} and drawn
    assert all(count == pytest.approx(400 / 3, abs=4 * (400 * 2 / 9) ** 0.5) for count in others.values())
    alone = sentences(9, width=32)
    alone.languages[:] = 0
    assert (opened(alone, languages=1).languages_BT == 0).all(), "one language is its own translation"
    text = sentences(*[20] * 90, width=32)
    text.languages[:] = np.tile([1, 4, 7], 30)  # of more that the model knows
    batch = PseudoSides(FRACTIONS, (4, 1, 7)).collate([(0, text, np.arange(90))], 5, 0.15)
    written = [int(batch.languages_BT[row][batch.sides_BT[row] == 1][0]) for row in range(90)]
    assert set(written) == {1, 4, 7} and all(one != own for one, own in zip(written, text.languages, strict=True))


def test_fraction_and_language_are_independent() -> None:
    """Each of four fractions with each of two other languages, within 4 standard deviations of a chance of 1/8."""
    text = sentences(*[20] * 800, width=40)
    text.languages[:] = 0
    batch = opened(text)
    open_positions = ((batch.tokens_BT == PAD) & (batch.segments_BT > 0)).sum(1).tolist()
    drawn = Counter(zip(open_positions, batch.languages_BT.max(1).values.tolist(), strict=True))
    assert len(drawn) == 8
    assert all(count == pytest.approx(100, abs=4 * (800 * 7 / 64) ** 0.5) for count in drawn.values()), drawn


def test_every_fraction_is_drawn_as_often() -> None:
    batch = opened(sentences(*[20] * 1000, width=40))
    places = Counter(((batch.tokens_BT == PAD) & (batch.segments_BT > 0)).sum(1).tolist())
    assert set(places) == {1, 2, 3, 4}
    assert all(count == pytest.approx(250, abs=4 * (1000 * 3 / 16) ** 0.5) for count in places.values())
    again, other = (opened(sentences(*[20] * 1000, width=40), seed=seed) for seed in (5, 6))
    assert torch.equal(again.tokens_BT, batch.tokens_BT) and not torch.equal(other.tokens_BT, batch.tokens_BT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mixed", 40)


def test_a_row_is_the_same_on_any_rank_and_micro_batch(folder: Path) -> None:
    def step(micro_batch: int, world: int) -> list[Batch]:
        data = DataConfig(12, 0, micro_batch)
        btmlm = objective_of(ObjectiveConfig("btmlm", pseudo_fractions=FRACTIONS))
        return [
            batch
            for rank in range(world)
            for batch in Loader(folder, data, 7, 0.15, rank, world, maker=btmlm).micro_batches(5)
        ]

    (whole,) = step(12, 1)
    by_tokens = {tuple(row.tolist()): n for n, row in enumerate(whole.tokens_BT)}
    for batch in step(2, 3):
        for row, tokens in enumerate(batch.tokens_BT):
            n = by_tokens.pop(tuple(tokens.tolist()))
            for ours, theirs in zip(batch[:5], whole[:5], strict=True):
                assert torch.equal(ours[row], theirs[n])
    assert not by_tokens
    ours, theirs = (sorted(u for batch in step(*cut) for u in batch.uniforms_M.tolist()) for cut in ((2, 3), (12, 1)))
    assert ours == theirs
