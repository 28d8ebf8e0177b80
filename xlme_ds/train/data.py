"""Opens the training data and the held-out data, and checks that they fit the model and each other."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..config import DataConfig, ModelConfig, RunConfig
from ..data.loader import HeldOutLoader, Loader
from ..data.schema import Manifest
from ..data.vocabulary import Vocabulary
from ..objectives import objective_of


def open_loader(
    config: RunConfig,
    folders: Path | Sequence[Path],
    rank: int = 0,
    world: int = 1,
    heldout_data: DataConfig | None = None,
    training: Loader | None = None,
) -> Loader:
    """The loader with which `rank` of `world` reads its rows of `folders`: training data, or held-out data if
    `heldout_data` is given.

    `heldout_data`: the number of held-out rows of each task, and the micro-batch for evaluating them; `folders` is then
    a single held-out folder. `training`: the loader of the training data, which held-out data must fit
    (`require_fitting_data`).
    """
    loader_class = Loader if heldout_data is None else HeldOutLoader
    objective = objective_of(config.objective)
    loader = loader_class(
        folders,
        heldout_data or config.data,
        config.seed,
        config.objective.mask_fraction,
        rank,
        world,
        config.model.language_embeddings,
        objective,
    )
    require_fitting_data(loader, config.model, training)
    for store in (store for phase in loader.phases for store in loader.stores_at(phase.first_step).values()):
        objective.check_rows(store, loader.purpose)
    return loader


def require_fitting_data(loader: Loader, model: ModelConfig, training: Loader | None = None) -> None:
    """Raise ValueError, which names the setting or the folder, if the data of `loader` do not fit `model`. `training`:
    the loader of the training data, if `loader` reads held-out data. These must have the same vocabulary as the
    training data, and none of their text."""
    folder = loader.folders[0]
    with_other_vocabulary = [
        other for other in loader.folders if Vocabulary(other / "vocab").sha256 != loader.vocabulary_sha256
    ]
    if training is not None and (loader.vocabulary_size, loader.layout) != (model.vocabulary, model.layout):
        raise ValueError(
            f"{folder} does not fit {training.folders[0]}: encode and mix it with the same vocabulary and --layout "
            f"{training.layout}"
        )
    if loader.vocabulary_size != model.vocabulary:
        raise ValueError(
            f"{folder} was encoded with a vocabulary of {loader.vocabulary_size}, but the model has "
            f"{model.vocabulary}: set model.vocabulary to {loader.vocabulary_size}"
        )
    longest, longest_folder = max(zip(loader.row_lengths, loader.folders, strict=True))
    if longest > model.max_positions:
        raise ValueError(
            f"{longest_folder} has rows of {longest} tokens, but model.max_positions is {model.max_positions}: raise "
            f"model.max_positions to {longest}"
        )
    if loader.layout != model.layout:
        raise ValueError(
            f"{folder} was mixed with --layout {loader.layout}, but model.layout is {model.layout}: set model.layout "
            f"to {loader.layout}"
        )
    if with_other_vocabulary:
        raise ValueError(
            f"{with_other_vocabulary[0]}/vocab is not the vocabulary of the rows next to it: mix the rows again"
        )
    if training is not None and loader.vocabulary_sha256 != training.vocabulary_sha256:
        raise ValueError(
            f"{folder} and {training.folders[0]} were encoded with different vocabularies: encode both with the same "
            "one"
        )
    if training is not None:
        _require_split(loader, training)


def _require_split(heldout: Loader, training: Loader) -> None:
    """Raise ValueError if text of `heldout` may be in the training data. Three things must hold:

    - The data of the two loaders were not made from the same text.
    - If the data of `heldout` were split (`xlme prep encode --split`), they are the held-out side, and the training
      data are the other side, split with the same --heldout-share.
    - In this case, both sides were split by the same unit (`_split_unit`).
    """
    for (task, store), (phase, folder) in product(
        heldout.stores.items(), zip(training.phases, training.folders, strict=True)
    ):
        manifest = store.manifest
        training_manifest = training.stores_at(phase.first_step)[task].manifest
        split, share = _split_side(manifest)
        training_split, training_share = _split_side(training_manifest)
        if split != "all" and (split, training_split, training_share) != ("heldout", "train", share):
            raise ValueError(
                f"{store.folder} was encoded with --split {split} --heldout-share {share}, but {folder} with --split "
                f"{training_split}{f' --heldout-share {training_share}' if training_share else ''}: encode the "
                "training text with --split train and the held-out text with --split heldout, with the same "
                "--heldout-share"
            )
        if manifest.shares_text(training_manifest):
            raise ValueError(
                f"{store.folder} and {folder} have the same text, so no text is held out: name a folder with text that "
                "is not trained on"
            )
        if split != "all" and _split_unit(manifest) != _split_unit(training_manifest):
            raise ValueError(
                f"{store.folder} and {folder} were encoded with different --sentences or --block-bytes, so text of one "
                "may be in the other: encode both with the same settings"
            )


def _split_side(manifest: Manifest) -> tuple[str, Any]:
    """Returns (side, share): the side of a split to which a folder's text belongs, and the held-out fraction of the
    split. Text that was not split has `all` and None."""
    return manifest.settings.get("split", "all"), manifest.settings.get("heldout_share")


def _split_unit(manifest: Manifest) -> str | int:
    """The unit that a split never divides: `sentences`, `documents`, or the number of bytes of a block."""
    return manifest.counts.get("split_of", "sentences" if manifest.settings.get("sentences") else "documents")
