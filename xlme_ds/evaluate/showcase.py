"""Results in the folder of a finished run: its model in one file, the retrieval test before and after training, and
sentences as the model sees them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..config import RunConfig
from ..data.collate import collate
from ..data.schema import TASKS, read_manifest, write_json
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..models.init import initialise
from ..models.text_encoder import take_encoder
from ..objectives import objective_of
from ..objectives.protocol import Pretraining
from ..trained import MODEL_FOLDER, first_of, write_model
from .retrieval import group_by_language, packed_pairs, retrieve


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
        groups = group_by_language(packed_pairs(RowStore(heldout / "para")))
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


@torch.no_grad()
def sample_rows(
    objective: Pretraining,
    model: nn.Module,
    data: Path,
    vocabulary: Vocabulary,
    seed: int,
    mask_fraction: float,
    languages: Sequence[str] = (),
    a_task: int = 8,
    search: int = 256,
) -> list[dict[str, Any]]:
    """The first row of each of up to `a_task` languages (or pairs) of every task in `data`, corrupted and judged.

    Only the first item of a row is shown. See docs/reference/run-folder.md for the format. `languages`: those that have
    embeddings.
    """
    model.eval()
    shown = []
    for task, name in enumerate(TASKS):
        if not (data / name).is_dir():
            continue
        store = RowStore(data / name, languages)
        seen: set[tuple[int, ...]] = set()
        for record in range(min(search, store.rows)):
            rows = store.read(np.array([record]))
            key = tuple(sorted(rows.languages[: 1 + task].tolist()))
            if key in seen:
                continue
            seen.add(key)
            batch = collate([(task, rows, np.array([record]))], seed, mask_fraction)
            found, judged = objective.shown(model(batch), batch)
            filled, masked = found[0].tolist(), set(batch.masked_M.tolist())
            scores = [None] * len(filled) if judged is None else judged[0].tolist()
            tokens = [
                {
                    "piece": vocabulary.piece(filled[i]),
                    "original": vocabulary.piece(int(original)),
                    "masked": i in masked,
                    "replaced": filled[i] != int(original),
                    "score": scores[i],
                }
                for i, original in enumerate(rows.tokens[0][: int(rows.lengths[0])])
            ]
            codes = [store.languages[i] for i in rows.languages[: 1 + task]]
            shown.append({"language": "–".join(codes), "task": name, "tokens": tokens})
            if len(seen) == a_task:
                break
    return shown
