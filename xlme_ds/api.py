"""`xlme_ds.pretrain` and `xlme_ds.load`: a run in this process, and a trained model that reads plain text.

N sentences, T tokens, M masks, D width.
"""

import gc
import importlib.util
import os
import warnings
import zlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from .checkpoint_names import run_and_step
from .cli import format_number
from .config import RunConfig
from .data.order import phase_shares
from .data.schema import LAYOUTS
from .engine.build import require_engine, with_shared_precision
from .engine.ranks import SharedError, on_all_ranks, on_gpu, process_group, torch_variables
from .evaluate.report_data import write_model_and_report_data
from .evaluate.vectors import hidden_states, sentence_vectors
from .io.argument_types import check_argument_types, require_unicode
from .models.heads import MaskedLanguageModelHead, ReplacedTokenHead
from .models.text_encoder import TextEncoder, language_index
from .objectives import objective_of
from .plan.layout import ParallelLayout
from .plan.memory import peak_memory
from .report import run_page
from .train import run
from .train.opening import opening_lines, pretraining_info, read_inputs, starting_folders
from .train.resume import check_resume
from .train.run_folder import RunFolder
from .train.stop import StopRequest
from .trained.config_json import is_export
from .trained.encoders import load_encoder, load_whole_export
from .trained.exports import GENERATOR_FOLDER, read_heads
from .trained.runs import TrainedEncoder, load_run
from .trained.weights import WEIGHTS_FILE
from .validate import validate

MASK = "<mask>"
Head = TypeVar("Head", MaskedLanguageModelHead, ReplacedTokenHead)


@check_argument_types
def pretrain(
    config: RunConfig,
    data: Path | str | Sequence[Path | str],
    out: Path | str,
    heldout: Path | str | None = None,
    stop: StopRequest | None = None,
    profiled: int = 0,
) -> Path | None:
    """Train, write the report page, and return `out`, or None if a signal stopped the run. Collective: every rank must
    call it. With several ranks, an error that is not of all ranks ends the process.

    `data` is a folder, or a list with one folder for each phase of `data.phase_steps`. `stop` is the caller's own
    `StopRequest`, if it has one. `profiled` is the number of steps to profile.
    """
    config = _validated(config, profiled)
    folders, run_folder, heldout_folder = _folders(data), Path(out), None if heldout is None else Path(heldout)

    def report(state: dict[str, Tensor]) -> Path:
        write_model_and_report_data(run_folder, config, state, folders, heldout_folder)
        return run_page.write_report(run_folder)

    stop_request = stop or StopRequest()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # DeepSpeed calls collectives that torch has renamed
        try:
            finished = run.pretrain(config, folders, run_folder, heldout_folder, stop_request, report, profiled)
        finally:
            gc.collect()  # frees the engine, whose parts refer to each other, before the next run of this process
            if stop is None:
                stop_request.release()
    return run_folder if finished else None


def dry_run(
    config: RunConfig,
    data: Path | str | Sequence[Path | str],
    out: Path,
    heldout: Path | None = None,
    profiled: int = 0,
) -> None:
    """Check everything that could stop `pretrain` at its start, and print the run's memory and operations. Writes
    nothing. Collective: every rank must call it."""
    config = _validated(config, profiled)
    with process_group(config.engine, config.train.watchdog_minutes) as (rank, world):
        config = replace(config, engine=with_shared_precision(config.engine))
        with closing(RunFolder(out, root=rank == 0, writes=False)) as folder:
            folders, sources = _folders(data), on_all_ranks(lambda: starting_folders(config, out))
            read = partial(read_inputs, config, folders, heldout, folder, sources, rank, world)
            loader, heldout_loader, _ = on_all_ranks(read)
            start = on_all_ranks(lambda: check_resume(config, loader, heldout_loader, folder) if rank == 0 else 0)
        require_engine(config)
    if rank:
        return
    info = pretraining_info(config, loader, None, root=False)
    try:
        layout = ParallelLayout.of(config, world, config.engine.precision, loader.row_tokens, on_gpu=on_gpu())
        moment, memory = peak_memory(layout)
        peak_text = f"{sum(memory.values()) / 2**30:.2f} GiB a process, {moment}"
    except ValueError as error:  # the planner has no formula for this engine
        peak_text = f"not counted ({error})"
    shares = phase_shares(loader.phases, config.train.steps)
    flops = sum(step_flops * share for step_flops, share in zip(info.flops, shares, strict=True))  # mean of a step
    print("\n".join(opening_lines(config, out, start, loader, world, info)))
    print(
        f"  memory, by count: {peak_text}\n"
        f"  operations: {format_number(flops)} FLOP a step, {format_number(flops * config.train.steps)} in all\n"
        "a dry run: nothing was written, and everything that can be checked before the first step holds"
    )


def _weights_stamp(export: Path) -> list[tuple[int, int, int] | None]:
    """Inode, size and a checksum of the last MiB of the weights of an export's two encoders; None for a file that does
    not exist. A new export may get the inodes of a deleted one."""
    stamps: list[tuple[int, int, int] | None] = []
    for file in (export / name / WEIGHTS_FILE for name in (".", GENERATOR_FOLDER)):
        if not file.exists():
            stamps.append(None)
            continue
        with file.open("rb") as weights:
            stat = os.fstat(weights.fileno())
            weights.seek(max(stat.st_size - 2**20, 0))
            stamps.append((stat.st_ino, stat.st_size, zlib.crc32(weights.read())))
    return stamps


def _folders(data: Path | str | Sequence[Path | str]) -> list[Path]:
    """The folders that `data` names, one for each phase."""
    return [Path(data)] if isinstance(data, str | os.PathLike) else [Path(folder) for folder in data]


def _validated(config: RunConfig, profiled: int) -> RunConfig:
    """`config` as `validate` returns it for the number of processes that were launched. Raises SharedError for a
    mistake in the settings."""
    try:
        config = validate(config, int(torch_variables(os.environ).get("WORLD_SIZE", 1)))
        if profiled < 0:
            raise ValueError(f"--profile {profiled} is no number of steps: it must be at least 1, or 0 for none")
        if config.train.wandb and importlib.util.find_spec("wandb") is None:
            raise ValueError("train.wandb needs the package wandb: pip install wandb, or leave train.wandb empty")
    except ValueError as error:  # every rank raises the same error
        raise SharedError(str(error)) from None
    return config


class ScoredPiece(NamedTuple):
    """A piece of a text and its probability. In `text`, `▁` marks a space before the piece."""

    text: str
    probability: float


class TextModel:
    """A trained model in float32, from the folder of a run, of one of its checkpoints (RUN@STEP), or of an export.

    model = xlme.load("runs/mine")

    Functions that take the path of a model take the model too. Models with language embeddings need `language`, the
    code of the text's language, in every call; other models refuse it.
    """

    folder: Path
    """The folder that the model was loaded from."""
    device: torch.device
    """The device that the model runs on."""

    @check_argument_types
    def __init__(self, folder: Path | str, device: str | torch.device | None = None):
        """`device`: by default a GPU if there is one. Raises ValueError if `folder` has no model, or torch cannot use
        the device."""
        self.folder = Path(folder)
        if device is None:
            device = "cuda" if on_gpu() else "cpu"
        try:
            self.device = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
            raise ValueError(f"device {device} cannot be used: {str(error).partition(chr(10))[0]}") from None
        # Loaded here, not at first use, because an unfinished run may delete the checkpoint later.
        self._run = None if is_export(self.folder) else load_run(self.folder)
        if self._run is None:
            self._loaded_weights = _weights_stamp(self.folder)
            _ = self._encoder

    def __fspath__(self) -> str:
        """The path of this model; RUN@STEP if it is a checkpoint's, because the run's newest checkpoint may change."""
        step = None if self._run is None else self._run.step
        return str(self.folder) if step is None else f"{run_and_step(self.folder)[0]}@{step}"

    def __repr__(self) -> str:
        cfg = self._encoder.encoder.cfg
        trained = "" if self._run is None else f" of {self._run.task or self._run.objective.name}"
        step = "" if self._run is None or self._run.step is None else f" at step {self._run.step:,}"
        return (
            f"<model{trained} in {self.folder}{step}: {cfg.discriminator_layers} layers of width {cfg.width}, "
            f"{cfg.vocabulary:,} pieces, up to {cfg.max_positions} tokens, on {self.device}>"
        )

    @cached_property
    def _encoder(self) -> TrainedEncoder:
        if self._run is None:
            encoder, vocabulary = load_encoder(self.folder)
        else:
            encoder, vocabulary = self._run.encoder(), self._run.vocabulary
        return TrainedEncoder(encoder.to(self.device), vocabulary)

    @cached_property
    def _masked_language_model(self) -> tuple[TrainedEncoder, MaskedLanguageModelHead]:
        return self._with_head("masked_head.", MaskedLanguageModelHead)

    @cached_property
    def _discriminator(self) -> tuple[TrainedEncoder, ReplacedTokenHead]:
        return self._with_head("replaced_head.", ReplacedTokenHead)

    @check_argument_types
    def encode(self, sentences: str | Sequence[str], layer: int = -1, language: str = "") -> np.ndarray:
        """Sentence vectors, float32 [N, D], or [D] for one string: the mean hidden state of `layer` over the tokens
        (XLM-E section 4.6). Sentences that are too long for the model are cut, with a warning.

        The model reads 64 sentences at a time, sorted by length. The vectors of all layers stay in memory until the
        end: give a large text in parts.

        `layer`: 0 is the embedding, -1 the last layer. Fine-tuning on pairs trains the vectors of the last layer,
        and sentence-transformers makes these vectors from an export. For encoders that are not fine-tuned, `xlme
        evaluate` reports the layer at three quarters of the depth, as the paper does (9 of 12).
        """
        encoder, vocabulary = self._encoder
        if not -1 <= layer <= encoder.cfg.discriminator_layers:
            raise ValueError(
                f"there is no layer {layer}: choose 0 to {encoder.cfg.discriminator_layers}, or -1 for the last"
            )
        texts = [sentences] if isinstance(sentences, str) else sentences
        ids = [vocabulary.encode(require_unicode(text)) for text in texts]
        longest = encoder.cfg.max_positions - 2
        if cut := sum(len(sentence) > longest for sentence in ids):
            warnings.warn(f"{cut} of {len(ids)} sentences were cut to {longest} tokens", stacklevel=3)
        vectors_ND = sentence_vectors(encoder, ids, languages=self._languages(encoder, language) * len(ids))[layer]
        return vectors_ND[0] if isinstance(sentences, str) else vectors_ND

    @check_argument_types
    @torch.no_grad()
    def fill(self, text: str, top: int = 5, language: str = "") -> list[list[ScoredPiece]]:
        """For every `<mask>` in `text`, a list of the `top` most likely pieces with their probabilities, the likeliest
        first.

        Raises ValueError when there is no `<mask>`, or the model has no masked language model.
        """
        (encoder, vocabulary), head = self._masked_language_model
        before, *after = require_unicode(text).split(MASK)
        if not after:
            raise ValueError(f"the text has no {MASK}: write it where the model is to predict")
        if not 1 <= top <= encoder.cfg.vocabulary:
            raise ValueError(f"top is {top}: it must be 1 to {encoder.cfg.vocabulary}, the number of pieces")
        from_masks = (np.append(np.int32(vocabulary.mask_id), vocabulary.encode_after_mask(part)) for part in after)
        ids = np.concatenate([vocabulary.encode(before), *from_masks])
        item, states_TD = self._item_and_states(encoder, ids, language)
        hidden_MD = states_TD[torch.from_numpy(item == vocabulary.mask_id)]
        likeliest = head.logits(hidden_MD, encoder.embedding_blocks).softmax(-1).topk(top)
        return [
            [ScoredPiece(vocabulary.piece(token), value) for token, value in zip(tokens, values, strict=True)]
            for tokens, values in zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
        ]

    @check_argument_types
    @torch.no_grad()
    def judge(self, text: str, language: str = "") -> list[ScoredPiece]:
        """The tokens of `text`, each with the discriminator's `probability` that the token was replaced.

        Raises ValueError if the model has no discriminator.
        """
        (encoder, vocabulary), head = self._discriminator
        ids = vocabulary.encode(require_unicode(text))
        if MASK in text:
            raise ValueError(f"the text has {MASK}, which only `fill` reads: write words in its place")
        # The first and the last score belong to special tokens, which `ids` does not have.
        _, states_TD = self._item_and_states(encoder, ids, language)
        scores = head(states_TD[None])[0].sigmoid().tolist()
        return [ScoredPiece(vocabulary.piece(token), score) for token, score in zip(ids, scores[1:-1], strict=True)]

    def _with_head(self, prefix: str, head_class: type[Head]) -> tuple[TrainedEncoder, Head]:
        """Returns (encoder, head): an encoder and the head that was trained on it, whose weights have names that begin
        with `prefix`. Raises ValueError if the model has no such head."""
        run = self._run
        if run is None:
            if _weights_stamp(self.folder) != self._loaded_weights:
                raise ValueError(f"{self.folder} is no longer the export that was loaded: load it again")
            # A model that is exported as a whole has no head of a single encoder, in the export or in the run.
            folders = [] if load_whole_export(self.folder) else [self.folder / name for name in (".", GENERATOR_FOLDER)]
            candidates = [(load_encoder(folder), read_heads(folder)) for folder in folders if folder.is_dir()]
        else:
            heads = {} if objective_of(run.objective).export_class else run.encoders
            names = [name for name, head_prefix in heads.items() if head_prefix == prefix]
            candidates = [(TrainedEncoder(run.encoder(name), run.vocabulary), run.state) for name in names]
        for model, state in candidates:
            weights = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            if weights:
                head = head_class(model.encoder.cfg)
                head.load_state_dict(weights)
                return TrainedEncoder(model.encoder.to(self.device), model.vocabulary), head.to(self.device)
        task = "a discriminator" if head_class is ReplacedTokenHead else "masked language modelling"
        raise ValueError(f"{self.folder} was not trained with {task}: name a run or an export that was")

    def _item_and_states(self, encoder: TextEncoder, ids: np.ndarray, language: str) -> tuple[np.ndarray, Tensor]:
        """Returns (`ids` with special tokens, their last hidden states [T, D]). Raises ValueError if the model cannot
        read that many tokens."""
        codes = [(code,) for code in self._languages(encoder, language)]
        item = LAYOUTS[encoder.cfg.layout].item(ids)
        if len(item) > encoder.cfg.max_positions:
            raise ValueError(
                f"the text has {len(item)} tokens, but the model reads at most {encoder.cfg.max_positions}: shorten "
                "the text"
            )
        ((_, _, layers),) = hidden_states(encoder, [item], languages=codes)
        return item, layers[-1][0]

    def _languages(self, encoder: TextEncoder, language: str) -> list[str]:
        """The language of a text as a list, which is empty if no language is given. Raises ValueError if a language is
        given but the model has no language embeddings, and if it has some but not of this language."""
        if encoder.cfg.language_embeddings:
            try:
                language_index(encoder.cfg, language)
            except ValueError:
                problem = f"no embedding of the language {language}" if language else "language embeddings"
                raise ValueError(
                    f"{self.folder} has {problem}: set language= to one of {', '.join(encoder.cfg.language_embeddings)}"
                ) from None
        if language and not encoder.cfg.language_embeddings:
            raise ValueError(
                f"{self.folder} has no language embeddings, so it reads texts of all languages alike: leave language "
                "out"
            )
        return [language] if language else []
