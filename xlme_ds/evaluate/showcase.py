"""Results in the folder of a finished run: its model in one file, the retrieval test before and after training, and
sentences as the model sees them."""

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
    shares = {}
    for task in TASKS:
        if (data / task).is_dir():
            counts = read_manifest(data / task).counts["by_language"]
            shares[task] = {
                code: {"share": c["share_after"], "share_before": c["share_before"], "repeat": c["repeat"]}
                for code, c in counts.items()
            }
    write_json(run / "languages.json", shares)
    write_json(run / "samples.json", _sample_rows(config, objective, model.eval(), heldout or data, vocabulary))
    if heldout is None or not (heldout / "para").is_dir():
        return
    groups = group_by_language(packed_pairs(RowStore(heldout / "para")))
    if groups:
        untrained = objective.build(config.model)
        initialise(untrained, config.seed, config.model.init_std)
        sizes = {language: len(ours) for language, (ours, _) in groups.items()}
        retrieval = {
            "layers": list(range(config.model.discriminator_layers + 1)),
            "pairs": sizes,
            "candidates": sum(sizes.values()) / len(sizes),
        }
        for when, weights in (("before", untrained.state_dict()), ("after", state)):
            retrieval[when] = retrieve(take_encoder(weights, config.model, first_of(objective.encoders)), groups)
        write_json(run / "retrieval.json", retrieval)


@torch.no_grad()
def _sample_rows(
    config: RunConfig, objective: Pretraining, model: nn.Module, data: Path, vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """The first row of each of up to 8 languages (or pairs) of every task in `data`, corrupted and judged.

    They are searched for in the first 256 rows. Only the first item of a row is shown. The format is in
    docs/reference/run-folder.md.
    """
    shown = []
    for task, name in enumerate(TASKS):
        if not (data / name).is_dir():
            continue
        store = RowStore(data / name, config.model.language_embeddings)
        seen: set[tuple[int, ...]] = set()
        for record in range(min(256, store.rows)):
            rows = store.read(np.array([record]))
            key = tuple(sorted(rows.languages[: 1 + task].tolist()))
            if key in seen or len(seen) == 8:
                continue
            seen.add(key)
            batch = collate([(task, rows, np.array([record]))], config.seed, config.objective.mask_fraction)
            found, judged = objective.shown(model(batch), batch)
            filled, masked = found[0].tolist(), set(batch.masked_M.tolist())
            scores = [None] * len(filled) if judged is None else judged[0].tolist()
            tokens = [
                {
                    "piece": vocabulary.piece(filled[i]),
                    "original": vocabulary.piece(original),
                    "masked": i in masked,
                    "replaced": filled[i] != original,
                    "score": scores[i],
                }
                for i, original in enumerate(rows.tokens[0, : rows.lengths[0]].tolist())
            ]
            language = "–".join(store.languages[i] for i in rows.languages[: 1 + task])
            shown.append({"language": language, "task": name, "tokens": tokens})
    return shown
