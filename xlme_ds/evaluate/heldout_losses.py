"""Losses of models, with their heads, on held-out rows. All models read the same rows, and models that mask tokens see
the same masks.

The loss terms are those that a run reports while it trains. The masks cover 15% of the tokens, whatever share a model's
run masked, and every masked token is shown as `<mask>`. A model that was trained to predict every token predicts every
token here, too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..cli import progress
from ..config import ObjectiveConfig
from ..data.rows import TASKS
from ..data.shards import RowStore
from ..io.argument_types import check_argument_types
from ..io.folders import require_folder
from .compared_models import ComparedPredictor, Models, load_predictors, trained_on_entry, trained_on_notes
from .heldout_perplexity import check_seed_and_counts, require_readable
from .output import ResultTable

_ROWS_PER_BATCH = 16


@check_argument_types
def losses(models: Models, data: Path | str, *, rows: int = 512, seed: int = 1, random: bool = False) -> dict[str, Any]:
    """Losses on the first `rows` rows of each task in the data folder `data`, overall and by language, with masks
    drawn from `seed`. `help(xlme.evaluate)` explains the other arguments, the errors and what is returned."""
    folder = Path(data)
    tasks = [task for task, name in enumerate(TASKS) if (folder / name).is_dir()]
    check_seed_and_counts(seed, rows=rows)
    require_folder(folder, "name a data folder that `xlme prep mix` wrote")
    if not tasks:
        raise ValueError(f"{folder} has neither mono/ nor para/: name a data folder that `xlme prep mix` wrote")
    predictors = load_predictors(models, random)
    stores_of_models = [_open_stores(model, folder, tasks) for model in predictors]
    results = []
    for model, stores in zip(predictors, stores_of_models, strict=True):
        metadata = model.metadata
        for store in stores.values():
            metadata |= trained_on_entry(model, store)
        weighted_terms = dict(zip(model.objective.terms, model.objective.weights.tolist(), strict=True))
        results.append(metadata | {"terms": weighted_terms} | _losses(model, stores, rows, seed))
    return {"test": "losses", "seed": seed, "rows": rows, "models": results}


def _open_stores(model: ComparedPredictor, folder: Path, tasks: Sequence[int]) -> dict[int, RowStore]:
    """The rows of those `tasks` that the model was trained to predict, by task. Raises ValueError if there are none, if
    the model cannot read the rows of one of the `tasks`, and if its objective cannot."""
    stores = {task: RowStore(folder / TASKS[task], model.cfg.language_embeddings) for task in tasks}
    for store in stores.values():
        require_readable(model, store)
    own_tasks = {model.objective.quantities[term].task for term in model.objective.terms}
    own_stores = {task: store for task, store in stores.items() if TASKS[task] in own_tasks}
    if not own_stores:
        raise ValueError(
            f"{folder} has no rows that {model.folder} was trained to predict "
            f"({', '.join(model.objective.terms)}): name other data"
        )
    for store in own_stores.values():
        model.objective.check_rows(store, "compare")
    return own_stores


@torch.no_grad()
def _losses(model: ComparedPredictor, stores: Mapping[int, RowStore], rows: int, seed: int) -> dict[str, Any]:
    """Returns {"overall": the values that a run reports, over all rows; "languages": the loss of each term, by
    language}. The argument `stores` has the rows of each task, by the task's index."""
    objective, device = model.objective, next(model.model.parameters()).device
    # Every model that masks has the same share of masked tokens, as in `perplexity`.
    fraction = 1.0 if objective.mask_fraction == 1.0 else ObjectiveConfig().mask_fraction
    max_languages = max(len(store.languages) for store in stores.values())
    sums = torch.zeros(len(objective.terms), dtype=torch.float64)
    counts = torch.zeros_like(sums)
    statistics = torch.zeros(objective.statistics_shape, dtype=torch.float64)
    by_language = torch.zeros(2, len(objective.terms), max_languages, dtype=torch.float64)  # sums, then counts
    for task, store in stores.items():
        collate = objective.collate_for(store, "compare")
        starts = range(0, min(rows, store.rows), _ROWS_PER_BATCH)
        for start in progress(starts, len(starts), f"batches of {TASKS[task]}", model.name):
            records = np.arange(start, min(start + _ROWS_PER_BATCH, rows, store.rows))
            batch = collate([(task, store.read(records), records)], seed, fraction, 0).to(device)
            output = model.model(batch)
            sums += objective.sums(output, batch).double().cpu()
            counts += objective.counts(batch).cpu()
            statistics += objective.statistics(output, batch).cpu()
            by_language += objective.by_language(output, batch, max_languages).cpu()
    losses_by_term: dict[str, dict[str, float]] = {}
    for term, loss_sums, token_counts in zip(objective.terms, *by_language.numpy(), strict=True):
        task = TASKS.index(objective.quantities[term].task)
        if task in stores:
            losses_by_term[term] = {
                language: float(loss_sum / count)
                for language, loss_sum, count in zip(stores[task].languages, loss_sums, token_counts, strict=False)
                if count
            }
    return {"overall": objective.summarise(sums, counts, statistics), "languages": losses_by_term}


def loss_tables(results: Mapping[str, Any]) -> list[ResultTable]:
    """A table of all reported values, then a table by language for each term, with a column for each model."""
    models = results["models"]
    names = [model["model"] for model in models]
    keys = list(dict.fromkeys(key for model in models for key in model["overall"]))
    if any(model["terms"] != models[0]["terms"] for model in models) and "loss" in keys:
        keys.remove("loss")  # sums of different terms, or of terms with different weights, cannot be compared
    tables = [_table("Held-out text", "", keys, [model["overall"] for model in models], names)]
    for term in dict.fromkeys(term for model in models for term in model["languages"]):
        losses_by_model = [model["languages"].get(term, {}) for model in models]
        languages = sorted({language for of_model in losses_by_model for language in of_model})
        tables.append(_table(f"{term} by language", "language", languages, losses_by_model, names))
    tables[0].notes += [
        "losses in nats a token",
        "all models read the same rows; those that mask tokens mask the same 15%, the others predict every token",
        *trained_on_notes(models),
    ]
    return tables


def _table(
    title: str, row_title: str, keys: Sequence[str], values_by_model: list[dict[str, float]], names: list[str]
) -> ResultTable:
    """A table with a row for each key and a column for each model; a cell is empty where a model has no such value."""
    rows = [[key, *(f"{values[key]:.4f}" if key in values else "" for values in values_by_model)] for key in keys]
    return ResultTable(title, [row_title, *names], rows)
