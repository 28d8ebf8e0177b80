"""Score an export by mteb's bitext mining: Tatoeba and FLORES-200, from a local folder.

    xlme bench peers.mteb --model EXPORT --data FOLDER [--out FOLDER]

mteb itself downloads its data from a hub. This command needs no network: it reads the published text files in FOLDER
and its subfolders. LASER publishes two files per pair of Tatoeba: tatoeba.deu-eng.deu and tatoeba.deu-eng.eng.
FLORES-200 has one file per language, such as deu_Latn.devtest. The tasks, the search and the scores are mteb's own. A
task without files is left out, and so is a pair of languages that mteb's task does not have.
"""

import os
import warnings
from itertools import pairwise, permutations
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.measure import one_sentence
from xlme_ds.evaluate.output import ResultTable, percent, terminal
from xlme_ds.evaluate.text_lines import read_sentence_pairs, require_same_length, split_lines
from xlme_ds.io.folders import require_writable
from xlme_ds.io.help import call_from_command_line


def tasks_of(folder: Path) -> list[Any]:
    """mteb's tasks, with the data in `folder` in place of mteb's data. A task has the pairs of languages that are both
    in mteb's task and in `folder`.

    Raises ValueError for a damaged file, naming it, and for a folder without files of the tasks.
    """
    import mteb
    from datasets import Dataset

    tatoeba, flores = (mteb.get_task(name) for name in ("Tatoeba", "FloresBitextMining"))
    tatoeba.dataset = {}
    for path in sorted(folder.rglob("tatoeba.*-eng.eng")):  # the English side of each pair
        pair = path.name.split(".")[1]
        first, second = read_sentence_pairs(path.with_suffix(f".{pair.removesuffix('-eng')}"), path)
        tatoeba.dataset[pair] = {"test": Dataset.from_dict({"sentence1": first, "sentence2": second})}
    known_languages = {language for pair in flores.hf_subsets for language in pair.split("-")}
    files = {path.stem: path for path in sorted(folder.rglob("*.devtest")) if path.stem in known_languages}
    sentences = {language: split_lines(path.read_bytes(), path) for language, path in files.items()}
    for one, other in pairwise(sentences):
        require_same_length(sentences[one], files[one], sentences[other], files[other])
    flores.dataset = {"devtest": Dataset.from_dict(sentences)}
    pairs = {"-".join(languages) for languages in permutations(sentences, 2)} | set(tatoeba.dataset)
    for task in (tatoeba, flores):
        task.hf_subsets = [pair for pair in task.hf_subsets if pair in pairs]
        task.data_loaded = True
    tasks = [task for task in (tatoeba, flores) if task.hf_subsets]
    if not tasks:
        raise ValueError(f"{folder} has no files of Tatoeba or FLORES-200: name the folder above them")
    return tasks


def score(model: Path, data: Path, out: Path | None = None) -> None:
    """Score an export, and print a table.

    Args:
        model: Folder of `xlme export`, or of a SentenceTransformer that was trained from one.
        data: Folder with the test sets; its subfolders are searched, too.
        out: Folder for mteb's results, one JSON file per task.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported
    warnings.filterwarnings("ignore", "To copy construct from a tensor", UserWarning)  # mteb causes it in every search
    with one_sentence("xlme bench peers.mteb", "mteb"):
        tasks = tasks_of(data)
        if not (model / "modules.json").exists():
            raise ValueError(f"{model} is no folder of `xlme export`: name one by --model")
        if out:
            require_writable(out)
    import mteb
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(model), trust_remote_code=True)
    results = list(mteb.evaluate(encoder, tasks, cache=None, co2_tracker=False, show_progress_bar=False).task_results)
    note = "each sentence is matched with the other language's nearest one by cosine; mteb's main score is F1"
    columns = ["task", "pairs of languages", "accuracy", "F1"]
    table = ResultTable(f"{model}: mteb's bitext mining (%)", columns, notes=[note])
    for result in results:  # means over the task's pairs of languages
        pairs = [pair_scores for split in result.scores.values() for pair_scores in split]
        means = [percent(fmean(pair_scores[measure] for pair_scores in pairs)) for measure in ("accuracy", "f1")]
        table.rows.append([result.task_name, str(len(pairs)), *means])
    table.show(terminal(120))
    if out:
        out.mkdir(parents=True, exist_ok=True)
        for result in results:
            result.to_disk(out / f"{result.task_name}.json")


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    call_from_command_line(score, "xlme bench peers.mteb", arguments, __doc__)


if __name__ == "__main__":
    main()
