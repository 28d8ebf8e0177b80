"""Settings of `xlme export`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..config import EncoderName

ModelType = Literal["xlme", "xlm-roberta", "modernbert"]


@dataclass(frozen=True)
class ExportSettings:
    """Write a trained model as a folder for Hugging Face transformers.

    xlme export --run runs/base --out exports/base
    """

    out: Path
    """Folder to make."""
    run: Path | None = None
    """Folder of a run, pre-trained or fine-tuned; required without --from-hf. RUN@STEP names a checkpoint of
    pre-training; for a run that is not finished, the newest checkpoint is taken."""
    from_hf: Path | None = None
    """Folder of an XLM-R model: config.json, model.safetensors or pytorch_model.bin, sentencepiece.bpe.model."""
    layer: int | None = None
    """Cut the encoder after this layer, for sentence vectors (the paper's retrieval reads layer 9 of 12)."""
    which: EncoderName | None = None
    """Export only this encoder of `--run`, without a head; by default the whole model is exported."""
    model_type: ModelType | None = None
    """`xlm-roberta` and `modernbert` load everywhere without our code; `xlme` has its code in the folder
    (trust_remote_code). By default `xlm-roberta` for every model of XLM-R's shape: post-LN, learned positions, no
    relative bias, no languages; `modernbert` for model.body modern; `xlme` for all other models."""
    onnx: bool = False
    """Write model.onnx too. Its output is the last hidden states, or the logits if the model was fine-tuned. Needs onnx
    and onnxscript."""
