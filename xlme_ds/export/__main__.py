"""Command line: `python -m xlme_ds.export --run DIR --to DIR` writes a trained model as a Hugging Face folder.

`--from-hf DIR` in place of `--run` takes XLM-R, as Hugging Face stores it. Commands that read a run folder read such a
folder too.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import tyro

from ..cli import fail, program
from ..finetune.downstream_tasks import TASKS, Kind
from ..folders import at_step
from ..models.text_encoder import TextEncoder, Which
from ..objectives import objective_of
from ..trained.runs import load_run, main_encoder
from ..xlm_roberta import read_xlm_roberta
from .card import render_card, run_card
from .exported_folder import Architecture, Exported, write_folder

# By the head that was trained on an encoder.
_PRETRAINED: dict[str, Architecture] = {"replaced_head.": "XLMEForPreTraining", "masked_head.": "XLMEForMaskedLM"}
_FINETUNED: dict[Kind, Architecture] = {
    "tokens": "XLMEForTokenClassification",
    "pair": "XLMEForSequenceClassification",
    "span": "XLMEForQuestionAnswering",
}


@dataclass(frozen=True)
class ExportSettings:
    """Write a trained model as a folder for Hugging Face transformers."""

    to: Path
    """Folder to make."""
    run: Path | None = None
    """Folder of a run, pre-trained or fine-tuned. RUN@STEP names a checkpoint of pre-training; a run that is not
    finished counts as its newest one."""
    from_hf: Path | None = None
    """Folder of an XLM-R model: config.json, model.safetensors or pytorch_model.bin, sentencepiece.bpe.model."""
    layer: int | None = None
    """Cut the encoder after this layer, for sentence vectors (the paper's retrieval reads layer 9 of 12)."""
    which: Which | None = None
    """This encoder of `--run` alone, without a head; by default the whole model."""


def main(arguments: list[str] | None = None) -> None:
    """Write the folder and name it; a user's mistake ends in one line on stderr and exit code 2."""
    config = tyro.cli(ExportSettings, prog=program("export"), args=arguments)
    try:
        if (config.run is None) == (config.from_hf is None):
            raise ValueError("name what to export: either --run DIR or --from-hf DIR")
        if config.which is not None and config.from_hf is not None:
            raise ValueError("--which is for --run: XLM-R has one encoder, leave it out")
        if config.run is not None:
            export_run(config.run, config.to, config.layer, config.which)
        elif config.from_hf is not None:
            export_xlm_roberta(config.from_hf, config.to, config.layer)
        print(config.to)
    except (ValueError, OSError) as error:
        fail("xlme_ds.export", error)


def export_run(folder: Path, to: Path, layer: int | None = None, which: Which | None = None) -> None:
    """A run: its encoder with the head, and the generator or the decoder where it has one; an encoder alone with
    `which`, and its first layers with `layer`."""
    run = load_run(folder)
    encoder, first = run.encoder(which), main_encoder(run.encoders)
    of = None if run.task else which or first
    if layer is not None or which is not None:
        main, generator = Exported(encoder if layer is None else cut(encoder, layer), "XLMEModel", which=of), None
    elif run.task:
        task = TASKS[run.task]
        main, generator = Exported(encoder, _FINETUNED[task.kind], run.state, task.labels), None
    elif architecture := objective_of(run.objective).export_class:
        main, generator = Exported(encoder, cast(Architecture, architecture), run.state, which=of), None
    else:
        main, *others = (
            Exported(run.encoder(name), _PRETRAINED[head], run.state, which=name) for name, head in run.encoders.items()
        )
        generator = others[0] if others else None
    other = of if of != first else None
    card = run_card(at_step(folder)[0], main.encoder, main.architecture, layer, run.step, generator is not None, other)
    write_folder(to, main, run.vocabulary, card, generator)


def export_xlm_roberta(folder: Path, to: Path, layer: int | None = None) -> None:
    """XLM-R, with its masked language modelling head where it has one and no layers are cut."""
    encoder, head, vocabulary = read_xlm_roberta(folder)
    if layer is not None:
        encoder, head = cut(encoder, layer), {}
    architecture: Architecture = "XLMEForMaskedLM" if head else "XLMEModel"
    about = "The weights of an XLM-R model, converted: `{}`.".format(folder.resolve().name.replace("`", ""))
    card = render_card(folder.resolve().name, encoder, architecture, about)
    write_folder(to, Exported(encoder, architecture, head, separators=2), vocabulary, card)


def cut(encoder: TextEncoder, layer: int) -> TextEncoder:
    """The first `layer` layers, whose last hidden states are those of that layer in the whole.

    Raises ValueError for a layer that is not there, and for a pre-LN model, which has a norm after its last layer
    alone.
    """
    cfg = encoder.cfg
    if not 1 <= layer <= cfg.discriminator_layers:
        raise ValueError(f"--layer {layer} is not there: the model has layers 1 to {cfg.discriminator_layers}")
    if cfg.norm == "pre" and layer < cfg.discriminator_layers:
        raise ValueError(
            f"--layer {layer} is for post-LN models: this one is pre-LN, leave it out and read hidden_states[{layer}]"
        )
    short = TextEncoder(replace(cfg, discriminator_layers=layer))
    short.load_state_dict({name: value for name, value in encoder.state_dict().items() if name in short.state_dict()})
    return short.eval()


if __name__ == "__main__":
    main()
