"""Exports a run of this package, or an XLM-R in Hugging Face's form, as a folder for transformers."""

from dataclasses import replace
from pathlib import Path

from ..checkpoint_names import run_and_step
from ..cli import note
from ..config import EncoderName, ModelType
from ..finetune.downstream_tasks import DOWNSTREAM_TASKS, TaskKind
from ..io.files import read_json, real_path
from ..io.folders import require_new
from ..models.text_encoder import TextEncoder
from ..objectives import objective_of
from ..trained.config_json import MODEL_TYPE, read_config
from ..trained.exports import FORMATS, GENERATOR_FOLDER, WHICH_KEY, read_heads
from ..trained.runs import load_run, main_encoder
from ..trained.xlm_roberta import read_xlm_roberta
from .card import render_card, render_run_card
from .exported_folder import ExportedModel, write_folder

# Prefix of the parameters of an encoder's head -> class to export.
_PRETRAINED = {"replaced_head.": "XLMEForPreTraining", "masked_head.": "XLMEForMaskedLM"}
_FINETUNED: dict[TaskKind, str] = {
    "tokens": "XLMEForTokenClassification",
    "pair": "XLMEForSequenceClassification",
    "span": "XLMEForQuestionAnswering",
}


def export_run(
    folder: Path,
    out: Path,
    layer: int | None = None,
    which: EncoderName | None = None,
    model_type: ModelType | None = None,
    onnx: bool = False,
) -> None:
    """Export a run. By default the export has the main encoder with its head, and the generator if there is one; with
    an objective's `export_class`, it has what this class holds, such as a decoder. `which`: export only this encoder,
    without a head. `layer`: export only the encoder's layers up to this one, without a head."""
    require_new(out)  # before the weights are read, which may take long
    run = load_run(folder)
    encoder, main_name = run.encoder(which), main_encoder(run.encoders)
    exported_name = None if run.task else which or main_name
    architecture, labels = "XLMEModel", tuple[str, ...]()
    if layer is not None:
        encoder = truncate_encoder(encoder, layer)
    elif which is None and run.task:
        task = DOWNSTREAM_TASKS[run.task]
        architecture, labels = _FINETUNED[task.kind], task.labels
    elif which is None:
        architecture = objective_of(run.objective).export_class or _PRETRAINED[run.encoders[main_name]]
    main = ExportedModel(encoder, architecture, run.state, labels, which=exported_name)
    main = replace(main, model_type=_choose_model_type(main, model_type))
    generator = None
    if architecture == "XLMEForPreTraining" and "generator" in run.encoders:
        generator = replace(main, encoder=run.encoder("generator"), architecture="XLMEForMaskedLM", which="generator")
    other_encoder = exported_name if exported_name != main_name else None
    card = render_run_card(run_and_step(folder)[0], main, layer, run.step, generator is not None, other_encoder)
    write_folder(out, main, run.vocabulary, card, generator, onnx)


def _choose_model_type(model: ExportedModel, model_type: ModelType | None) -> ModelType:
    """Returns `model_type`. If it is None, returns one of transformers' own types if one can hold the model, else
    `xlme`. Raises ValueError for a type that cannot hold the model."""
    cfg, advice = model.encoder.cfg, f"leave out model_type {model_type}"
    unsupported = {  # type -> the part or setting of the model that it cannot hold, if any
        name: "a decoder" if model.has_decoder else native.unsupported_setting(cfg) for name, native in FORMATS.items()
    }
    if model_type is None:
        return next((name for name, part in unsupported.items() if not part), "xlme")
    if unsupported.get(model_type):
        native = FORMATS[model_type].name
        raise ValueError(f"the model has {unsupported[model_type]}, which {native} does not have: {advice}")
    if model_type == MODEL_TYPE and cfg.body != "xlme":
        raise ValueError(f"the model has body {cfg.body}, which our classes do not have: {advice}")
    return model_type


def export_xlm_roberta(
    folder: Path, out: Path, layer: int | None = None, model_type: ModelType | None = None, onnx: bool = False
) -> None:
    """Export a model of XLM-R's shape: XLM-R, or an export of ours. The export has the head of pre-training if the
    model has one and `layer` is None."""
    require_new(out)
    encoder, vocabulary = read_xlm_roberta(folder)
    if layer is None:
        head = read_heads(folder)
    else:
        encoder, head = truncate_encoder(encoder, layer), {}
    prefix = next(iter(head), "").split(".")[0]
    architecture = _PRETRAINED.get(f"{prefix}.", "XLMEModel")
    which = read_config(folder).get(WHICH_KEY)  # an export of ours says which encoder it is
    main = ExportedModel(encoder, architecture, head, separators=_separators(folder), which=which)
    main = replace(main, model_type=_choose_model_type(main, model_type))
    about = "The weights of an XLM-R model, converted: `{}`.".format(real_path(folder).name.replace("`", ""))
    write_folder(out, main, vocabulary, render_card(real_path(folder).name, main, about), onnx=onnx)
    if layer is None and (generator := folder / GENERATOR_FOLDER).is_dir():
        note(f"{generator} is left out: export this folder, too, if you need it")


def _separators(folder: Path) -> int:
    """Number of `</s>` that the tokenizer of a model of XLM-R's shape puts between two texts."""
    if "vocabulary_sha256" not in read_config(folder):
        return 2  # XLM-R's own tokenizer; an export of ours may have another
    tokenizer = folder / "tokenizer.json"
    processor = read_json(tokenizer, dict).get("post_processor") if tokenizer.exists() else None
    specials = [part.get("SpecialToken", {}).get("id") for part in (processor or {}).get("pair", ())]
    return max(specials.count("</s>") - 1, 0)  # the last ends the pair; 0: as in the model's layout


def truncate_encoder(encoder: TextEncoder, layer: int) -> TextEncoder:
    """The encoder's first `layer` layers. Its last hidden states are those of layer `layer` in the full encoder.

    Raises ValueError for a layer that does not exist, and for any but the last layer of a pre-LN model, because only
    the last layer's output is normalised.
    """
    cfg = encoder.cfg
    if not 1 <= layer <= cfg.discriminator_layers:
        raise ValueError(f"layer {layer} does not exist: the model has layers 1 to {cfg.discriminator_layers}")
    if cfg.norm == "pre" and layer < cfg.discriminator_layers:
        raise ValueError(
            f"layer {layer} needs a post-LN model, and this one is pre-LN: leave out layer, and read "
            f"hidden_states[{layer}] of the exported model"
        )
    short = TextEncoder(replace(cfg, discriminator_layers=layer))
    short.load_state_dict({name: value for name, value in encoder.state_dict().items() if name in short.state_dict()})
    return short.eval()
