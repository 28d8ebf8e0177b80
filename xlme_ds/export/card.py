"""The model card: how to load the folder, and what the run's files say about the model."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..config import EncoderName
from ..report.run_files import RunFiles
from ..translate.decoder import decoder_settings
from .exported_folder import ExportedModel

# Our class -> the class of transformers that loads it. AutoModelFor… loads every XLMEFor… that is not here.
_AUTO_CLASSES = {"XLMEModel": "AutoModel", "XLMEForConditionalGeneration": "AutoModelForSeq2SeqLM"}
_TASK_TITLES = {"mono": "monolingual text", "para": "translation pairs"}


def escape(value: Any) -> Any:
    """Escape text for Markdown: no markup, no HTML, one line. `Markup` and numbers stay as they are."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return re.sub(r"([\\`*_\[\]<>#|~&$!])", r"\\\1", re.sub(r"\s+", " ", value))


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    finalize=escape,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


def render_card(
    name: str,
    model: ExportedModel,
    about: str,
    languages: Sequence[str] = (),
    generator: bool = False,
) -> str:
    """The card of a model called `name`. `about`: Markdown that follows the card's first lines; `generator`: whether
    the export has a generator."""
    return _TEMPLATES.get_template("card.md.jinja").render(
        name=name,
        cfg=model.encoder.cfg,
        parameters=sum(parameter.numel() for parameter in model.encoder.parameters()),
        auto_class=Markup(_AUTO_CLASSES.get(model.architecture, model.architecture.replace("XLME", "AutoModel"))),
        native=model.native.name if model.native else "",
        trust=Markup("" if model.native else ", trust_remote_code=True"),
        decoder=decoder_settings(model.encoder.cfg) if model.has_decoder else {},
        about=Markup(about.strip()),
        languages=languages,
        generator=generator,
    )


def render_run_card(
    folder: Path,
    model: ExportedModel,
    layer: int | None,
    step: int | None,
    generator: bool,
    other_encoder: EncoderName | None,
) -> str:
    """The card of the run in `folder`. `step`: the step of the exported checkpoint, None for the run's end; results of
    later steps are left out. `generator`: whether the export has a generator. `other_encoder`: the exported encoder's
    name, if it is not the run's main encoder.

    Raises ValueError if a file of the run lacks an entry that the card shows.
    """
    run = RunFiles(folder)
    languages, config = run.languages, run.settings
    metrics, heldout = (
        [record for record in records if step is None or record["step"] <= step]
        for records in (run.metrics, run.heldout)
    )
    last_heldout = heldout[-1] if heldout else {}
    exported_step = config.get("train", {}).get("steps") if step is None else step
    is_same_model = other_encoder is None and run.retrieval.get("step") == exported_step
    try:
        about = _TEMPLATES.get_template("run.md.jinja").render(
            config=config,
            task=config.get("task"),
            objective=run.objective["description"],
            generator=generator,
            tokens=metrics[-1].get("tokens") if metrics else None,
            shares={title: _shares(languages[task]) for task, title in _TASK_TITLES.items() if languages.get(task)},
            measured=last_heldout.get("step"),
            metrics=_metrics(run.objective["quantities"], last_heldout),
            retrieval=_retrieval(run.retrieval) if run.retrieval and is_same_model else None,
            scores=run.scores and {"dev": None, "settings": 1} | run.scores,
            layer=layer,
            step=step,
            other_encoder=other_encoder,
        )
    except (KeyError, jinja2.UndefinedError) as error:
        raise ValueError(f"a JSON file of the run {run.name} is incomplete ({error}): restore or remove it") from None
    codes = {*languages.get("mono", {}), *(code for pair in languages.get("para", {}) for code in pair.split("-")[:2])}
    # The front matter takes bare language codes: `zh` for the corpus `zh-Hans`, `hi` for `hi_rom`.
    matches = [re.match(r"[a-z]{2,3}(?=$|[-_])", code) for code in codes]
    bare_codes = sorted({match.group() for match in matches if match})
    return render_card(config.get("name") or run.name, model, about, bare_codes, generator)


def _metrics(quantities: Mapping[str, Mapping[str, Any]], last_heldout: Mapping[str, Any]) -> dict[str, float]:
    """The values of the objective's quantities in the last record on held-out text, each under a description of the
    quantity."""
    values: dict[str, float] = {}
    for name, quantity in quantities.items():
        title = quantity["title"] + (f" in {quantity['unit']}" if quantity["unit"] else "")
        task_of_key = (
            {name: quantity["task"]} if quantity["task"] else {name: "", f"{name}_mono": "mono", f"{name}_para": "para"}
        )
        for key, task in task_of_key.items():
            if key in last_heldout:
                values[title + (f", {_TASK_TITLES[task]}" if task else "")] = last_heldout[key]
                if quantity["unigram"] and f"unigram_nll_{task}" in last_heldout:
                    values[f"the same of a unigram model, {_TASK_TITLES[task]}"] = last_heldout[f"unigram_nll_{task}"]
    return values


def _shares(table: Mapping[str, Mapping[str, float]]) -> list[tuple[str, float]]:
    """(code, share) of each language, the largest share first."""
    return sorted(((code, values["share"]) for code, values in table.items()), key=lambda item: (-item[1], item[0]))


def _retrieval(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict. `rows`: (layer, accuracies) for each layer, where the accuracies are en → xx and xx → en after
    training, then both before; `languages`: the number of languages; `candidates`: the mean number of candidates."""
    before, after = values["before"]["overall"], values["after"]["overall"]
    columns = zip(after["en_xx"], after["xx_en"], before["en_xx"], before["xx_en"], strict=True)
    return {
        "rows": list(zip(values["layers"], columns, strict=True)),
        "languages": len(values["pairs"]),
        "candidates": values["candidates"],
    }
