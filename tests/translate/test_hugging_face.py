"""The same training by Hugging Face has our losses and our weights."""

from pathlib import Path

import pytest
import torch

from data_prep.__main__ import main as data_prep
from tests.translate.hugging_face import Peer
from tests.translate.test_command import english, german, sentences
from xlme_ds.config import DataConfig, EngineConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from xlme_ds.engine.build import build_engine
from xlme_ds.io.files import read_json
from xlme_ds.train.data import open_loader


def test_hugging_face_trains_as_we_do(tmp_path: Path) -> None:
    """BERT's layers of transformers, with its own loss and torch's AdamW."""
    para, vocab = tmp_path / "para", tmp_path / "vocab"
    para.mkdir()
    for code, write in (("de", german), ("en", english)):
        (para / f"toy.de-en.{code}").write_text("".join(f"{write(words)}\n" for words in sentences(300, 0)))
    for stage in (
        f"vocab --para {para} --out {vocab} --size 46 --processes 1",
        f"encode --para {para} --vocab {vocab} --out {tmp_path}/encoded --processes 1",
        f"mix --encoded {tmp_path}/encoded --vocab {vocab} --out {tmp_path}/data --row-tokens 48 --para-rows 96 "
        "--layout xlm",
    ):
        assert not data_prep(stage.split())
    size = read_json(tmp_path / "data" / "para" / "manifest.json", dict)["vocabulary_size"]
    model = ModelConfig(
        size, 64, 4, 128, discriminator_layers=2, max_positions=48, layout="xlm", language_embeddings=("de", "en"),
        relative_bias="none", init_std=0.08, masked_head="linear",
    )  # fmt: skip
    run = RunConfig(
        "toy", model=model, objective=ObjectiveConfig("mt", mask_fraction=1.0), data=DataConfig(0, 16, 16),
        optimizer=OptimizerConfig(1e-3, warmup_steps=0, clip=5.0), engine=EngineConfig("plain"),
    )  # fmt: skip
    engine = build_engine(run, open_loader(run, tmp_path / "data"), None)
    peer = Peer(run, engine.full_state())
    losses = []
    for step in range(6):
        losses.append(engine.train_batch(step, 1e-3, detailed=True).metrics["mt"])
        assert losses[-1] == pytest.approx(peer.step(list(engine.loader.micro_batches(step)), 1e-3), rel=1e-5)
    assert losses[-1] < losses[0] - 0.1
    state = peer.state()
    for name, value in engine.full_state().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=name)
