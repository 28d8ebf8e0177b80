"""The models as stages of a pipeline: the same modules and parameter names, cut along the layers of one encoder; and
how many layers each part holds.

Of `Electra`, generator, masked head, sampling and every embedding are in the first stage, the replaced token head in
the last one; of `LanguageModel`, the embedding in the first, the masked head in the last.
B rows, T tokens, H heads, D width, W = 2T−1 distances.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config import EngineConfig
from ..data.batch import Batch
from .electra import Electra, ElectraOutput
from .language_model import LanguageModel, LanguageModelOutput
from .operations import Work


@dataclass(frozen=True)
class Part:
    """Consecutive layers of an encoder: what a stage of a pipeline holds of it. The first part may hold none."""

    layers: range
    first: bool = True  # holds all that comes before the layers
    last: bool = True  # holds all that comes after them


class PipelineStage(nn.Module):
    """A part of the model that a subclass inherits from as well: a function of plain tensors."""

    cut_encoder: str  # the encoder whose layers are cut
    # How the names of what comes before the layers begin, in the encoder and next to it.
    before: tuple[str, ...] = ("embedding_", "difference_", "positions", "languages", "relative", "input_norm")
    after: tuple[str, ...] = ("output_norm",)
    ties = False  # whether the last part reads the embedding of the first
    # Whether what the parts predict for the stage's `first_pass` of a batch is filled in by its `second_pass`.
    passes_ahead = False

    def __init__(self, *whole: Any, part: Part):
        """Build the model of the arguments `whole` without memory, and keep what `part` holds of it."""
        device = torch.get_default_device()
        with torch.device("meta"):
            super().__init__(*whole)
        self.part = part
        encoder = getattr(self, self.cut_encoder)
        for number in [number for number in encoder.layers if int(number) not in part.layers]:
            del encoder.layers[number]
        gone = (() if part.first else self.before) + (() if part.last else self.after)
        for module in (self, encoder):
            for name in [*module._parameters, *module._modules]:
                if name.startswith(gone):
                    setattr(module, name, None)
        self.to_empty(device=device)


class Flow(NamedTuple):
    """What crosses from stage to stage. Its shapes are those of the rows, whatever number of tokens is masked.

    The floating-point tensors come first: DeepSpeed 0.19.8 receives gradients in the buffers of the activations with
    the same index, and does not look at their type.
    """

    # Float32, the generator's −log p of the original token, 0 where nothing is masked; on its way to the loss.
    nll_BT: Tensor
    hidden_BTD: Tensor  # of the last layer so far; after the last stage the discriminator's logits [B, T]
    segments_BT: Tensor
    corrupted_BT: Tensor
    predicted_BT: Tensor  # int64, the generator's most likely token, 0 where nothing is masked
    keys_B: Tensor
    # Float32, the shared relative bias d: sent along, it needs no copy of its table in every stage.
    distance_HW: Tensor | None

    def pack(self) -> tuple[Tensor, ...]:
        """As plain tensors, floating-point ones first."""
        # The hidden states come last among these: only the last backward pass frees its graph, and theirs is the big
        # one.
        relative = () if self.distance_HW is None else (self.distance_HW,)
        integers = self.segments_BT, self.corrupted_BT, self.predicted_BT, self.keys_B
        return tuple(tensor.contiguous() for tensor in (self.nll_BT, *relative, self.hidden_BTD, *integers))

    @staticmethod
    def unpack(tensors: Sequence[Tensor]) -> "Flow":
        """What `pack` gave."""
        nll_BT, *relative, hidden_BTD, segments_BT, corrupted_BT, predicted_BT, keys_B = tensors
        d = relative[0] if relative else None
        return Flow(nll_BT, hidden_BTD, segments_BT, corrupted_BT, predicted_BT, keys_B, d)


class ElectraStage(PipelineStage, Electra):
    """The part of `Electra` that one stage runs."""

    cut_encoder = "discriminator"
    before = (*PipelineStage.before, "generator", "masked_head")
    after = (*PipelineStage.after, "replaced_head")

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The first stage takes a `Batch`, the others a packed `Flow`, which all of them return."""
        flow = self._start(Batch(*tensors)) if self.part.first else Flow.unpack(tensors)
        hidden_BTD = self.discriminator.body(flow.hidden_BTD, flow.segments_BT, flow.distance_HW, keys_B=flow.keys_B)
        if self.part.last:
            hidden_BTD = self.replaced_head(hidden_BTD)
        return flow._replace(hidden_BTD=hidden_BTD).pack()

    def _start(self, batch: Batch) -> Flow:
        nll_M, predicted_M, corrupted_BT = self.generate(batch)
        embedded_BTD = self.embed_for_discriminator(corrupted_BT)
        return Flow(
            nll_BT=_scatter(nll_M, batch.masked_M, batch.tokens_BT),
            hidden_BTD=self.discriminator.embed(embedded_BTD, batch.positions_BT, batch.languages_BT, batch.keys_B),
            segments_BT=batch.segments_BT,
            corrupted_BT=corrupted_BT,
            predicted_BT=_scatter(predicted_M, batch.masked_M, batch.tokens_BT),
            keys_B=batch.keys_B,
            distance_HW=self.discriminator.distances(batch.tokens_BT.shape[1]),
        )

    def output(self, tensors: Sequence[Tensor], batch: Batch) -> ElectraOutput:
        """What `Electra` gives for `batch`, on the last stage, from what it returned."""
        flow = Flow.unpack(tensors)
        nll_M, predicted_M = (dense.flatten()[batch.masked_M] for dense in (flow.nll_BT, flow.predicted_BT))
        return ElectraOutput(nll_M, predicted_M, flow.corrupted_BT, flow.hidden_BTD)


class LanguageModelStage(PipelineStage, LanguageModel):
    """The part of `LanguageModel` that one stage runs.

    Its tensors are packed as a `Flow` is: d where there is a relative bias, hidden [B, T, D], groups [B, T] (see
    `Masking`), targets [B, T], int64, the original token where one is masked and 0 elsewhere, and keys [B].
    """

    cut_encoder = "encoder"
    after = (*PipelineStage.after, "masked_head")
    ties = True
    # The blocks of the embedding in a last stage, which does not own them: the engine sees to their values and
    # gradients.
    borrowed: Sequence[Tensor] = ()

    @property
    def table(self) -> list[Tensor]:
        """The blocks of the token embedding."""
        return super().table if self.part.first else list(self.borrowed)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The first stage takes a `Batch`, the others what the one before returned; the last returns what `output`
        takes."""
        if self.part.first:
            tensors = self._start(Batch(*tensors))
        *relative, hidden_BTD, groups_BT, targets_BT, keys_B = tensors
        distance_HW = relative[0] if relative else None
        hidden_BTD = self.encoder.body(hidden_BTD, groups_BT, distance_HW, self.masking.allowed, keys_B)
        if not self.part.last:
            return *relative, hidden_BTD.contiguous(), groups_BT, targets_BT, keys_B
        # Not with the loss, which knows the batch: there DeepSpeed 0.19.8 drops the gradients of bf16 weights.
        masked_M = targets_BT.flatten().nonzero().squeeze(1)
        found = self.predict(hidden_BTD, masked_M, targets_BT.flatten()[masked_M], self.table)
        return tuple(_scatter(values_M, masked_M, targets_BT) for values_M in found)

    def _start(self, batch: Batch) -> tuple[Tensor, ...]:
        embedded_BTD = self.embed(self.masking.apply(batch, self.cfg.vocabulary))
        distance_HW = self.encoder.distances(batch.tokens_BT.shape[1])
        relative = () if distance_HW is None else (distance_HW.contiguous(),)
        targets_BT = _scatter(batch.tokens_BT.flatten()[batch.masked_M], batch.masked_M, batch.tokens_BT)
        groups_BT = self.masking.groups(batch).contiguous()
        hidden_BTD = self.encoder.embed(embedded_BTD, batch.positions_BT, batch.languages_BT, batch.keys_B)
        return *relative, hidden_BTD, groups_BT, targets_BT, batch.keys_B

    def output(self, tensors: Sequence[Tensor], batch: Batch) -> LanguageModelOutput:
        """What `LanguageModel` gives for `batch`, on the last stage, from what it returned."""
        return LanguageModelOutput(*(dense.flatten()[batch.masked_M] for dense in tensors))


def _scatter(values_M: Tensor, masked_M: Tensor, like_BT: Tensor) -> Tensor:
    """The values in their places of the rows, 0 elsewhere."""
    return values_M.new_zeros(like_BT.numel()).index_copy(0, masked_M, values_M).view_as(like_BT)


def parts(balance: Sequence[int]) -> list[Part]:
    """The parts of the encoder that is cut, from the layers that each holds."""
    ends = torch.tensor(balance).cumsum(0).tolist()
    return [
        Part(range(end - layers, end), first=n == 0, last=n == len(balance) - 1)
        for n, (end, layers) in enumerate(zip(ends, balance, strict=True))
    ]


def stage_costs(work: Work, balance: Sequence[int], checkpointing: bool) -> list[float]:
    """Operations that each part executes a token, forward and backward, with what is computed again in the latter."""
    # Backward is twice forward; the softmax computes its logits again, and so do checkpointed layers.
    layers = 4.0 if checkpointing else 3.0
    costs = [(layers * work.layer + work.layer_ahead) * count for count in balance]
    costs[0] += layers * work.before + 4.0 * work.softmax_first
    costs[-1] += 4.0 * work.softmax_last + 3.0 * work.head + work.softmax_ahead
    return costs


def pipeline_balance(engine: EngineConfig, work: Work, checkpointing: bool) -> tuple[int, ...]:
    """Layers of the encoder by part: `engine.balance`, or the split whose costliest process costs least."""
    if engine.balance:
        return engine.balance
    balance = [0] + [1] * (engine.pipeline_parts - 1)
    for _ in range(work.layers - sum(balance)):  # equal pieces: always to where the cost is then least

        def grown(part: int) -> tuple[float, float]:
            more = [layers + (n == part) for n, layers in enumerate(balance)]
            costs = stage_costs(work, more, checkpointing)
            return process_costs(costs, engine.pipeline_stages)[_process(part, engine.pipeline_stages)], costs[part]

        balance[min(range(len(balance)), key=grown)] += 1
    return tuple(balance)


def process_costs(costs: Sequence[float], stages: int) -> list[float]:
    """The cost of every process of a replica, from that of every part."""
    sums = [0.0] * stages
    for part, cost in enumerate(costs):
        sums[_process(part, stages)] += cost
    return sums


def _process(part: int, stages: int) -> int:
    """The process that holds a part: of DualPipeV the first one holds the last part too."""
    return part if part < stages else 2 * stages - 1 - part


def describe_balance(engine: EngineConfig, work: Work, checkpointing: bool) -> str:
    """One line for people: what each process of a replica holds, and its share of the operations."""
    balance = pipeline_balance(engine, work, checkpointing)
    held: list[list[str]] = [[] for _ in range(engine.pipeline_stages)]
    held[0].append("embedding, generator" if work.before else "embedding")
    start = 0
    for part, count in enumerate(balance):
        if count:
            last = start + count - 1
            held[_process(part, engine.pipeline_stages)].append(
                f"layers {start}-{last}" if count > 1 else f"layer {last}"
            )
        start += count
    costs = process_costs(stage_costs(work, balance, checkpointing), engine.pipeline_stages)
    shares = [f"{', '.join(names)} ({cost / sum(costs):.0%})" for names, cost in zip(held, costs, strict=True)]
    return f"pipeline ({engine.pipeline_schedule}), share of the operations: " + " | ".join(shares)
