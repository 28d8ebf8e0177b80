"""Real sentences as the model sees them: the generator's replacements and the discriminator's verdict on each token."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.collate import collate
from ..data.schema import TASKS
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..models.electra import Electra


@torch.no_grad()
def sample_rows(
    model: Electra,
    data: Path,
    vocabulary: Vocabulary,
    seed: int,
    mask_fraction: float,
    a_task: int = 8,
    search: int = 256,
) -> list[dict[str, Any]]:
    """The first row of each of up to `a_task` languages (or pairs) of every task in `data`, corrupted and judged.

    Only the first item of a row is shown. See docs/design.md for the format.
    """
    model.eval()
    shown = []
    for task, name in enumerate(TASKS):
        if not (data / name).is_dir():
            continue
        store = RowStore(data / name)
        seen: set[tuple[int, ...]] = set()
        for record in range(min(search, store.rows)):
            rows = store.read(np.array([record]))
            key = tuple(sorted(rows.languages[: 1 + task].tolist()))
            if key in seen:
                continue
            seen.add(key)
            batch = collate([(task, rows, np.array([record]))], seed, mask_fraction)
            output = model(batch)
            scores = torch.sigmoid(output.replaced_logits_BT[0].float()).tolist()
            masked = set(batch.masked_M.tolist())
            corrupted = output.corrupted_BT[0].tolist()
            tokens = [
                {
                    "piece": vocabulary.piece(corrupted[i]),
                    "original": vocabulary.piece(int(original)),
                    "masked": i in masked,
                    "replaced": corrupted[i] != int(original),
                    "score": scores[i],
                }
                for i, original in enumerate(rows.tokens[0][: int(rows.lengths[0])])
            ]
            codes = [store.manifest.languages[i] for i in rows.languages[: 1 + task]]
            shown.append({"language": "–".join(codes), "task": name, "tokens": tokens})
            if len(seen) == a_task:
                break
    return shown
