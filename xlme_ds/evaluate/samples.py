"""Real sentences as the model sees them: what it put in the masked places, and its verdict on each token if it judges
them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..data.collate import collate
from ..data.schema import TASKS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..objectives.protocol import Pretraining


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

    Only the first item of a row is shown. See docs/design.md for the format. `languages`: those that have embeddings.
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
