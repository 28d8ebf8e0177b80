"""What a finished run shows of itself: the model in one file, the retrieval test before and after, judged sentences."""

from pathlib import Path
from typing import Any

import torch

from ..config import RunConfig
from ..data.schema import TASKS, read_manifest, write_json
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..models.init import initialise
from ..models.text_encoder import take_encoder
from ..objectives import objective_of
from ..trained import MODEL_FOLDER, first_of, write_model
from .pairs import pairs
from .retrieval import by_language, retrieve
from .samples import sample_rows


def showcase(run: Path, config: RunConfig, state: dict[str, torch.Tensor], data: Path, heldout: Path | None) -> None:
    """Write model/, retrieval.json, samples.json and languages.json into the run folder, from a whole float32 state."""
    objective = objective_of(config.objective)
    model = objective.build(config.model)
    model.load_state_dict(state)
    vocabulary = Vocabulary(data / "vocab")
    write_model(run / MODEL_FOLDER, state, vocabulary.path)
    write_json(run / "languages.json", _languages(data))
    shown = heldout if heldout is not None else data
    drawn = config.seed, config.objective.mask_fraction, config.model.language_embeddings
    write_json(run / "samples.json", sample_rows(objective, model, shown, vocabulary, *drawn))
    if heldout is not None and (heldout / "para").is_dir():
        groups = by_language(pairs(RowStore(heldout / "para")))
        if groups:
            untrained = objective.build(config.model)
            initialise(untrained, config.seed, config.model.init_std)
            which = first_of(objective.encoders)
            sizes = {language: len(ours) for language, (ours, _) in groups.items()}
            write_json(
                run / "retrieval.json",
                {
                    "layers": list(range(config.model.discriminator_layers + 1)),
                    "pairs": sizes,
                    "candidates": sum(sizes.values()) / len(sizes),
                    "before": retrieve(take_encoder(untrained.state_dict(), config.model, which), groups),
                    "after": retrieve(take_encoder(state, config.model, which), groups),
                },
            )


def _languages(data: Path) -> dict[str, Any]:
    out = {}
    for task in TASKS:
        if (data / task).is_dir():
            counts = read_manifest(data / task).counts["by_language"]
            out[task] = {
                code: {"share": c["share_after"], "share_before": c["share_before"], "repeat": c["repeat"]}
                for code, c in counts.items()
            }
    return out
