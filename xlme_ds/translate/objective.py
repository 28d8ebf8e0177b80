"""Machine translation on pairs, on monolingual sentences, or both (XLM; Conneau and Lample, 2019).

L = w_AE(step) L_AE + w_BT(step) L_BT + L_MT, where each term is the mean over its target tokens in the global batch. A
target token is predicted from its source and the target tokens before it. Both the decoder's first input and the last
token of a target are `</s>`. When the data are mixed, one side of each pair is drawn as the source, so that one model
learns both directions. A monolingual sentence is a target, too: its source is a noised copy (denoising auto-encoding),
or a translation that the model writes with its current parameters (back-translation). Such a source depends only on the
sentence, the seed, the row's number and the model's parameters, so a resumed run trains on the same sources.

B rows, T tokens, M target tokens.
"""

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from ..config import ModelConfig, ObjectiveConfig, RunConfig, StartConfig, point_steps, weight_at
from ..data.batch import Batch, sum_by_language, sum_by_task
from ..data.collate import Collate, Purpose, languages_of_text
from ..data.rows import TASKS
from ..data.shards import RowStore
from ..models.layers import MicroBatchShape
from ..models.pipeline import Flops, PipelinePart, encoder_flops, masked_head_flops
from ..objectives.clm import CausalMasking
from ..objectives.mlm import MaskedLanguageModelling
from ..objectives.protocol import Quantity, WeightSource, require_sentences
from .decoder import decoder_depth, decoder_from_encoder, decoder_layers
from .model import TENSOR_OF_TERM, TERMS, TranslationModel, TranslationOutput
from .sentences import SentenceInputs
from .sides import target_mask

_ALWAYS: tuple[str, ...] = ("0:1",)  # the setting for weight 1 in all steps
_LOSSES = {
    "ae": Quantity("Loss of every token, restored from a noised copy", "nats a token", "mono", unigram=True),
    "bt": Quantity("Loss of every token, translated back", "nats a token", "mono", unigram=True),
    "mt": Quantity("Loss of every target token", "nats a token", "para", unigram=True),
}
_ACCURACIES = {  # term -> (name, quantity) of its accuracy
    "ae": ("accuracy_denoising", Quantity("Accuracy on every target token (denoising)")),
    "bt": ("accuracy_back", Quantity("Accuracy on every target token (back-translation)")),
    "mt": ("accuracy_para", Quantity("Accuracy on every target token")),
}


class MachineTranslation(MaskedLanguageModelling):
    """Every token of a target is predicted from the tokens before it. So `mask_fraction`, the share of tokens that are
    predicted, is 1, although no token is replaced by `<mask>`."""

    description = "machine translation by encoder and decoder"
    masking_class = CausalMasking
    predicts_all = True
    used_settings = (
        "objective.denoising",
        "objective.back_translation",
        "model.decoder",
        "model.decoder_layers",
        "start.into",
        "start.decoder",
    )
    export_class = "XLMEForConditionalGeneration"
    reads_whole_rows = False
    may_start_random = True
    starts_in_layout = True

    def __init__(self, cfg: ObjectiveConfig):
        weight_points = {"ae": cfg.denoising, "bt": cfg.back_translation, "mt": _ALWAYS}
        self._weight_points = {term: points for term, points in weight_points.items() if points}
        self.terms = tuple(self._weight_points)
        self.accuracies = tuple(_ACCURACIES[term][0] for term in self.terms)
        self.quantities = {term: _LOSSES[term] for term in self.terms} | dict(_ACCURACIES[term] for term in self.terms)
        super().__init__(cfg)
        self.weights = self._weights_in(0)
        # Index into TERMS -> index into `self.terms`. The entry of a term that is not trained is 0 and is never read.
        self._index_of_term = torch.tensor([self.terms.index(term) if term in self.terms else 0 for term in TERMS])

    def check_rows(self, rows: RowStore, purpose: Purpose) -> None:
        """Raise ValueError for monolingual rows that are not whole sentences (`mix --sentences`)."""
        if len(self.terms) > 1:
            require_sentences(rows, needed=True)

    def collate_for(self, rows: RowStore, purpose: Purpose) -> Collate:
        """The function that makes batches. It adds a noised copy of each sentence if denoising is trained, and the
        language to translate each sentence into if back-translation is trained. Raises ValueError if `rows` have no
        such language."""
        if len(self.terms) == 1:
            return super().collate_for(rows, purpose)
        points = self._weight_points if purpose == "train" else dict.fromkeys(self.terms, _ALWAYS)
        denoising, back_translation = points.get("ae", ()), points.get("bt", ())
        if purpose == "show" and denoising:  # the page shows one prediction of each token
            back_translation = ()
        languages, mask_id = languages_of_text(rows), rows.manifest.vocabulary_size - 1
        if back_translation and len(languages) < 2:
            raise ValueError(
                f"objective.back_translation needs text of two languages, and {rows.folder} has {len(languages)}: add "
                "text of another language, or leave the setting empty"
            )
        return SentenceInputs(denoising, back_translation, languages, mask_id)

    def as_probe(self, batch: Batch) -> Batch:
        """`batch` for the probe loss: without back-translation, unless the batch has no other term. The sources of
        back-translation may differ between devices: if two tokens are almost equally likely, rounding decides which one
        the model writes."""
        has_pairs = bool((batch.task_B == TASKS.index("para")).any())
        if not has_pairs and "noised_BT" not in batch.added:
            return batch
        return batch._replace(
            added={name: value_BT for name, value_BT in batch.added.items() if name != "target_languages_BT"}
        )

    def at(self, step: int) -> Self:
        """This objective with the weights that its terms have in `step`."""
        objective = copy(self)
        objective.weights = self._weights_in(step)
        return objective

    def _weights_in(self, step: int) -> Tensor:
        return torch.tensor([weight_at(points, step) for points in self._weight_points.values()], dtype=torch.float64)

    def check(self, run: RunConfig) -> None:
        """Raise ValueError also if a step would train nothing, or if data, start, model or engine do not fit an
        objective with a decoder."""
        super().check(run)
        self._check_weights(run)
        _check_start(run.start)
        name, data, model = run.objective.name, run.data, run.model
        reads_sentences = len(self.terms) > 1
        for is_wrong, message in (
            (
                data.mono_rows and not reads_sentences,
                f"data.mono_rows is {data.mono_rows}, but objective.name {name} reads monolingual rows only for "
                "objective.denoising or objective.back_translation: set one of these, or data.mono_rows to 0",
            ),
            (
                reads_sentences and not data.mono_rows,
                "objective.denoising and objective.back_translation read monolingual rows, but data.mono_rows is 0: "
                "raise data.mono_rows, or leave both empty",
            ),
            (
                not model.language_embeddings,
                f"objective.name {name} knows the language to translate into by its embedding: set "
                "model.language_embeddings to the languages of the data",
            ),
            (
                model.body != "xlme",
                f"model.body {model.body} has no decoder, which objective.name {name} needs: set it to xlme",
            ),
            (
                run.engine.kind == "pipeline",
                f"engine.kind pipeline does not cut a decoder, which objective.name {name} has: set it to deepspeed",
            ),
            (
                model.compile not in ("auto", "none"),
                f"model.compile {model.compile} is not for objective.name {name}, whose rows have sides of any "
                "length: set it to none",
            ),
        ):
            if is_wrong:
                raise ValueError(message)

    @staticmethod
    def _check_weights(run: RunConfig) -> None:
        """Raise ValueError if the weight of a term is 0 in all steps of the run, or if a step that reads no pairs has
        weight 0 for both denoising and back-translation.

        Only the steps that the settings name, and the last step, are checked. Between two such steps a weight changes
        linearly and is never negative, so it is 0 there only if it is 0 in both.
        """
        points_of = {name: getattr(run.objective, name) for name in ("denoising", "back_translation")}
        steps = point_steps([*run.objective.denoising, *run.objective.back_translation])
        named_steps = [step for step in steps if step < run.train.steps]
        for name, points in points_of.items():
            if points and not any(weight_at(points, step) for step in (*named_steps, run.train.steps - 1)):
                raise ValueError(f"objective.{name} is 0 in all steps: leave it empty")
        has_steps_without_pairs = not run.data.para_rows or run.data.alternate
        empty_steps = [
            step for step in named_steps if not any(weight_at(points, step) for points in points_of.values())
        ]
        if has_steps_without_pairs and empty_steps and any(points_of.values()):
            raise ValueError(
                f"objective.denoising and objective.back_translation are both 0 in step {empty_steps[0]}, so this step "
                "would train nothing on its sentences: raise one of the two, or lower train.steps"
            )

    def weight_sources(self, start: StartConfig, cfg: ModelConfig) -> dict[str, WeightSource]:
        """The parameters that encoder and decoder start from, as `start.into` and `start.decoder` choose."""
        for_encoder = super().weight_sources(start, cfg)
        for_decoder = {
            "decoder": WeightSource(
                start.decoder or start.folder,
                None if start.decoder else for_encoder["encoder"].encoder_name,
                decoder_depth(cfg),
                "lower model.decoder_layers, or set start.into to encoder",
                partial(decoder_from_encoder, cfg=cfg),
            )
        }
        return {"encoder": for_encoder, "decoder": for_decoder, "both": for_encoder | for_decoder}[start.into]

    def shape_settings(self, cfg: ModelConfig) -> dict[str, Any]:
        """The settings that `shape_settings` has for every objective, and the decoder's form and number of layers."""
        return {"decoder": cfg.decoder, "decoder_layers": decoder_layers(cfg), **super().shape_settings(cfg)}

    def build(self, cfg: ModelConfig, part: PipelinePart | None = None) -> TranslationModel:  # type: ignore[override]
        """The whole model; `part` is ignored, as no pipeline splits this model."""
        return TranslationModel(cfg)

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """Operations per token of the forward passes, counted as if a row of pairs were half source and half target,
        and as if the source of a sentence were as long as the sentence.

        A sentence is read once for denoising and once for back-translation. To write the source of back-translation,
        both networks first run without gradient. If a term reads sentences, a row of pairs is counted as if it were a
        row of sentences, which is too much.
        """
        passes = len(self.terms) - 1  # number of passes over a sentence that have a gradient
        # `rows_read`: number of whole rows that a network reads in all passes over a row; of a pair it reads one half.
        # `pass_tokens`: number of tokens that a network reads in one pass.
        rows_read, pass_tokens = (float(passes), row_tokens) if passes else (0.5, row_tokens // 2)
        depth = decoder_depth(cfg)
        # A layer of XLM's decoder has self-attention and cross-attention, a layer of the interleaved decoder has one of
        # them. Here the cross-attentions of layers that have both are counted.
        cross_attentions = depth if cfg.decoder == "xlm" else 0
        attention = 4 * cfg.width**2 + 2 * pass_tokens * cfg.width  # self or cross: projections, scores, weighted sums
        feed_forward = 2 * cfg.width * cfg.feed_forward
        decoder = 2.0 * ((depth + cross_attentions) * attention + depth * feed_forward)
        encoder = encoder_flops(cfg, 1, pass_tokens)
        writing_passes = 1 if "bt" in self.terms else 0
        return Flops(
            layers=cfg.discriminator_layers,
            one_layer=encoder * rows_read,
            decoder=decoder * rows_read,
            decoder_layers=depth,
            cross_attentions=cross_attentions,
            softmax_last=masked_head_flops(cfg, rows_read),
            first_pass_layer=encoder * writing_passes,
            first_pass_softmax=(decoder + masked_head_flops(cfg, 1.0)) * writing_passes,
        )

    def forward_passes(self, batch: MicroBatchShape) -> list[MicroBatchShape]:
        """The sizes of the forward passes of all terms, the largest first. In a pair, each network reads half of the
        tokens. For a sentence, each network reads as many tokens as the sentence has, because a source is about as long
        as its target."""
        passes = [replace(batch, tokens=(batch.rows - batch.pairs) * batch.row_tokens)] * (len(self.terms) - 1)
        if batch.pairs:
            pair_tokens = batch.pairs * batch.row_tokens
            passes.append(replace(batch, tokens=pair_tokens // 2, row_tokens=batch.row_tokens // 2))
        return sorted(passes, key=lambda micro_batch: -micro_batch.tokens)

    def predicted_positions(self, batch: Batch) -> Tensor:
        """The indices of the target tokens in the flattened batch."""
        return target_mask(batch).flatten().nonzero().squeeze(1)

    def counts(self, batch: Batch) -> Tensor:
        """Number of target tokens of each term, float64 [terms]."""
        in_sentences, in_pairs = sum_by_task(target_mask(batch).sum(1), batch.task_B)
        # A term has no target tokens in sentences if its weight is 0, so that the batch lacks the term's tensor.
        counts = [
            in_pairs if term == "mt" else in_sentences * (TENSOR_OF_TERM[term] in batch.added) for term in self.terms
        ]
        return torch.stack(counts).double()

    def sums(self, output: TranslationOutput, batch: Batch) -> Tensor:  # type: ignore[override]
        """The summed losses, float32 [terms]; carries the gradient."""
        return sum_by_task(output.nll_M, self._term_indices(output), len(self.terms))

    def statistics(self, output: TranslationOutput, batch: Batch) -> Tensor:  # type: ignore[override]
        """Number of target tokens of each term that the model finds most likely, float64 [terms]."""
        is_right_M = output.predicted_M == batch.tokens_BT.flatten()[output.places_M]
        return sum_by_task(is_right_M, self._term_indices(output), len(self.terms)).double()

    def by_language(self, output: TranslationOutput, batch: Batch, languages: int) -> Tensor:  # type: ignore[override]
        """Returns float64 [2, terms, languages]: the summed losses and the numbers of target tokens, by the language of
        the target."""
        language_M = batch.languages_BT.flatten()[output.places_M]
        counted_M = torch.ones_like(output.nll_M)  # every target token counts
        term_M = self._term_indices(output)
        return sum_by_language(output.nll_M, counted_M, term_M, language_M, len(self.terms), languages)

    def _term_indices(self, output: TranslationOutput) -> Tensor:
        """The index into `self.terms` of each target token's term, int64 [M]."""
        return self._index_of_term.to(output.terms_M.device)[output.terms_M]

    @staticmethod
    def tokens_and_probabilities(output: TranslationOutput, batch: Batch) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """Returns (tokens [B, T], None). Each target token is replaced by the token that the model finds most likely
        after the true tokens before it. There are no probabilities."""
        filled = batch.tokens_BT.flatten().index_copy(0, output.places_M, output.predicted_M)
        return filled.view_as(batch.tokens_BT), None


def _check_start(start: StartConfig) -> None:
    """Raise ValueError where `start.into` and `start.decoder` do not fit `start.folder`, `start.take` or each other."""
    for given, remedy in (
        (f"start.into {start.into}" if start.into != "both" else "", "leave it at `both`"),
        (f"start.decoder {start.decoder}" if start.decoder else "", "leave it empty"),
    ):
        if given and not start.folder:
            raise ValueError(f"{given} is for a run that starts from another model: set start.folder, or {remedy}")
        if given and start.take in ("all", "state"):
            raise ValueError(
                f"{given} works only if one encoder is taken from start.folder, and start.take {start.take} takes the "
                "whole model: set start.take to the encoder's name"
            )
    if start.decoder and start.into != "both":
        raise ValueError(
            f"start.decoder {start.decoder} and start.into {start.into} each say what the decoder starts from: leave "
            "start.into at its default, `both`"
        )
