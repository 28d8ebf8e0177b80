"""Files for a run's report, in its folder: sentences with the model's predictions, the retrieval test before and after
training, and the languages' shares; once the run is finished, also its model in one file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from ..checkpoint_names import checkpoints_of, saved_step
from ..config import RunConfig
from ..data.order import phase_shares, phases
from ..data.schema import TASKS, read_manifest
from ..data.shards import RowStore
from ..data.vocabulary import Vocabulary
from ..io.files import read_object, write_object
from ..models.init import initialise
from ..models.text_encoder import take_encoder
from ..objectives import objective_of
from ..objectives.protocol import Pretraining
from ..trained.runs import MODEL_FOLDER, load_run, main_encoder, write_model
from ..trained.settings import read_config, read_run_config
from ..trained.weights import WEIGHTS_FILE
from .retrieval import group_by_language, packed_pairs, retrieve

# Keys of languages.json -> keys in the manifest of mixed rows.
_SHARES = {"share": "share_after", "share_before": "share_before", "repeat": "repeat"}
State = Mapping[str, torch.Tensor]


def showcase(run: Path, config: RunConfig, state: State, data: Sequence[Path], heldout: Path | None) -> None:
    """Write model/, retrieval.json, samples.json and languages.json into the run folder. `state`: all parameters of the
    model, float32; `data`: the data folder of each phase."""
    vocabulary = Vocabulary(data[0] / "vocab")
    write_model(run / MODEL_FOLDER, config.model, state, vocabulary.path)
    _write(run, _contents(config, state, vocabulary, data, heldout, config.train.steps))


def bring_up_to_date(run: Path) -> None:
    """Rewrite the JSON files of an unfinished run from its newest complete checkpoint, if they are of an older one.

    Raises ValueError if its data are missing or have changed.
    """
    if _finished(run) or max(map(saved_step, checkpoints_of(run)), default=0) <= shown_step(run):
        return
    content = read_config(run)
    if "task" in content.get("config", {}):  # fine-tuned
        return
    trained = load_run(run)
    if trained.step is None or trained.step <= shown_step(run):
        return
    data, heldout = _data_of(run, content["data"])
    config = read_run_config(run)
    earlier = _read(run / "retrieval.json")
    files = _contents(config, trained.state, trained.vocabulary, data, heldout, trained.step, earlier)
    if not _finished(run) and shown_step(run) < trained.step:  # no other process wrote newer files meanwhile
        _write(run, files)


def shown_step(run: Path) -> int:
    """The step of the model whose sentences are shown; 0 before the first."""
    samples = _read(run / "samples.json").get("samples", [])
    return int(samples[0]["step"]) if samples else 0


def _write(run: Path, files: Mapping[str, Any]) -> None:
    """Write the files, and the sentences as TensorBoard texts: predictions are bold, and the original follows where it
    differs."""
    for name, content in files.items():
        write_object(run / name, content)
    with SummaryWriter(str(run / "tensorboard" / "samples")) as board:
        for sample in files["samples.json"]["samples"]:
            parts = []
            for token in sample["tokens"]:
                piece, original = (token[key].replace("▁", " ") for key in ("piece", "original"))
                prediction = f" **{piece.strip()}**" + (f" ({original.strip()})" if token["replaced"] else "")
                parts.append(prediction if token["masked"] else piece)
            board.add_text(f"{sample['task']}/{sample['language']}", "".join(parts), sample["step"])


def _finished(run: Path) -> bool:
    return (run / MODEL_FOLDER / WEIGHTS_FILE).exists()


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) if path.exists() else {}


def _data_of(run: Path, recorded: Mapping[str, Any]) -> tuple[list[Path], Path | None]:
    """The folders of the data of each phase and of the held-out data, from `config.json`. Raises ValueError if their
    content has changed."""
    if "folder" not in recorded or ("phases" in recorded) != ("phase_folders" in recorded):
        raise ValueError(f"{run / 'config.json'} does not say where its data are: start the run's command again")
    data = [run / place for place in recorded.get("phase_folders", [recorded["folder"]])]
    heldout = run / recorded["heldout"] if "heldout" in recorded else None
    places = [(folder, recorded.get("phases", recorded["fingerprints"])) for folder in data]
    places += [(heldout, recorded.get("heldout_fingerprints") or {})] if heldout is not None else []
    for place, fingerprints in places:
        # A later phase's name is `mono from step 100`.
        for folder in sorted({place / name.split()[0] for name in fingerprints}):
            if not folder.is_dir() or read_manifest(folder).fingerprint() not in fingerprints.values():
                raise ValueError(f"{folder} does not hold the data of {run} any more: restore them")
    return data, heldout


def _contents(
    config: RunConfig,
    state: State,
    vocabulary: Vocabulary,
    data: Sequence[Path],
    heldout: Path | None,
    step: int,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of each file by its name, from the state after `step` steps.

    `earlier`: content of the run's retrieval.json, from which the untrained model's scores are copied.
    """
    files: dict[str, Any] = {"languages.json": _languages(config, data)}
    if heldout is not None and (heldout / "para").is_dir():
        files |= _retrieval(config, state, heldout, step, earlier or {})
    objective = objective_of(config.objective)
    model = objective.build(config.model)
    model.load_state_dict(state)
    samples = _sample_rows(config, objective, model.eval(), heldout or data[0], vocabulary)
    samples = [{"step": step, **sample} for sample in samples]
    return files | {"samples.json": {"samples": samples}}  # written last: its step counts as the step of all files


def _languages(config: RunConfig, data: Sequence[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """The content of languages.json: the means over all steps if the run has several phases."""
    weights = phase_shares(phases(config.data, 0.0), config.train.steps)
    languages: dict[str, dict[str, dict[str, float]]] = {}
    for task in TASKS:
        for weight, folder in zip(weights, data, strict=True):
            counts = read_manifest(folder / task).counts["by_language"] if (folder / task).is_dir() else {}
            for code, count in counts.items():
                values = languages.setdefault(task, {}).setdefault(code, dict.fromkeys(_SHARES, 0.0))
                for name, manifest_key in _SHARES.items():
                    values[name] += weight * count[manifest_key]
    return languages


def _retrieval(
    config: RunConfig, state: State, heldout: Path, step: int, earlier: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The content of retrieval.json by its name; empty if no language has enough pairs."""
    groups = group_by_language(packed_pairs(RowStore(heldout / "para")))
    if not groups:
        return {}
    objective = objective_of(config.objective)
    sizes = {language: len(ours) for language, (ours, _) in groups.items()}
    retrieval: dict[str, Any] = {
        "step": step,
        "layers": list(range(config.model.discriminator_layers + 1)),
        "pairs": sizes,
        "candidates": sum(sizes.values()) / len(sizes),
    }
    which = main_encoder(objective.encoders)
    if earlier.get("pairs") == sizes and "before" in earlier:
        retrieval["before"] = earlier["before"]
    else:
        untrained = objective.build(config.model)
        initialise(untrained, config.seed, config.model.init_std)
        retrieval["before"] = retrieve(
            take_encoder(untrained.state_dict(), config.model, which), groups, name="retrieval, untrained"
        )
    retrieval["after"] = retrieve(take_encoder(state, config.model, which), groups, name="retrieval")
    return {"retrieval.json": retrieval}


def _shown_records(store: RowStore, sides: int) -> list[int]:
    """The first row of each language that is shown, or of each language pair where an item has two `sides`."""
    rows = store.read(np.arange(min(256, store.rows)))
    starts = sides * (np.cumsum(rows.items) - rows.items)
    keys = [frozenset(rows.languages[start : start + sides].tolist()) for start in starts]
    counts = Counter(keys)

    def priority(key: frozenset[int]) -> tuple[bool, bool, int]:
        codes = {store.languages[place] for place in key} - {"en"}
        return not codes, codes == {"de"}, counts[key]

    return [keys.index(key) for key in sorted(counts, key=priority, reverse=True)[:8]]


@torch.no_grad()
def _sample_rows(
    config: RunConfig, objective: Pretraining, model: nn.Module, data: Path, vocabulary: Vocabulary
) -> list[dict[str, Any]]:
    """The first row of each of up to 8 languages (or pairs) of every task in `data` that is trained on, corrupted and
    judged: English, German, and those with most of the first 256 rows.

    Only the first item of a row is shown. The format is in docs/reference/run-folder.md.
    """
    samples = []
    for task, (name, read) in enumerate(zip(TASKS, config.data.mean_rows, strict=True)):
        if not read or not (data / name).is_dir():
            continue
        store = RowStore(data / name, config.model.language_embeddings)
        collate = objective.batches(store, "show")
        for record in _shown_records(store, 1 + task):
            rows = store.read(np.array([record]))
            parts = [(task, rows, np.array([record]))]
            batch = collate(parts, config.seed, config.objective.mask_fraction, 0)
            shown_BT, judged = objective.shown(model(batch), batch)
            filled, masked = shown_BT[0].tolist(), set(objective.predicted_positions(batch).tolist())
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
            samples.append({"language": language, "task": name, "tokens": tokens})
    return samples
