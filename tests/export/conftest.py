"""Hugging Face's libraries, kept away from the network and from the caches of this account."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import transformers.dynamic_module_utils

from tests.launch import python
from tests.rows import train_vocabulary, write_data
from xlme_ds.data.vocabulary import Vocabulary


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Both read the environment when they are imported, which another test may have done before.
    home = tmp_path_factory.mktemp("huggingface")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(home))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(home / "modules"))
        yield


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return train_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocab")


@pytest.fixture(scope="session")
def data(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixed folder and one of held-out rows."""
    root = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("mixed", "heldout")):
        write_data(root / name, rows=40, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=seed)
        shutil.copytree(vocabulary.path.parent, root / name / "vocab")
    return root


@pytest.fixture(scope="session")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished pre-training run of two steps."""
    out = tmp_path_factory.mktemp("runs") / "small"
    command = (
        "--recipe quickstart --engine.kind plain --engine.precision fp32 --train.steps 2 --optimizer.warmup-steps 1 "
    )
    command += "--data.mono-rows 4 --data.para-rows 4 --data.micro-batch 4 --model.vocabulary 120 --model.width 32 "
    command += "--model.heads 4 --model.feed-forward 64 --model.generator-layers 1 --model.discriminator-layers 3 "
    command += "--model.max-positions 32 --model.embedding-sharing gdes"
    folders = ["--data", str(data / "mixed"), "--heldout", str(data / "heldout"), "--out", str(out)]
    done = python("-m", "xlme_ds.pretrain", *command.split(), *folders)
    assert done.returncode == 0, done.stderr
    return out
