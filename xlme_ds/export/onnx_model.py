"""Writes model.onnx into an exported folder: the encoder, with its head if the model was fine-tuned. model.onnx takes
any number of texts, of any length that the model reads."""

import logging
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data.schema import BOS, EOS, UNK
from ..io.files import errors_naming
from ..trained.exports import NativeFormat

ONNX_FILE = "model.onnx"
# If all parameters together have at most this size, they are put into model.onnx, which cannot exceed 2 GiB; otherwise
# into model.onnx.data.
_MAX_BYTES = 1900 * 2**20
_PACKAGES = ("transformers", "onnx", "onnxscript")
# The classes of fine-tuned models and their outputs. All other models give the encoder's last hidden states.
_OUTPUTS = {
    "XLMEForTokenClassification": ("logits",),
    "XLMEForSequenceClassification": ("logits",),
    "XLMEForQuestionAnswering": ("start_logits", "end_logits"),
}


def require_onnx_exportable(has_decoder: bool) -> None:
    """Raise ValueError if a package is missing, or if the model has a decoder."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if has_decoder:
        raise ValueError(
            "onnx writes only an encoder, but this model has a decoder: export its encoder alone (--which encoder)"
        )


class _OnnxWrapper(nn.Module):
    """A loaded model with exactly the inputs and outputs of model.onnx."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...]):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, language_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs, in the order of `self.outputs`."""
        languages = {} if language_ids is None else {"language_ids": language_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **languages)
        return tuple(output[name] for name in self.outputs)


def write_onnx(folder: Path, architecture: str, native: NativeFormat | None, has_languages: bool) -> None:
    """Write model.onnx into the exported `folder`; the other arguments are as in `ExportedModel`. The inputs of
    model.onnx are int64: `input_ids` and `attention_mask`, [B, T], and, for a model with language embeddings,
    `language_ids`, [B]."""
    loaded, outputs = _load(folder, architecture, native), _OUTPUTS.get(architecture, ("last_hidden_state",))
    tokens = torch.tensor([[BOS, UNK, UNK, EOS]] * 2)  # two rows: torch.export would make a size of 1 a constant
    batch, length = torch.export.Dim("batch"), torch.export.Dim("tokens")
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    dynamic_shapes: dict[str, Any] = {name: {0: batch, 1: length} for name in inputs}
    if has_languages:
        inputs["language_ids"] = torch.zeros(len(tokens), dtype=torch.long)
        dynamic_shapes["language_ids"] = {0: batch}
    float32_bytes = 4 * sum(parameter.numel() for parameter in loaded.parameters())
    # Silences the warning that torchvision, which is not needed, is missing.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad(), errors_naming(folder / ONNX_FILE):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _OnnxWrapper(loaded, outputs).eval(),
            (),
            str(folder / ONNX_FILE),
            kwargs=inputs,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=dynamic_shapes,
            external_data=float32_bytes > _MAX_BYTES,
            dynamo=True,
            verbose=False,
        )


def _load(folder: Path, architecture: str, native: NativeFormat | None) -> nn.Module:
    """The model in `folder`. A head of fine-tuning is kept, a head of pre-training is left out."""
    import transformers

    if native:
        # For XLMEForMaskedLM transformers has, for example, XLMRobertaForMaskedLM; for XLMEForPreTraining it has only
        # the encoder's class.
        ending = architecture.removeprefix("XLME").replace("ForPreTraining", "Model")
        model_class = getattr(transformers, native.class_prefix + ending)
    else:
        from .remote import modeling_xlme

        model_class = getattr(modeling_xlme, architecture)
    loaded = model_class.from_pretrained(folder)
    return loaded if architecture in _OUTPUTS else loaded.base_model
