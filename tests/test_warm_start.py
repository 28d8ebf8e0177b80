"""A run starts from the weights of another one: all of them, or one encoder for both."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.evaluate.folders import write_run
from xlme_ds.config import ModelConfig, ObjectiveConfig, RunConfig, StartConfig
from xlme_ds.export.exported_folder import Exported, write_folder
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise
from xlme_ds.objectives import objective_of
from xlme_ds.train.run_folder import RunFolder
from xlme_ds.trained import TrainedRun, load_run, starting_weights


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Two layers in each encoder, a difference of the discriminator's embedding, two blocks."""
    folder = tmp_path_factory.mktemp("source")
    settings = {"generator_layers": 2, "embedding_sharing": "gdes", "vocabulary_blocks": 2}
    return load_run(write_run(folder, layers=2, **settings))


def started(
    take: str, source: TrainedRun, folder: Path | None = None, name: str = "electra", **changes: object
) -> dict[str, Tensor]:
    """The parameters of a model that starts from `source`."""
    cfg: ModelConfig = replace(source.model, **changes)  # type: ignore[arg-type]
    start = StartConfig(str(folder or source.folder), take)  # type: ignore[arg-type]
    objective = ObjectiveConfig(name)  # type: ignore[arg-type]
    config = RunConfig("started", model=cfg, objective=objective, start=start)
    known = starting_weights(config, source.vocabulary.sha256)
    model = objective_of(objective).build(cfg)
    initialise(model, 5, cfg.init_std, known=known)
    return dict(model.state_dict())


def fresh(source: TrainedRun, **changes: object) -> dict[str, Tensor]:
    model = Electra(replace(source.model, **changes))  # type: ignore[arg-type]
    initialise(model, 5, model.cfg.init_std)
    return dict(model.state_dict())


def export(source: TrainedRun, to: Path) -> None:
    generator = Exported(source.encoder("generator"), "XLMEForMaskedLM", source.state)
    write_folder(to, Exported(source.encoder(), "XLMEModel"), source.vocabulary, "", generator)


def test_nothing_named() -> None:
    assert starting_weights(RunConfig("none"), "") is None


@pytest.mark.parametrize("blocks", [1, 3])
def test_everything_in_other_blocks(blocks: int, source: TrainedRun) -> None:
    ours = started("all", source, vocabulary_blocks=blocks)
    for table in ("embedding", "difference"):
        whole = [torch.cat([state[f"{table}_{n}"] for n in range(count)])
                 for state, count in ((ours, blocks), (source.state, 2))]  # fmt: skip
        assert torch.equal(*whole)


def test_a_finished_run_that_was_called_with_other_blocks_is_read(source: TrainedRun, tmp_path: Path) -> None:
    shutil.copytree(source.folder, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    content = json.loads(path.read_text())
    content["config"]["model"]["vocabulary_blocks"] = 1
    path.write_text(json.dumps(content))
    ours, theirs = (run.encoder().state_dict() for run in (load_run(tmp_path / "run"), source))
    assert torch.equal(ours["embedding_0"], torch.cat([theirs["embedding_0"], theirs["embedding_1"]]))


def test_everything(source: TrainedRun) -> None:
    ours = started("all", source)
    assert ours.keys() == source.state.keys()
    assert all(torch.equal(ours[name], value) for name, value in source.state.items())


@pytest.mark.parametrize("take", ["generator", "discriminator"])
def test_one_encoder_for_both(take: str, source: TrainedRun) -> None:
    """The generator keeps the lower of its source's layers; the discriminator's embedding was a sum."""
    ours, plain = started(take, source, generator_layers=1), fresh(source, generator_layers=1)
    embedding = source.encoder(take).state_dict()  # type: ignore[arg-type]
    for n in range(2):
        assert torch.equal(ours[f"embedding_{n}"], embedding[f"embedding_{n}"])
        assert not ours[f"difference_{n}"].any()
    for name, value in ours.items():
        which, _, rest = name.partition(".")
        if which in ("generator", "discriminator"):
            assert torch.equal(value, source.state[f"{take}.{rest}"]), name
        elif which in ("masked_head", "replaced_head"):
            kept = which == {"generator": "masked_head", "discriminator": "replaced_head"}[take]
            assert torch.equal(value, (source.state if kept else plain)[name]), name


def test_from_an_export(source: TrainedRun, tmp_path: Path) -> None:
    """Another number of blocks, and no heads."""
    export(source, tmp_path / "export")
    for take in ("generator", "discriminator"):
        ours = started(take, source, tmp_path / "export", vocabulary_blocks=1)
        whole = source.encoder(take).state_dict()  # type: ignore[arg-type]
        assert torch.equal(ours["embedding_0"], torch.cat([whole["embedding_0"], whole["embedding_1"]]))
        for which in ("generator", "discriminator"):
            assert torch.equal(ours[f"{which}.layers.1.up.weight"], whole["encoder.layers.1.up.weight"])


@pytest.mark.parametrize(
    ("take", "changes", "message"),
    [
        ("generator", {"discriminator_layers": 3}, "has 2 layers, model.discriminator_layers is 3: lower it"),
        ("generator", {"norm": "pre"}, "has norm post, model.norm is pre: set it to the same"),
        ("all", {"generator_layers": 1}, "has model.generator_layers 2, this run has 1"),
        ("all", {"embedding_sharing": "tied"}, "has model.embedding_sharing gdes, this run has tied"),
    ],
)
def test_what_does_not_fit(take: str, changes: dict[str, object], message: str, source: TrainedRun) -> None:
    with pytest.raises(ValueError, match=message):
        started(take, source, **changes)


def test_layout_and_new_languages_are_no_obstacle(source: TrainedRun) -> None:
    ours = started("generator", source, name="mlm", layout="xlm", language_embeddings=("de", "en"))
    assert torch.equal(ours["embedding_1"], source.state["embedding_1"])
    assert ours["encoder.languages"].shape == (2, source.model.width)


def test_other_vocabularies_and_kinds_are_refused(source: TrainedRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another vocabulary than the data"):
        starting_weights(RunConfig("small", model=source.model, start=StartConfig(str(source.folder))), "0" * 64)
    export(source, tmp_path / "export")
    with pytest.raises(ValueError, match="is not a pre-training run"):
        started("all", source, tmp_path / "export")


def test_a_run_goes_on_with_the_start_it_had(source: TrainedRun, tmp_path: Path) -> None:
    first = RunConfig("small", start=StartConfig(str(source.folder), "generator"))
    folder = RunFolder(tmp_path / "run")
    folder.begin(first, data={}, world=1, parameters={})
    folder.claim(first)
    folder.close()
    for start in (StartConfig(), StartConfig(str(source.folder), "discriminator")):
        with pytest.raises(ValueError, match=r"was started with start.(folder|take) .*, this call has"):
            folder.claim(replace(first, start=start))
        folder.close()
