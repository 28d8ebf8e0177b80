"""Writes a model as a folder that Hugging Face transformers and sentence-transformers load."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import EncoderName, ModelType
from ..data.schema import BOS, EOS, LAYOUTS, PAD
from ..data.vocabulary import Vocabulary
from ..io.files import file_sha256, write_json
from ..io.folders import atomic_folder
from ..models.text_encoder import TextEncoder
from ..trained.config_json import CONFIG_FILE, MODEL_TYPE, SENTENCEPIECE_FILE
from ..trained.exports import (
    DIFFERENCE,
    DIFFERENCE_FILE,
    EMBEDDING,
    ENCODER_PREFIX,
    EXPORTED_SETTINGS,
    FILES_KEY,
    FORMATS,
    GENERATOR_FOLDER,
    WHICH_KEY,
    NativeFormat,
)
from ..trained.weights import REPLACED_HEAD_FILE, SETTINGS_KEY, WEIGHTS_FILE, save_weights
from ..translate.decoder import decoder_settings
from ..translate.decoding import generation_settings
from .onnx_model import require_onnx_exportable, write_onnx
from .tokenizer import tokenizer_files

REMOTE = Path(__file__).parent / "remote"
CODE = ("configuration_xlme.py", "modeling_xlme.py")
DECODER_CODE = "modeling_xlme_translation.py"

# Class of pre-training or translation -> the prefixes of its parameters outside the encoder. All other classes have one
# head, with the prefix `head.`.
_HEADS: dict[str, tuple[str, ...]] = {
    "XLMEModel": (),
    "XLMEForPreTraining": ("replaced_head.",),
    "XLMEForMaskedLM": ("masked_head.",),
    "XLMEForConditionalGeneration": ("decoder.", "masked_head."),
}


@dataclass(frozen=True)
class ExportedModel:
    """One encoder with the head that was trained on it, or with the decoder and the head of a translation model.

    `architecture`: the class in `remote/` that loads the export. `state`: the head's parameters, under the names of
    that class (`head.weight`, …), and under GDES the `difference_n`; other entries are ignored. `labels`: the labels
    that the head predicts. `separators`: number of `</s>` between two texts, 2 for XLM-R; 0: as in the model's layout.
    `which`: the encoder's name in the pre-trained model.
    """

    encoder: TextEncoder
    architecture: str
    state: Mapping[str, Tensor] = field(default_factory=dict)
    labels: Sequence[str] = ()
    separators: int = 0
    which: EncoderName | None = None
    model_type: ModelType = "xlme"

    @property
    def has_decoder(self) -> bool:
        """Whether this is a whole translation model, which has a decoder."""
        return self.architecture == "XLMEForConditionalGeneration"

    @property
    def native(self) -> NativeFormat | None:
        """The format of transformers' own class; None for the classes in `remote/`."""
        return FORMATS.get(self.model_type)


def write_folder(
    out: Path,
    main: ExportedModel,
    vocabulary: Vocabulary,
    card: str,
    generator: ExportedModel | None = None,
    onnx: bool = False,
) -> None:
    """Write `main` into the folder `out`, which must not exist, with weights in float32 and the model card `card`
    (Markdown). A `generator` gets a subfolder. With `onnx`, write `main` as model.onnx too.

    Raises ValueError if `out` exists, if `vocabulary` and a model differ in size, and if `main` cannot be written as
    ONNX. After any error nothing of the new folder stays.
    """
    if onnx:
        require_onnx_exportable(main.has_decoder)
    with atomic_folder(out) as partial:
        _write_encoder(partial, main, vocabulary)
        _write_sentence_transformers(partial, main)
        (partial / "README.md").write_text(card, encoding="utf-8")
        if generator is not None:
            (partial / GENERATOR_FOLDER).mkdir()
            _write_encoder(partial / GENERATOR_FOLDER, generator, vocabulary)
            # The difference between the discriminator's and the generator's embedding (GDES), if the model has one.
            block_names = (f"difference_{n}" for n in range(len(main.state)))
            blocks = [main.state[name] for name in block_names if name in main.state]
            if blocks:
                save_weights({DIFFERENCE: torch.cat(blocks).float()}, partial / DIFFERENCE_FILE)
        if onnx:
            write_onnx(partial, main.architecture, main.native, bool(main.encoder.cfg.language_embeddings))


def _write_encoder(folder: Path, model: ExportedModel, vocabulary: Vocabulary) -> None:
    """Write the tokenizer, the settings and the weights of `model` into `folder`. The metadata of the weights have
    checksums of the other files."""
    cfg = model.encoder.cfg
    if vocabulary.size != cfg.vocabulary:
        raise ValueError(
            f"{vocabulary.path} has {vocabulary.size} ids, the model {cfg.vocabulary}: name the model's vocabulary"
        )
    layout = LAYOUTS[cfg.layout]
    if model.separators:
        layout = replace(layout, between=(EOS,) * model.separators)
    for name, content in tokenizer_files(vocabulary, cfg.max_positions, layout).items():
        write_json(folder / name, content)
    shutil.copyfile(vocabulary.path, folder / SENTENCEPIECE_FILE)
    config, state = _as_native(folder, model, model.native) if model.native else _as_xlme(folder, model)
    write_json(folder / CONFIG_FILE, _common_settings(model) | config | {"vocabulary_sha256": vocabulary.sha256})
    # Two files need no checksum here: a reader compares the settings in config.json with those in the metadata, and the
    # file of a discriminator's head has a checksum of its own.
    without_checksum = CONFIG_FILE, REPLACED_HEAD_FILE
    files = (path for path in folder.iterdir() if path.name not in without_checksum and not path.name.startswith("."))
    checksums = {path.name: file_sha256(path) for path in files if path.is_file()}
    # Without the settings that name classes: they do not change what the weights mean.
    settings = {name: value for name, value in config.items() if name not in ("architectures", "auto_map")}
    metadata = {FILES_KEY: checksums, SETTINGS_KEY: settings}
    metadata_json = {key: json.dumps(content, sort_keys=True) for key, content in metadata.items()}
    _write_state(state, folder / WEIGHTS_FILE, metadata_json)


def _as_xlme(folder: Path, model: ExportedModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (settings, parameters) for the classes in `remote/`. Copies the code of the classes to `folder` and, for
    a translation model, writes generation_config.json there."""
    for name in (*CODE, DECODER_CODE) if model.has_decoder else CODE:
        shutil.copyfile(REMOTE / name, folder / name)
    if model.has_decoder:
        write_json(folder / "generation_config.json", generation_settings(model.encoder.cfg))
    layers = {f"{ENCODER_PREFIX}encoder.{name}": value for name, value in model.encoder.encoder.state_dict().items()}
    embedding = {ENCODER_PREFIX + EMBEDDING: torch.cat(model.encoder.embedding_blocks).detach()}
    return _xlme_settings(model), embedding | layers | _head(model)


def _as_native(folder: Path, model: ExportedModel, native: NativeFormat) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns (settings, parameters) for a class of transformers. A discriminator's head is not among the parameters
    but is written to its own file, because transformers has no class for it."""
    ending, head = model.architecture.removeprefix("XLME"), _head(model)
    if ending == "ForPreTraining":
        _write_state(head, folder / REPLACED_HEAD_FILE)
        ending = "Model"
    config = native.config(model.encoder.cfg) | {"architectures": [f"{native.class_prefix}{ending}"]}
    return config, native.state(model.encoder, ending, head)


def _head(model: ExportedModel) -> dict[str, Tensor]:
    """The parameters of the architecture's head, and of its decoder if it has one; empty for `XLMEModel`."""
    prefixes = _HEADS.get(model.architecture, ("head.",))
    return {name: value for name, value in model.state.items() if name.startswith(prefixes)}


def _write_state(state: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a file of weights in float32, as transformers reads it."""
    state = {name: value.float().contiguous() for name, value in state.items()}
    save_weights(state, path, {"format": "pt", **(metadata or {})})


def _common_settings(model: ExportedModel) -> dict[str, Any]:
    """Settings that have the same names in all model types."""
    config: dict[str, Any] = {
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "dtype": "float32",
    }
    if model.which is not None:
        config[WHICH_KEY] = model.which
    if model.labels:
        config["id2label"] = {str(n): label for n, label in enumerate(model.labels)}
        config["label2id"] = {label: n for n, label in enumerate(model.labels)}
    return config


def _xlme_settings(model: ExportedModel) -> dict[str, Any]:
    """Settings for the classes in `remote/`."""
    cfg = model.encoder.cfg
    # The classes that can load this folder: every class for fine-tuning, because its head may start untrained, but a
    # class of pre-training only if its head is in the folder.
    auto_map = {"AutoConfig": "configuration_xlme.XLMEConfig", "AutoModel": "modeling_xlme.XLMEModel"}
    for task in ("PreTraining", "MaskedLM", "TokenClassification", "SequenceClassification", "QuestionAnswering"):
        if f"XLMEFor{task}" not in _HEADS or model.architecture == f"XLMEFor{task}":
            auto_map[f"AutoModelFor{task}"] = f"modeling_xlme.XLMEFor{task}"
    if model.has_decoder:
        auto_map["AutoModelForSeq2SeqLM"] = f"modeling_xlme_translation.{model.architecture}"
    config = {their_name: getattr(cfg, our_name) for our_name, their_name in EXPORTED_SETTINGS.items()}
    config |= {
        "model_type": MODEL_TYPE,
        "architectures": [model.architecture],
        "auto_map": auto_map,
        "mask_token_id": cfg.vocabulary - 1,
    }
    return config | decoder_settings(cfg) if model.has_decoder else config


def _write_sentence_transformers(folder: Path, model: ExportedModel) -> None:
    """Write the files with which sentence-transformers takes the mean of the last hidden states as a sentence's
    vector."""
    modes = {f"pooling_mode_{mode}": mode == "mean_tokens" for mode in ("cls_token", "mean_tokens", "max_tokens")}
    files = {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ],
        "sentence_bert_config.json": {"max_seq_length": model.encoder.cfg.max_positions, "do_lower_case": False},
        f"1_Pooling/{CONFIG_FILE}": {"word_embedding_dimension": model.encoder.cfg.width} | modes,
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        write_json(folder / name, content)
