"""Data that do not belong to the model are refused, by the setting that differs."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rows import train_vocabulary, write_data
from tests.small import SMALL
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import read_manifest, write_manifest
from xlme_ds.engine.build import require_fit


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Data in XLM's layout, as far as their manifests say."""
    folder = tmp_path_factory.mktemp("data") / "mixed"
    vocabulary = train_vocabulary(folder / "vocab")
    write_data(folder, 16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    for task in ("mono", "para"):
        manifest = read_manifest(folder / task)
        write_manifest(folder / task, replace(manifest, settings=manifest.settings | {"layout": "xlm"}))
    return Loader(folder, DataConfig(4, 4, 4), 1, 0.15)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary": 99}, r"the model has 99: set model\.vocabulary to "),
        ({"max_positions": 16}, r"rows of 32 tokens, model\.max_positions is 16: raise it to 32"),
        ({"layout": "xlme"}, r"mixed with --layout xlm, model\.layout is xlme: set it to xlm"),
    ],
)
def test_a_setting_that_differs(loader: Loader, changes: dict[str, object], words: str) -> None:
    model = replace(SMALL, vocabulary=loader.vocabulary_size, layout="xlm")
    require_fit(loader, model)
    with pytest.raises(ValueError, match=words):
        require_fit(loader, replace(model, **changes))  # type: ignore[arg-type]


def test_another_vocabulary_beside_the_rows(loader: Loader, tmp_path: Path) -> None:
    shutil.copytree(loader.folders[0], tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "vocab")
    other = Loader(tmp_path / "mixed", DataConfig(4, 4, 4), 1, 0.15)
    train_vocabulary(tmp_path / "mixed" / "vocab", size=90)
    model = replace(SMALL, vocabulary=loader.vocabulary_size, layout="xlm")
    with pytest.raises(ValueError, match="is not the vocabulary of the rows next to it: mix"):
        require_fit(other, model)
