"""The loss curve of 20 steps of every objective, some with dropout, is that in git: a change of the numbers is seen.

`python -m tests.engine.test_golden` writes the curves anew, where a change is meant.
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.engine.worker import tiny
from tests.rows import write_data
from xlme_ds.data.loader import Loader
from xlme_ds.engine.build import build_engine
from xlme_ds.objectives import OBJECTIVES, objective_of

STEPS = 20
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "loss_curves.json"
# Dropout with weights so large that it matters which numbers are dropped.
DROPOUT: dict[str, object] = dict(dropout=0.1, attention_dropout=0.1, init_std=0.2)
BTMLM: dict[str, object] = dict(pseudo_fractions=(0.1, 0.3), para_rows=0, language_embeddings=("de", "en", "fr"))
CASES: dict[str, dict[str, object]] = {
    "electra": {},
    "mlm": {},
    "ernie_m": {},
    "clm": {},
    "rts": {},
    "all_tokens": {},
    "corrective": dict(embedding_sharing="gdes"),
    "btmlm": BTMLM,
    "electra with dropout": DROPOUT,
    "btmlm with dropout": BTMLM | DROPOUT,
    # Of sentences and pairs in one step: sources that are written are longer than their rows.
    "mt with dropout": DROPOUT
    | dict(denoising=("0:1",), back_translation=("0:1",), language_embeddings=("de", "en", "fr")),
}
# Another processor adds float32 numbers in another order, which is about 1e-5 after 20 steps (test_parity.py); a sample
# of the generator that falls to the other side of a boundary, or a changed formula, shows as 1e-3 and more.
TOLERANCE = 1e-4


def curve(case: str, folder: Path) -> list[float]:
    """The plain engine in float32 on rows made from a seed."""
    data = folder / "mixed"
    if not data.exists():
        write_data(data, rows=96)
    run = tiny(dict(kind="plain"), micro_batch=4, objective=case.split()[0], **CASES[case])
    read = run.seed, run.objective.mask_fraction, 0, 1, run.model.language_embeddings, objective_of(run.objective)
    engine = build_engine(run, Loader(data, run.data, *read), None)
    return [engine.train_batch(step, 1e-3, detailed=True).metrics["loss"] for step in range(STEPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("case", CASES)
def test_the_curve_is_the_kept_one(case: str, folder: Path) -> None:
    assert curve(case, folder) == pytest.approx(json.loads(GOLDEN.read_text())[case], rel=TOLERANCE)


def test_every_curve_falls() -> None:
    """By more than the rows of one step differ from those of another."""
    for case, losses in json.loads(GOLDEN.read_text()).items():
        assert losses[-1] < 0.97 * losses[0], case


def test_every_objective_has_a_curve() -> None:
    assert {case.split()[0] for case in CASES} == OBJECTIVES.keys()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        curves = {case: [round(loss, 7) for loss in curve(case, Path(made))] for case in CASES}
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
