"""Pipeline stages. A model is split between layers of one encoder into parts that need about the same number of
operations. Modules and parameters keep the names that they have in the whole model.

The first stage of `Electra` holds the generator, the masked head, the sampling and all embeddings; the last stage holds
the replaced token head. The first stage of `LanguageModel` holds the embedding, the last stage the masked head.

B rows, T tokens, H heads, D width, M masked positions, W = 2T−1 distances.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..config import EngineConfig, ModelConfig
from ..data.batch import Batch
from .electra import Electra, ElectraOutput
from .encoder import layer_class
from .text_encoder import LanguageModel, LanguageModelOutput


@dataclass(frozen=True)
class PipelinePart:
    """Consecutive layers of an encoder that one stage of a pipeline holds. The first part may hold none."""

    layers: range  # indices of the layers
    first: bool = True  # whether the part holds everything before the layers
    last: bool = True  # whether the part holds everything after the layers


class PipelineStage(nn.Module):
    """One part of a model, as a function of plain tensors. Each subclass also inherits from the class of its model.

    The tensors that stages send have shapes that do not depend on the number of masked tokens. Floating-point tensors
    come first: DeepSpeed 0.19.8 pairs the n-th gradient with the n-th tensor sent, though integer tensors have no
    gradient. The relative bias, float32 [H, W], is sent too, so that only the first stage holds the table of biases.

    The complete model is built from `model_arguments` on the meta device; then everything outside `part` is removed.
    """

    encoder_name: str  # name of the encoder whose layers are split
    # Prefixes of the names of modules and parameters, in the model and in this encoder. Only the first part holds those
    # that are used before the layers, and only the last part those that are used after the layers.
    prefixes_before: tuple[str, ...] = ("embedding_", "difference_", "positions", "languages", "relative", "input_norm")
    prefixes_after: tuple[str, ...] = ("output_norm",)
    ties_embedding = False  # whether the last part reads the embedding, which the first part owns
    # The last part's copies of the embedding's blocks, if it `ties_embedding`. The engine puts them here, and sends
    # their gradients to the first part.
    borrowed: Sequence[Tensor] = ()
    # Whether a batch needs two passes. If so, the method `first_pass` makes the batch of the first pass. `second_pass`
    # makes the batch of the second pass from the predictions of the first one.
    two_passes = False
    added: tuple[str, ...] = ()  # names of the tensors that a batch may have in `Batch.added`

    def __init__(self, *model_arguments: Any, part: PipelinePart):
        device = torch.get_default_device()
        with torch.device("meta"):
            super().__init__(*model_arguments)
        self.part = part
        encoder = getattr(self, self.encoder_name)
        for index in list(encoder.layers):
            if int(index) not in part.layers:
                del encoder.layers[index]
        removed_prefixes = (() if part.first else self.prefixes_before) + (() if part.last else self.prefixes_after)
        for module in (self, encoder):
            for name in [*module._parameters, *module._modules]:
                if name.startswith(removed_prefixes):
                    setattr(module, name, None)
        self.to_empty(device=device)

    @property
    def embedding_blocks(self) -> list[Tensor]:
        """The blocks of the token embedding."""
        return super().embedding_blocks if self.part.first else list(self.borrowed)  # type: ignore[misc]


class ElectraStage(PipelineStage, Electra):
    """The part of `Electra` that one stage runs.

    A stage sends these tensors in this order, the generator's only if the model has one:

    - the generator's −log p of the original tokens, float32 [B, T], 0 where nothing is masked; the loss needs them;
    - the relative bias, if the model has one;
    - the hidden states after its layers, [B, T, D]; the last stage sends the results of `judge` instead, [B, T], in
      reverse order: the discriminator's logits come last;
    - int64 [B, T]: the segments, the tokens after replacement, and the generator's most likely tokens, which are 0
      where nothing is masked;
    - the seeds of dropout, int64 [B].
    """

    encoder_name = "discriminator"
    added = ("random_1",)
    prefixes_before = (*PipelineStage.prefixes_before, "generator", "masked_head")
    prefixes_after = (*PipelineStage.prefixes_after, "replaced_head")

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The tensors that the stage sends. In the first stage `tensors` are those of a `Batch`; in the others, those
        that the previous stage sent."""
        if self.part.first:
            tensors = self._start(Batch.of_tensors(tensors, self.added))
        # The hidden states must be the last floating-point tensor, because their graph is the large one: DeepSpeed runs
        # a backward pass for each floating-point tensor, and only the last pass frees its graph.
        *others, hidden_BTD = (tensor for tensor in tensors if tensor.is_floating_point())
        segments_BT, *received, seeds_B = tensors[len(others) + 1 :]
        position_bias_HW = None if self.cfg.relative_bias == "none" else others[-1]
        hidden_BTD = self.discriminator.run_layers(hidden_BTD, segments_BT, position_bias_HW, seeds_B=seeds_B)
        outputs = [hidden_BTD]
        if self.part.last:  # if the discriminator has a softmax, `received` ends with its targets
            outputs = list(reversed(self.judge(hidden_BTD, received[-1], self.embedding_blocks)))
        return tuple(tensor.contiguous() for tensor in (*others, *outputs, segments_BT, *received, seeds_B))

    def _start(self, batch: Batch) -> tuple[Tensor, ...]:
        """The input of the discriminator's first layer, in the order in which stages send it."""
        nll_M, predicted_M, corrupted_BT = self.generate(batch)
        embedded_BTD = self.embed_for_discriminator(corrupted_BT)
        hidden_BTD = self.discriminator.first_layer_input(
            embedded_BTD, batch.positions_BT, batch.languages_BT, batch.seeds_B
        )
        position_bias_HW = self.discriminator.bias_by_distance(batch.tokens_BT.shape[1])
        relative = () if position_bias_HW is None else (position_bias_HW,)
        sent: tuple[Tensor, ...] = *relative, hidden_BTD, batch.segments_BT, corrupted_BT
        if self.has_generator:
            nll_BT = scatter(nll_M, batch.masked_M, batch.tokens_BT)
            sent = nll_BT, *sent, scatter(predicted_M, batch.masked_M, batch.tokens_BT)
        return *sent, batch.seeds_B

    def output(self, tensors: Sequence[Tensor], batch: Batch) -> ElectraOutput:
        """The output of `Electra` for `batch`, from the `tensors` that the last stage returned."""
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        _segments_BT, corrupted_BT, *others = tensors[len(floating) :]
        if self.has_generator:
            nll_M, predicted_M = floating.pop(0).flatten()[batch.masked_M], others[0].flatten()[batch.masked_M]
        else:
            nll_M, predicted_M = torch.zeros_like(batch.uniforms_M), corrupted_BT.flatten()[batch.masked_M]
        if self.cfg.relative_bias != "none":
            del floating[0]  # the relative bias; the results of `judge` remain
        return ElectraOutput(nll_M, predicted_M, corrupted_BT, *reversed(floating))


class LanguageModelStage(PipelineStage, LanguageModel):
    """The part of `LanguageModel` that one stage runs.

    A stage sends these tensors in this order:

    - the relative bias, if the model has one;
    - the hidden states after its layers, [B, T, D];
    - the groups of `Masking`, int64 [B, T];
    - the targets, int64 [B, T], which are the original tokens at masked positions and 0 elsewhere;
    - the seeds of dropout, int64 [B].
    """

    encoder_name = "encoder"
    prefixes_after = (*PipelineStage.prefixes_after, "masked_head")
    ties_embedding = True

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The tensors that the stage sends. In the first stage `tensors` are those of a `Batch`; in the others, those
        that the previous stage sent. The last stage returns (−log p, most likely tokens), each [B, T] and 0 where
        nothing is masked."""
        if self.part.first:
            tensors = self._start(Batch.of_tensors(tensors, self.added))
        *relative, hidden_BTD, groups_BT, targets_BT, seeds_B = tensors
        position_bias_HW = relative[0] if relative else None
        hidden_BTD = self.encoder.run_layers(
            hidden_BTD, groups_BT, position_bias_HW, self.masking.attention_mask, seeds_B
        )
        if not self.part.last:
            return *relative, hidden_BTD.contiguous(), groups_BT, targets_BT, seeds_B
        # The loss function has `masked_M`, but tokens are predicted here: DeepSpeed 0.19.8 loses the gradients of bf16
        # weights that the loss function uses.
        masked_M = targets_BT.flatten().nonzero().squeeze(1)
        output = self.predict(hidden_BTD, masked_M, targets_BT.flatten()[masked_M], self.embedding_blocks)
        return tuple(scatter(values_M, masked_M, targets_BT) for values_M in output)

    def _start(self, batch: Batch) -> tuple[Tensor, ...]:
        embedded_BTD = self.embed(self.masking.apply(batch, self.cfg.vocabulary))
        position_bias_HW = self.encoder.bias_by_distance(batch.tokens_BT.shape[1])
        relative = () if position_bias_HW is None else (position_bias_HW.contiguous(),)
        targets_BT = scatter(batch.tokens_BT.flatten()[batch.masked_M], batch.masked_M, batch.tokens_BT)
        groups_BT = self.masking.groups(batch).contiguous()
        hidden_BTD = self.encoder.first_layer_input(embedded_BTD, batch.positions_BT, batch.languages_BT, batch.seeds_B)
        return *relative, hidden_BTD, groups_BT, targets_BT, batch.seeds_B

    def output(self, tensors: Sequence[Tensor], batch: Batch) -> LanguageModelOutput:
        """The output of `LanguageModel` for `batch`, from the `tensors` that the last stage returned."""
        return LanguageModelOutput(*(tensor_BT.flatten()[batch.masked_M] for tensor_BT in tensors))


def scatter(values_M: Tensor, masked_M: Tensor, like_BT: Tensor) -> Tensor:
    """`values_M` at the masked positions, 0 elsewhere, in the shape of `like_BT`."""
    return values_M.new_zeros(like_BT.numel()).index_copy(0, masked_M, values_M).view_as(like_BT)


def split_layers(balance: Sequence[int]) -> list[PipelinePart]:
    """The parts of an encoder. `balance` has the number of layers of each part."""
    return [
        PipelinePart(range(end - layers, end), first=index == 0, last=index == len(balance) - 1)
        for index, (end, layers) in enumerate(zip(accumulate(balance), balance, strict=True))
    ]


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token of an objective's forward pass, by the part of a pipeline that executes them.

    Only matrix products count, and a multiply-add is two operations.
    """

    layers: int  # number of layers of the encoder that a pipeline splits
    one_layer: float  # operations of one of these layers
    generator: float = 0.0  # all layers of the generator, in the first part
    softmax_first: float = 0.0  # a masked head with its vocabulary softmax, in the first part
    softmax_last: float = 0.0  # a masked head with its vocabulary softmax, in the last part
    decoder: float = 0.0  # all layers of a decoder; a model with a decoder is never split
    decoder_layers: int = 0  # number of the decoder's layers
    cross_attentions: int = 0  # number of the decoder's layers that have a cross-attention
    head: float = 0.0  # any other head, in the last part
    first_pass_layer: float = 0.0  # one layer in an additional first pass, without gradient
    first_pass_softmax: float = 0.0  # the masked head in the additional first pass, in the last part
    # Fraction of positions at which the masked head of `softmax_last` predicts; 0: the setting `mask_fraction`.
    predicted_last: float = 0.0

    @property
    def softmax(self) -> float:
        """Operations of the masked heads, in the first and the last part."""
        return self.softmax_first + self.softmax_last

    @property
    def forward(self) -> float:
        """Operations of the forward pass that trains, without an additional first pass."""
        return self.layers * self.one_layer + self.generator + self.decoder + self.softmax + self.head

    @property
    def training(self) -> float:
        """Operations of a training step, the additional first pass included. A backward pass counts as two forward
        passes."""
        return 3.0 * self.forward + self.layers * self.first_pass_layer + self.first_pass_softmax


def encoder_flops(cfg: ModelConfig, layers: int, row_tokens: int) -> float:
    """Operations per token of an encoder's layers in a forward pass."""
    return layer_class(cfg).flops(cfg, layers, row_tokens)


def masked_head_flops(cfg: ModelConfig, mask_fraction: float) -> float:
    """Operations per token of the masked head and its vocabulary softmax in a forward pass. The head predicts at a
    fraction `mask_fraction` of the tokens."""
    dense = cfg.width**2 if cfg.masked_head == "dense" else 0
    return 2.0 * mask_fraction * (dense + cfg.width * cfg.vocabulary)


def part_costs(flops: Flops, balance: Sequence[int], checkpointing: bool) -> list[float]:
    """Operations per token that each part executes in its forward and backward passes, recomputation included.
    `balance` has the number of layers of each part."""
    # A backward pass counts as two forward passes. In it, softmaxes and checkpointed layers repeat the forward pass.
    passes = 4.0 if checkpointing else 3.0
    costs = [(passes * flops.one_layer + flops.first_pass_layer) * count for count in balance]
    costs[0] += passes * flops.generator + 4.0 * flops.softmax_first
    costs[-1] += passes * flops.decoder + 4.0 * flops.softmax_last + 3.0 * flops.head + flops.first_pass_softmax
    return costs


def pipeline_balance(engine: EngineConfig, flops: Flops, checkpointing: bool) -> tuple[int, ...]:
    """The number of layers in each part. It is `engine.balance` if that is set, else the split that minimises the
    largest cost of a process."""
    if engine.balance:
        return engine.balance
    balance = [0] + [1] * (engine.pipeline_parts - 1)  # the first part may have no layers
    for _ in range(flops.layers - sum(balance)):  # add each further layer to the part whose process is then cheapest

        def cost_if_added(part_index: int) -> tuple[float, float]:
            """Returns (cost of the part's process, cost of the part) if this part had one layer more."""
            grown_balance = list(balance)
            grown_balance[part_index] += 1
            costs = part_costs(flops, grown_balance, checkpointing)
            process = _process_of(part_index, engine.pipeline_stages)
            return process_costs(costs, engine.pipeline_stages)[process], costs[part_index]

        balance[min(range(len(balance)), key=cost_if_added)] += 1
    return tuple(balance)


def process_costs(costs: Sequence[float], stages: int) -> list[float]:
    """The cost of each process of a pipeline, from the cost of each part."""
    second_parts = reversed(costs[stages:]) if len(costs) > stages else [0.0] * stages  # see `_process_of`
    return [first + second for first, second in zip(costs[:stages], second_parts, strict=True)]


def _process_of(part_index: int, stages: int) -> int:
    """The index of the process that holds a part. In DualPipeV process p holds the parts p and 2 · stages − 1 − p, so
    the first process also holds the last part."""
    return part_index if part_index < stages else 2 * stages - 1 - part_index


def describe_balance(engine: EngineConfig, flops: Flops, checkpointing: bool) -> str:
    """A human-readable line: the layers of each process of a pipeline, and the process's share of the operations."""
    balance = pipeline_balance(engine, flops, checkpointing)
    names_by_process: list[list[str]] = [[] for _ in range(engine.pipeline_stages)]
    names_by_process[0].append("embedding, generator" if flops.generator else "embedding")
    for index, part in enumerate(split_layers(balance)):
        if part.layers:
            first, last = part.layers[0], part.layers[-1]
            layer_names = f"layers {first}-{last}" if first < last else f"layer {last}"
            names_by_process[_process_of(index, engine.pipeline_stages)].append(layer_names)
    costs = process_costs(part_costs(flops, balance, checkpointing), engine.pipeline_stages)
    shares = [
        f"{', '.join(names)} ({cost / sum(costs):.0%})" for names, cost in zip(names_by_process, costs, strict=True)
    ]
    return f"pipeline ({engine.pipeline_schedule}), share of the operations: " + " | ".join(shares)
