"""Our training is that of transformers' ELECTRA in a loop of plain torch, step by step."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.peers.electra import Peer, main
from tests.engine.worker import tiny
from tests.rows import train_vocabulary, write_data
from xlme_ds.engine.build import build_engine
from xlme_ds.train.data import open_loader
from xlme_ds.train.schedule import learning_rate
from xlme_ds.trained.config_json import CONFIG_FILE
from xlme_ds.trained.runs import MODEL_FOLDER
from xlme_ds.trained.weights import WEIGHTS_FILE, read_weights

LIKE_THEIRS = dict(embedding_sharing="tied", relative_bias="none")


def test_losses_and_weights_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command trains from a run's first weights as the run does: 20 steps on the same rows, in micro-batches."""
    vocabulary = train_vocabulary(tmp_path / "data" / "vocab")
    write_data(tmp_path / "data", rows=96, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    run = tiny({"kind": "plain"}, 4, vocabulary=vocabulary.size, **LIKE_THEIRS)
    run = replace(run, optimizer=replace(run.optimizer, weight_decay=0.5))  # so much that it shows
    (tmp_path / "ours" / MODEL_FOLDER).mkdir(parents=True)
    (tmp_path / "ours" / CONFIG_FILE).write_text(json.dumps({"format": 1, "config": asdict(run)}), encoding="utf-8")
    arguments = ["--run", str(tmp_path / "ours"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "theirs")]
    main([*arguments, "--every", "1"])

    engine = build_engine(run, open_loader(run, tmp_path / "data"), None)
    for step, line in enumerate(capsys.readouterr().out.splitlines()):
        rate = learning_rate(step, run.train.steps, run.optimizer, run.schedule)
        ours = engine.train_batch(step, rate, detailed=True).metrics
        theirs = json.loads(line)
        assert theirs.pop("step") == step + 1
        assert theirs == pytest.approx({term: ours[term] for term in theirs}, rel=1e-6), step
    assert step + 1 == run.train.steps and list(theirs) == ["mlm", "tlm", "mrtd", "trtd"]
    state = read_weights(tmp_path / "theirs" / MODEL_FOLDER / WEIGHTS_FILE)
    for name, value in engine.full_state().items():
        # 20 steps of up to 1e-3 move a weight by up to 1e-2; the rounding of a norm's weight near 1 is 1.2e-7.
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "other", [dict(relative_bias="gated"), dict(z_loss=1e-4), dict(dropout=0.1), dict(vocabulary_blocks=3)]
)
def test_another_model_is_an_error(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no relative bias: name a run of electra with"):
        Peer(tiny({"kind": "plain"}, 4, **(LIKE_THEIRS | other)))


def test_another_rate_of_the_discriminator_is_an_error() -> None:
    run = tiny({"kind": "plain"}, 4, **LIKE_THEIRS)
    with pytest.raises(ValueError, match=r"and without .* optimizer\.discriminator_rate"):
        Peer(replace(run, optimizer=replace(run.optimizer, discriminator_rate=0.2)))


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--run", str(tmp_path / "none"), "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert left.value.code == 2 and f"xlme bench peers.electra: error: {tmp_path}/none" in capsys.readouterr().err


def test_a_folder_that_exists_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as an export, which has a config.json and no model/."""
    with pytest.raises(SystemExit):
        main(["--run", str(tmp_path / "none"), "--data", str(tmp_path), "--out", str(tmp_path)])
    assert f"{tmp_path} exists already: choose another output folder" in capsys.readouterr().err
