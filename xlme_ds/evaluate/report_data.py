"""Write the files in a run's folder that the run's report shows: sentences with the model's predictions, the retrieval
test before and after training, the languages' shares; and, when the run is finished, the model in one file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from ..io.files import read_optional, write_versioned
from ..models.text_encoder import take_encoder
from ..objectives import objective_of
from ..trained.config_json import read_config, read_run_config
from ..trained.encoders import initial_encoder
from ..trained.runs import MODEL_FOLDER, load_run, main_encoder, write_model
from ..trained.weights import WEIGHTS_FILE
from .retrieval import group_by_language, retrieval_accuracies, stored_pairs

# Key in languages.json -> key in the manifest of mixed rows.
_SHARES = {"share": "share_after", "share_before": "share_before", "repeat": "repeat"}
State = Mapping[str, torch.Tensor]


def write_model_and_report_data(
    run: Path, config: RunConfig, state: State, data: Sequence[Path], heldout: Path | None
) -> None:
    """Write model/, retrieval.json, samples.json and languages.json into the run folder. `state`: all parameters of the
    model, float32; `data`: the data folder of each phase."""
    vocabulary = Vocabulary(data[0] / "vocab")
    write_model(run / MODEL_FOLDER, config.model, state, vocabulary.path)
    _write(run, _contents(config, state, vocabulary, data, heldout, config.train.steps))


def update_report_data(run: Path) -> None:
    """Rewrite the JSON files of an unfinished run from its newest complete checkpoint, if they show an older one.

    Raises ValueError if the run's data are missing or have changed.
    """
    if _finished(run) or max(map(saved_step, checkpoints_of(run)), default=0) <= shown_step(run):
        return
    recorded = read_config(run)
    if "task" in recorded.get("config", {}):  # fine-tuned
        return
    trained = load_run(run)
    if trained.step is None or trained.step <= shown_step(run):
        return
    data, heldout = _data_of(run, recorded["data"])
    earlier = read_optional(run / "retrieval.json")
    config = replace(read_run_config(run), model=trained.model)  # an earlier phase may have another rotary base
    contents = _contents(config, trained.state, trained.vocabulary, data, heldout, trained.step, earlier)
    if not _finished(run) and shown_step(run) < trained.step:  # no other process wrote newer files meanwhile
        _write(run, contents)


def shown_step(run: Path) -> int:
    """The step of the model whose sentences the report shows; 0 if there are none yet."""
    samples = read_optional(run / "samples.json").get("samples", [])
    return int(samples[0]["step"]) if samples else 0


def _write(run: Path, contents: Mapping[str, Any]) -> None:
    """Write each of `contents` (file name -> content) into its file, and the sentences as TensorBoard texts. There a
    prediction is bold, and the original token follows it in parentheses if it differs."""
    for name, content in contents.items():
        write_versioned(run / name, content)
    with SummaryWriter(str(run / "tensorboard" / "samples")) as board:
        for sample in contents["samples.json"]["samples"]:
            text = []
            for token in sample["tokens"]:
                piece, original = (token[key].replace("▁", " ") for key in ("piece", "original"))
                prediction = f" **{piece.strip()}**" + (f" ({original.strip()})" if token["replaced"] else "")
                text.append(prediction if token["masked"] else piece)
            board.add_text(f"{sample['task']}/{sample['language']}", "".join(text), sample["step"])


def _finished(run: Path) -> bool:
    """Whether the run has its model in one file, which is written after the last step."""
    return (run / MODEL_FOLDER / WEIGHTS_FILE).exists()


def _data_of(run: Path, recorded: Mapping[str, Any]) -> tuple[list[Path], Path | None]:
    """Returns (data, heldout): the data folder of each phase, and the held-out data folder, if there is one.
    `recorded`: the entry `data` of `config.json`. Raises ValueError if the content of a folder has changed."""
    if "folder" not in recorded or ("phases" in recorded) != ("phase_folders" in recorded):
        raise ValueError(f"{run / 'config.json'} does not say where its data are: start the run's command again")
    data = [run / folder for folder in recorded.get("phase_folders", [recorded["folder"]])]
    heldout = run / recorded["heldout"] if "heldout" in recorded else None
    to_check = [(folder, recorded.get("phases", recorded["fingerprints"])) for folder in data]
    if heldout is not None:
        to_check.append((heldout, recorded.get("heldout_fingerprints") or {}))
    for folder, fingerprints in to_check:
        # A fingerprint's name begins with its task; in a later phase the step follows, as in `mono from step 100`.
        for task_folder in sorted({folder / name.split()[0] for name in fingerprints}):
            if not task_folder.is_dir() or read_manifest(task_folder).fingerprint() not in fingerprints.values():
                raise ValueError(f"{task_folder} does not hold the data of {run} any more: restore them")
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
    """The content of each file by name, from the state after `step` steps.

    `earlier`: the content of the run's retrieval.json so far, whose scores of the untrained model are copied.
    """
    contents: dict[str, Any] = {"languages.json": _languages(config, data)}
    if heldout is not None and (heldout / "para").is_dir():
        contents |= _retrieval(config, state, heldout, step, earlier or {})
    model = objective_of(config.objective).build(config.model)
    model.load_state_dict(state)
    samples = [{"step": step, **sample} for sample in _samples(config, model.eval(), heldout or data[0], vocabulary)]
    return contents | {"samples.json": {"samples": samples}}  # written last: its step counts as the step of all files


def _languages(config: RunConfig, data: Sequence[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """The content of languages.json, by task and language. If a run has several phases, each value is the mean over all
    steps."""
    weights = phase_shares(phases(config.data, 0.0), config.train.steps)
    languages: dict[str, dict[str, dict[str, float]]] = {}
    for task, mean_rows in zip(TASKS, config.data.mean_rows, strict=True):
        if not mean_rows:
            continue
        for weight, folder in zip(weights, data, strict=True):
            by_language = read_manifest(folder / task).counts["by_language"] if (folder / task).is_dir() else {}
            for language, of_language in by_language.items():
                means = languages.setdefault(task, {}).setdefault(language, dict.fromkeys(_SHARES, 0.0))
                for key, manifest_key in _SHARES.items():
                    means[key] += weight * of_language[manifest_key]
    return languages


def _retrieval(
    config: RunConfig, state: State, heldout: Path, step: int, earlier: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """{"retrieval.json": its content}; empty if no language has enough pairs."""
    bitexts = group_by_language(stored_pairs(RowStore(heldout / "para")))
    if not bitexts:
        return {}
    sizes = {language: len(english) for language, (english, _) in bitexts.items()}
    if earlier.get("pairs") == sizes and "before" in earlier:
        before = earlier["before"]
    else:
        untrained = initial_encoder(config.model, config.objective.name, config.seed)
        before = retrieval_accuracies(untrained, bitexts, name="scoring retrieval by the untrained model")
    trained = take_encoder(state, config.model, main_encoder(objective_of(config.objective).encoders))
    return {
        "retrieval.json": {
            "step": step,
            "layers": list(range(config.model.discriminator_layers + 1)),
            "pairs": sizes,
            "candidates": sum(sizes.values()) / len(sizes),
            "before": before,
            "after": retrieval_accuracies(trained, bitexts, name="scoring retrieval"),
        }
    }


def _shown_records(store: RowStore, sides: int) -> list[int]:
    """The record numbers of the rows to show: the first row of each of up to 8 languages (language pairs, if an item
    has two `sides`). English comes first, then German, then the languages with the most rows among the first 256."""
    rows = store.read(np.arange(min(256, store.rows)))
    # For each row, the index of its first side among all sides.
    first_sides = sides * (np.cumsum(rows.item_counts) - rows.item_counts)
    row_languages = [frozenset(rows.languages[side : side + sides].tolist()) for side in first_sides]
    counts = Counter(row_languages)

    def priority(languages: frozenset[int]) -> tuple[bool, bool, int]:
        other = {store.languages[index] for index in languages} - {"en"}
        return not other, other == {"de"}, counts[languages]

    return [row_languages.index(languages) for languages in sorted(counts, key=priority, reverse=True)[:8]]


@torch.no_grad()
def _samples(config: RunConfig, model: nn.Module, data: Path, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The sentences to show, with the model's predictions: for each task in `data` that is trained on, the first item
    of each row of `_shown_records`. docs/reference/run-folder.md describes the format."""
    objective = objective_of(config.objective)
    samples = []
    for task, (name, mean_rows) in enumerate(zip(TASKS, config.data.mean_rows, strict=True)):
        if not mean_rows or not (data / name).is_dir():
            continue
        store = RowStore(data / name, config.model.language_embeddings)
        collate = objective.collate_for(store, "show")
        sides = 1 if name == "mono" else 2  # number of sides of an item
        for record in _shown_records(store, sides):
            rows = store.read(np.array([record]))
            batch = collate([(task, rows, np.array([record]))], config.seed, config.objective.mask_fraction, 0)
            tokens_BT, scores_BT = objective.tokens_and_probabilities(model(batch), batch)
            pieces, masked = tokens_BT[0].tolist(), set(objective.predicted_positions(batch).tolist())
            scores = [None] * len(pieces) if scores_BT is None else scores_BT[0].tolist()
            tokens = [
                {
                    "piece": vocabulary.piece(pieces[i]),
                    "original": vocabulary.piece(original),
                    "masked": i in masked,
                    "replaced": pieces[i] != original,
                    "score": scores[i],
                }
                for i, original in enumerate(rows.tokens[0, : rows.lengths[0]].tolist())
            ]
            languages = [store.languages[index] for index in rows.languages[:sides]]
            samples.append({"language": "–".join(languages), "task": name, "tokens": tokens})
    return samples
