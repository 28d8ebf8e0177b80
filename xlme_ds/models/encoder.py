"""Token lookup, and an encoder over embedded tokens: its positions, layers and norms.

An embedding table is stored as one or several parameters, the blocks, each for a range of token ids. Blocks keep
DeepSpeed's buffers small: when it swaps parameters to a disk, each buffer is as large as the largest parameter.

B rows, T tokens, D width, H heads, W = 2T−1 distances.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig
from .attention import RelativePositionTable, item_mask
from .dropout import derive_seeds, drop
from .layers import TransformerLayer, norm_of
from .modern import ModernLayer


class EmbeddingModel(nn.Module):
    """A model that owns its token embedding: the blocks are its parameters `embedding_0`, `embedding_1`, …."""

    def __init__(self, cfg: ModelConfig, tables: Sequence[str] = ("embedding",)):
        """`tables`: the names of the embedding and of all other tables of its shape."""
        super().__init__()
        self.cfg = cfg
        for n, size in enumerate(block_sizes(cfg)):
            for name in tables:
                self.register_parameter(f"{name}_{n}", nn.Parameter(torch.empty(size, cfg.width)))

    @property
    def embedding_blocks(self) -> list[Tensor]:
        """The blocks of the token embedding."""
        return [getattr(self, f"embedding_{n}") for n in range(self.cfg.vocabulary_blocks)]


def block_sizes(cfg: ModelConfig) -> list[int]:
    """The number of ids in each block of the embedding: equal, except for the last block, which has the remainder."""
    size = -(-cfg.vocabulary // cfg.vocabulary_blocks)
    return [min(size, cfg.vocabulary - start) for start in range(0, cfg.vocabulary, size)]


def lookup(ids: Tensor, blocks: Sequence[Tensor], sparse: bool = False) -> Tensor:
    """Embeddings of `ids` (int64, any shape) as [..., D]. Each block continues the ids of the block before.

    `sparse`: on a CPU, give the blocks a sparse gradient. Use it only if the blocks get a dense gradient too, from an
    operation that takes them from `with_dense_gradient`: autograd then adds the sparse gradient to the dense one.
    """

    def lookup_block(offsets: Tensor, block: Tensor) -> Tensor:
        if offsets.is_cuda:  # torch's own backward pass on a GPU already sums in float32
            return F.embedding(offsets, block)
        return _Lookup.apply(offsets, block, sparse)

    if len(blocks) == 1:
        return lookup_block(ids, blocks[0])
    total, start = None, 0
    for block in blocks:
        offsets = ids - start
        is_in_block = (offsets >= 0) & (offsets < len(block))
        # The ids of other blocks get an arbitrary row of this block, which the factor 0 removes.
        embedded = lookup_block(offsets.clamp(0, len(block) - 1), block) * is_in_block.unsqueeze(-1)
        total = embedded if total is None else total + embedded
        start += len(block)
    assert total is not None
    return total


class _Lookup(torch.autograd.Function):
    """Table lookup whose gradient is summed in float32: the gradient of a frequent token has thousands of summands, too
    many for bf16."""

    @staticmethod
    def forward(ctx, ids: Tensor, weight: Tensor, sparse: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype, ctx.sparse = weight.shape, weight.dtype, sparse
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        used_ids, index_of_id = ids.flatten().unique(return_inverse=True)
        sums = grad.new_zeros(len(used_ids), ctx.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32))
        sums = sums.index_add_(0, index_of_id, grad.flatten(0, -2).to(sums.dtype)).to(ctx.dtype)
        if ctx.sparse:
            grad_table = torch.sparse_coo_tensor(
                used_ids[None], sums, ctx.shape, is_coalesced=True, check_invariants=False
            )
        else:
            grad_table = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device).index_copy_(0, used_ids, sums)
        return None, grad_table, None


def with_dense_gradient(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Prepare `blocks` for an operation that reads each of them whole, and so gives it a dense gradient. Call this
    before the sparse lookups of the forward pass.

    The backward pass runs in reverse, so the dense gradient then comes last, and autograd adds the sum of the sparse
    gradients to it in place. In the opposite order autograd would copy the dense gradient. Blocks that an engine
    partitions (they have `ds_id`) are returned unchanged, because a view would keep the complete block in memory.
    Blocks with `gradient_adder` are returned unchanged too: the masked head adds their gradient to the engine's without
    autograd.
    """
    if not torch.is_grad_enabled():
        return list(blocks)
    return [
        block if hasattr(block, "ds_id") or hasattr(block, "gradient_adder") else _DenseGradient.apply(block)
        for block in blocks
    ]


class _DenseGradient(torch.autograd.Function):
    """Identity. Its backward pass returns the gradient itself, to which autograd adds the block's other gradients in
    place. The backward pass of `view_as` would return a view, which autograd would copy before it adds."""

    @staticmethod
    def forward(ctx, block: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return block.view_as(block)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return grad


class Encoder(nn.Module):
    """Positions, layers and norms of one encoder. Token embeddings belong to the model: two encoders may share them."""

    ragged = False  # whether batches differ in row length; if so, layers are not compiled: each length needs new code

    def __init__(self, cfg: ModelConfig, layers: int):
        super().__init__()
        self.cfg = cfg
        self.cfg_of_phase = cfg  # `cfg` with the rotary base of the data's current phase
        self.positions = nn.Parameter(torch.empty(cfg.max_positions, cfg.width)) if cfg.absolute_positions else None
        languages = len(cfg.language_embeddings)
        self.languages = nn.Parameter(torch.empty(languages, cfg.width)) if languages else None
        self.relative = (
            RelativePositionTable(cfg.heads, cfg.relative_buckets, cfg.relative_max_distance)
            if cfg.relative_bias != "none"
            else None
        )
        # A dict, so that a layer keeps its index when a pipeline stage deletes other layers.
        self.layers = nn.ModuleDict({str(n): self._layer(n) for n in range(layers)})
        # Post-LN normalises the input of the first layer. Pre-LN normalises the output of the last layer, and with
        # `embedding_norm` also the input of the first.
        self.input_norm = norm_of(cfg) if cfg.norm == "post" or cfg.embedding_norm else None
        self.output_norm = norm_of(cfg) if cfg.norm == "pre" else None
        # Calls a layer with its inputs. `execution.wrap_layers` may replace this function.
        self.run_layer: Callable[..., Tensor] = operator.call

    def _layer(self, index: int) -> nn.Module:
        return layer_class(self.cfg)(self.cfg, index)

    def first_layer_input(
        self,
        embedded_BTD: Tensor,
        positions_BT: Tensor,
        languages_BT: Tensor | None = None,
        seeds_B: Tensor | None = None,
    ) -> Tensor:
        """Input of the first layer, [B, T, D], from token embeddings [B, T, D] and the tensors of `Batch`.

        `seeds_B`, 64 random bits for each row, is needed in training with dropout. Raises ValueError if languages have
        embeddings and `languages_BT` is None.
        """
        if self.positions is not None:
            embedded_BTD = embedded_BTD + lookup(positions_BT, [self.positions])
        if self.languages is not None:
            if languages_BT is None:
                raise ValueError("the model has model.language_embeddings: it needs the language of its input")
            embedded_BTD = embedded_BTD + lookup(languages_BT, [self.languages])
        if self.input_norm is not None:
            embedded_BTD = self.input_norm(embedded_BTD)
        seeds_B = self._seeds_for_dropout(seeds_B)
        return embedded_BTD if seeds_B is None else drop(embedded_BTD, self.cfg.dropout, derive_seeds(seeds_B, 0))

    def _seeds_for_dropout(self, seeds_B: Tensor | None) -> Tensor | None:
        """`seeds_B` if this pass has dropout, else None."""
        if not self.training or self.cfg.dropout == self.cfg.attention_dropout == 0:
            return None
        assert seeds_B is not None
        return seeds_B

    def bias_by_distance(self, tokens: int) -> Tensor | None:
        """The relative bias for each distance in a row of `tokens` tokens, float32 or float64 [H, W]; None if the model
        has no relative bias."""
        return None if self.relative is None else self.relative(tokens)

    def run_layers(
        self,
        x_BTD: Tensor,
        groups_BT: Tensor,
        position_bias_HW: Tensor | None,
        make_mask: Callable[[Tensor], Tensor] = item_mask,
        seeds_B: Tensor | None = None,
        row_tokens: int | None = None,
    ) -> Tensor:
        """The output of all layers and of the norm after the last one, [B, T, D], from the input of the first layer.

        `groups_BT` has a number for every position, such as the index of its item; `make_mask` makes the attention mask
        from these numbers. `row_tokens`: the number of tokens in a full row, if these rows are shorter (see
        `TorchBias`).
        """
        cfg = self.cfg_of_phase
        shared = layer_class(cfg).shared_inputs(cfg, groups_BT, position_bias_HW, x_BTD.dtype, make_mask, row_tokens)
        return self.run_layers_with(x_BTD, shared, seeds_B)

    def run_layers_with(self, x_BTD: Tensor, shared: object, seeds_B: Tensor | None = None) -> Tensor:
        """The result of `run_layers`. `shared` has the attention mask and the bias of all layers."""
        seeds_B = self._seeds_for_dropout(seeds_B)
        for index, layer in self.layers.items():
            layer_seeds_B = None if seeds_B is None else derive_seeds(seeds_B, 1 + int(index))
            x_BTD = self.run_layer(layer, x_BTD, shared, layer_seeds_B)
        return x_BTD if self.output_norm is None else self.output_norm(x_BTD)

    def forward(
        self,
        embedded_BTD: Tensor,
        positions_BT: Tensor,
        groups_BT: Tensor,
        languages_BT: Tensor | None = None,
        seeds_B: Tensor | None = None,
        make_mask: Callable[[Tensor], Tensor] = item_mask,
    ) -> Tensor:
        """Last hidden states, [B, T, D]. The arguments are those of `first_layer_input` and of `run_layers`."""
        input_BTD = self.first_layer_input(embedded_BTD, positions_BT, languages_BT, seeds_B)
        return self.run_layers(input_BTD, groups_BT, self.bias_by_distance(groups_BT.shape[1]), make_mask, seeds_B)

    def hidden_states(
        self, embedded_BTD: Tensor, positions_BT: Tensor, segments_BT: Tensor, languages_BT: Tensor | None = None
    ) -> list[Tensor]:
        """The input of the first layer (index 0) and the output of every layer, each [B, T, D]. The last layer's output
        is after the output norm; in evaluation mode `forward` returns the same tensor."""
        position_bias_HW = self.bias_by_distance(segments_BT.shape[1])
        cfg = self.cfg_of_phase
        shared = layer_class(cfg).shared_inputs(cfg, segments_BT, position_bias_HW, embedded_BTD.dtype)
        states = [self.first_layer_input(embedded_BTD, positions_BT, languages_BT)]
        for layer in self.layers.values():
            states.append(layer(states[-1], shared))
        if self.output_norm is not None:
            states[-1] = self.output_norm(states[-1])
        return states


def layer_class(cfg: ModelConfig) -> type[TransformerLayer]:
    """The class of an encoder's layers, which `model.body` chooses."""
    return ModernLayer if cfg.body == "modern" else TransformerLayer


def use_rotary_base(model: nn.Module, base: float | None) -> None:
    """Set the base of rotary positions in all encoders of `model`. If `base` is None, each uses the base in its
    settings."""
    for encoder in model.modules():
        if isinstance(encoder, Encoder):
            encoder.cfg_of_phase = encoder.cfg if base is None else replace(encoder.cfg, rotary_base=base)
