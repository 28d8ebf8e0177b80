"""XLM-E (Chi et al., ACL 2022) for Hugging Face transformers: the encoder and its heads.

B rows, T tokens, H heads, D width, K head size, V vocabulary, C labels.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from .configuration_xlme import XLMEConfig


def _layer_norm(config: XLMEConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


@functools.cache
def _borders(half: int, max_distance: int) -> tuple[int, ...]:
    """The smallest absolute distance in each of the `half` buckets of one sign, except the first bucket. Only integers
    are computed, so nothing is rounded."""
    exact = half // 2
    borders, distance = list(range(1, exact + 1)), exact
    for step in range(1, half - exact):  # distance ≥ exact · (max_distance / exact)^(step / (half − exact))
        while distance ** (half - exact) < exact ** (half - exact - step) * max_distance**step:
            distance += 1
        borders.append(distance)
    return tuple(borders)


class XLMERelativePositions(nn.Module):
    """d in XLM-E section 3.3: a learned bias for every head and bucket of distances (T5's buckets, both directions)."""

    def __init__(self, config: XLMEConfig):
        super().__init__()
        self.max_distance = config.relative_max_distance
        self.weight = nn.Parameter(torch.empty(config.relative_buckets, config.num_attention_heads))

    def forward(self, queries: int, tokens: int) -> Tensor:
        """d for the distance j − i from each query i to each key j, [H, queries, tokens]. The keys are all tokens, the
        queries are the last tokens."""
        half = len(self.weight) // 2
        position = torch.arange(tokens, device=self.weight.device)
        distance = position[None, :] - position[tokens - queries :, None]
        borders = torch.tensor(_borders(half, self.max_distance), device=self.weight.device)
        bucket_TT = torch.bucketize(distance.abs(), borders, right=True) + half * (distance > 0).long()
        return self.weight[bucket_TT].permute(2, 0, 1)


class XLMEGate(nn.Module):
    """1 + g_update + (1 − g_update) · w · g_reset: the factor by which a query multiplies d."""

    def __init__(self, config: XLMEConfig):
        super().__init__()
        self.update = nn.Parameter(torch.empty(config.hidden_size // config.num_attention_heads))
        self.reset = nn.Parameter(torch.empty_like(self.update))
        self.scale = nn.Parameter(torch.empty(config.num_attention_heads))

    def forward(self, q_BHTK: Tensor) -> Tensor:
        """The factor of every query, [B, H, T, 1]."""
        update, reset = torch.sigmoid(q_BHTK @ self.update), torch.sigmoid(q_BHTK @ self.reset)
        return (1 + update + (1 - update) * self.scale[:, None] * reset).unsqueeze(-1)


class XLMEAttention(nn.Module):
    """Self-attention with the gated relative position bias."""

    def __init__(self, config: XLMEConfig):
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.gate = XLMEGate(config) if config.relative_bias == "gated" else None

    def forward(
        self, x_BTD: Tensor, allowed_B1TT: Tensor, position_bias_HTT: Tensor | None, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output [B, T, D], and the weights [B, H, T, T] if `with_weights`."""
        q_BHTK, k_BHTK, v_BHTK = heads(self.qkv(x_BTD), 3, self.config)
        if position_bias_HTT is not None and self.gate is not None:
            position_bias_HTT = position_bias_HTT * self.gate(q_BHTK)
        bias = torch.where(allowed_B1TT, 0.0 if position_bias_HTT is None else position_bias_HTT, float("-inf"))
        out_BTD, weights = attend(q_BHTK, k_BHTK, v_BHTK, bias, self, with_weights)
        return self.output(out_BTD), weights


def heads(x_BTD: Tensor, parts: int, config: XLMEConfig) -> Tensor:
    """[B, T, parts · D] reshaped to [parts, B, H, T, K]. A part is the queries, the keys or the values."""
    return x_BTD.view(*x_BTD.shape[:2], parts, config.num_attention_heads, -1).permute(2, 0, 3, 1, 4)


def attend(
    q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias: Tensor | None, module: Any, with_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Returns (attention's output before its projection [B, T, D]; the weights [B, H, T, T] if `with_weights`, else
    None). `bias` is added to the scores. `module` is the attention module; its config gives the dropout rate and
    chooses between torch's fused kernel and "eager"."""
    dropout = module.config.attention_probs_dropout_prob if module.training else 0.0
    weights_BHTT = None
    if with_weights or module.config._attn_implementation == "eager":
        scores_BHTT = (q_BHTK * q_BHTK.shape[-1] ** -0.5) @ k_BHTK.transpose(-1, -2)
        weights_BHTT = (scores_BHTT if bias is None else scores_BHTT + bias).softmax(-1).to(v_BHTK.dtype)
        out_BHTK = F.dropout(weights_BHTT, dropout) @ v_BHTK
    else:
        out_BHTK = _fused(q_BHTK, k_BHTK, v_BHTK, None if bias is None else bias.to(q_BHTK.dtype), dropout)
    # Copied, because torch.onnx.export assumes wrong strides for the fused kernel's output.
    out_BTHK = out_BHTK.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return out_BTHK.flatten(2), weights_BHTT if with_weights else None


def _fused(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    if not q_BHTK.is_cuda:
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, bias, dropout)
    # Without cuDNN's kernel: it is torch's first choice on Hopper, but has no gradient for the bias.
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, bias, dropout)


class XLMELayer(GradientCheckpointingLayer):
    """Attention (self-attention by default) and a GELU feed-forward network, each with a residual connection; post-LN
    or pre-LN."""

    def __init__(self, config: XLMEConfig, attention: nn.Module | None = None):
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.attention = XLMEAttention(config) if attention is None else attention
        self.attention_norm = _layer_norm(config)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.feed_forward_norm = _layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, x_BTD: Tensor, allowed_B1TT: Tensor, position_bias_HTT: Tensor | None, with_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output [B, T, D], and the attention weights [B, H, T, T] if `with_weights`."""
        x_BTD, weights = self._add_attention(
            x_BTD, self.attention_norm, self.attention, allowed_B1TT, position_bias_HTT, with_weights
        )
        return self._add_feed_forward(x_BTD), weights

    def _add_attention(self, x_BTD: Tensor, norm: nn.Module, attention: nn.Module, *shared: Any) -> tuple[Tensor, Any]:
        attended_BTD, weights = attention(norm(x_BTD) if self.pre_norm else x_BTD, *shared)
        x_BTD = x_BTD + self.dropout(attended_BTD)
        return x_BTD if self.pre_norm else norm(x_BTD), weights

    def _add_feed_forward(self, x_BTD: Tensor) -> Tensor:
        input_BTD = self.feed_forward_norm(x_BTD) if self.pre_norm else x_BTD
        x_BTD = x_BTD + self.dropout(self.down(F.gelu(self.up(input_BTD))))
        return x_BTD if self.pre_norm else self.feed_forward_norm(x_BTD)


class XLMEEncoder(nn.Module):
    """The encoder without its token embedding: position and language embeddings, relative bias, layers and norms."""

    def __init__(self, config: XLMEConfig):
        super().__init__()
        positions = torch.empty(config.max_position_embeddings, config.hidden_size)
        languages = torch.empty(len(config.languages), config.hidden_size)
        self.positions = nn.Parameter(positions) if config.absolute_positions else None
        self.languages = nn.Parameter(languages) if config.languages else None
        self.relative = None if config.relative_bias == "none" else XLMERelativePositions(config)
        self.layers = nn.ModuleList(self._stack(config))
        # Post-LN normalises the first layer's input. Pre-LN normalises the last layer's output and, with
        # `embedding_norm`, also the first layer's input.
        self.input_norm = _layer_norm(config) if config.norm == "post" or config.embedding_norm else None
        self.output_norm = _layer_norm(config) if config.norm == "pre" else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def _stack(self, config: XLMEConfig) -> list[nn.Module]:
        return [XLMELayer(config) for _ in range(config.num_hidden_layers)]

    def embed(self, embedded_BTD: Tensor, positions: Tensor, languages: Tensor | None) -> Tensor:
        """Input of the first layer, [B, T, D]. `positions` are [B, T] or [T], `languages` [B, T] or [B, 1]."""
        x_BTD = embedded_BTD if self.positions is None else embedded_BTD + F.embedding(positions, self.positions)
        if self.languages is not None and languages is not None:
            x_BTD = x_BTD + F.embedding(languages, self.languages)
        return self.dropout(x_BTD if self.input_norm is None else self.input_norm(x_BTD))

    def forward(
        self,
        embedded_BTD: Tensor,
        positions_BT: Tensor,
        languages_BT: Tensor | None,
        items_BT: Tensor,
        with_weights: bool,
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Returns (the first layer's input and the output of every layer, the last one normalised in pre-LN; the
        attention weights of every layer). `items_BT`: the number of each token's item in its row; 0 at padding."""
        x_BTD = self.embed(embedded_BTD, positions_BT, languages_BT)
        position_bias_HTT = None if self.relative is None else self.relative(x_BTD.shape[1], x_BTD.shape[1])
        # A token sees the tokens of its own item. Padding sees padding, so that no softmax is empty.
        allowed_B1TT = (items_BT[:, :, None] == items_BT[:, None, :])[:, None]
        states, weights = [x_BTD], []
        for layer in self.layers:
            x_BTD, layer_weights = layer(x_BTD, allowed_B1TT, position_bias_HTT, with_weights)
            states.append(x_BTD)
            weights.append(layer_weights)
        if self.output_norm is not None:
            states[-1] = self.output_norm(states[-1])
        return states, weights


class XLMEPreTrainedModel(PreTrainedModel):
    """Attributes and methods that transformers expects in every class of this file."""

    config_class = XLMEConfig
    base_model_prefix = "xlme"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _input_embed_layer = "embedding"
    _no_split_modules = ["XLMELayer"]  # noqa: RUF012 - as in all of transformers
    # No warning if the folder has a head or decoder that the loaded class does not have.
    _keys_to_ignore_on_load_unexpected = [r"^(replaced_head|masked_head|head|decoder)\."]  # noqa: RUF012

    def _init_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(parameter)
            elif name == "scale" or isinstance(module, nn.LayerNorm):  # the scale belongs to a gate
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=self.config.initializer_range)

    def _resize_token_embeddings(self, *sizes: Any, **settings: Any) -> nn.Embedding:
        resized = super()._resize_token_embeddings(*sizes, **settings)
        if hasattr(self, "masked_head"):
            self.masked_head.resize(len(resized.weight))
        return resized


class XLMEModel(XLMEPreTrainedModel):
    """Token embedding and encoder. The output has `last_hidden_state` and, on request, `hidden_states` (the first
    layer's input and the output of every layer) and `attentions`."""

    def __init__(self, config: XLMEConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = XLMEEncoder(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        language_ids: Tensor | None = None,
    ) -> BaseModelOutput:
        """`attention_mask` [B, T] is 0 at padding. By default it is 0 where `input_ids` is the padding token;
        for `inputs_embeds` it is 1 everywhere.

        The mask may also number the items of a row (1, 2, …). Then a token sees only its own item. Positions restart at
        every item, so `position_ids` must be given.

        `language_ids` are indices into `config.languages`: [B] for whole texts, or [B, T] for tokens. By default every
        token has the index of `config.language`. Models without language embeddings ignore them.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embedding(input_ids)
        if attention_mask is None:
            attention_mask = torch.ones(inputs_embeds.shape[:2], dtype=torch.long, device=inputs_embeds.device)
            if input_ids is not None:
                attention_mask = input_ids != self.config.pad_token_id
        items_BT = attention_mask.long()
        if position_ids is None:
            mask_BT = items_BT.clamp(max=1)
            position_ids = (mask_BT.cumsum(1) - 1) * mask_BT
            if self.config.layout == "xlm":
                if input_ids is None:
                    raise ValueError(
                        "in the layout xlm, positions restart at the second text, which only input_ids shows: give "
                        "input_ids or position_ids"
                    )
                # `</s>` ends a text, but at position 0 it opens one.
                ends_BT = ((input_ids == self.config.eos_token_id) & (position_ids > 0)).long()
                second_BT = (ends_BT.cumsum(1) - ends_BT).clamp(max=1) * mask_BT  # 1 in the second text
                position_ids = torch.where(second_BT > 0, second_BT.cumsum(1) - 1, position_ids)
        with_weights = self.config.output_attentions if output_attentions is None else output_attentions
        with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states, weights = self.encoder(
            inputs_embeds, position_ids, self._languages(language_ids, items_BT), items_BT, bool(with_weights)
        )
        return BaseModelOutput(
            last_hidden_state=states[-1],
            hidden_states=tuple(states) if with_states else None,
            attentions=tuple(weights) if with_weights else None,
        )

    def _languages(self, language_ids: Tensor | None, items_BT: Tensor) -> Tensor | None:
        """The language of every token, [B, T]; None for a model without language embeddings."""
        languages = self.config.languages
        if not languages:
            return None
        if language_ids is None:
            if self.config.language not in languages:
                raise ValueError(f"give language_ids, or set config.language to one of {' '.join(languages)}")
            return torch.full_like(items_BT, languages.index(self.config.language))
        return language_ids if language_ids.dim() == 2 else language_ids[:, None].expand_as(items_BT)


class XLMEMaskedHead(nn.Module):
    """Dense, GELU and LayerNorm (left out if `config.masked_head` is linear), then the product with the token
    embedding, plus a bias."""

    def __init__(self, config: XLMEConfig):
        super().__init__()
        is_dense = config.masked_head == "dense"
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if is_dense else None
        self.norm = _layer_norm(config) if is_dense else None
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def resize(self, tokens: int) -> None:
        """Resize the bias to `tokens`. A new token gets the mean bias, because transformers draws the new embedding
        around the mean embedding."""
        old = self.bias.data[:tokens]
        new = old.mean().expand(tokens - len(old))
        self.bias = nn.Parameter(torch.cat([old, new]), self.bias.requires_grad)

    def forward(self, hidden_BTD: Tensor, embedding_VD: Tensor) -> Tensor:
        """Logits, [B, T, V]."""
        if self.dense is not None and self.norm is not None:
            hidden_BTD = self.norm(F.gelu(self.dense(hidden_BTD)))
        return F.linear(hidden_BTD, embedding_VD, self.bias)


class XLMEHead(nn.Module):
    """Dropout, a dense layer with `activation` (left out if that is None), and a linear layer: from [..., D] to
    [..., C]."""

    def __init__(self, config: XLMEConfig, labels: int, activation: Any = None, dropout: float | None = None):
        super().__init__()
        if dropout is None:
            dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.activation = activation
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if activation else None
        self.output = nn.Linear(config.hidden_size, labels)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits."""
        hidden = self.dropout(hidden)
        return self.output(hidden if self.dense is None else self.activation(self.dense(hidden)))


class XLMEModelWithHead(XLMEPreTrainedModel):
    """An encoder and a head. The head of this class classifies tokens; subclasses with another head or loss replace the
    private methods."""

    output_class: Any = TokenClassifierOutput

    def __init__(self, config: XLMEConfig):
        super().__init__(config)
        self.xlme = XLMEModel(config)
        self._add_head(config)
        self.post_init()

    def _add_head(self, config: XLMEConfig) -> None:
        self.head = XLMEHead(config, config.num_labels)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def _loss(self, logits: Tensor, labels: Tensor, mask_BT: Tensor | None) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Take the inputs of `XLMEModel`; with `labels` the output has a loss."""
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids != self.config.pad_token_id
        encoded = self.xlme(input_ids, attention_mask, return_dict=True, **inputs)
        logits = self._logits(encoded.last_hidden_state)
        loss = None if labels is None else self._loss(logits, labels, attention_mask)
        return self.output_class(loss, logits, encoded.hidden_states, encoded.attentions)


class XLMEForPreTraining(XLMEModelWithHead):
    """The discriminator with its head: `logits` [B, T] are positive where the model takes a token for replaced.

    `labels` [B, T] are 1 for replaced tokens, else 0. The loss is the mean over all tokens except padding and tokens
    with the label −100.
    """

    def _add_head(self, config: XLMEConfig) -> None:
        self.replaced_head = XLMEHead(config, 1, F.gelu, dropout=0.0)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.replaced_head(hidden).squeeze(-1)

    def _loss(self, logits: Tensor, labels: Tensor, mask_BT: Tensor | None) -> Tensor:
        counted_BT = labels != -100
        if mask_BT is not None:
            counted_BT &= mask_BT != 0
        return F.binary_cross_entropy_with_logits(logits[counted_BT], labels[counted_BT].to(logits.dtype))


class XLMEForMaskedLM(XLMEModelWithHead):
    """The generator with its head: `logits` [B, T, V]; `labels` are −100 where nothing is predicted."""

    output_class = MaskedLMOutput

    def _add_head(self, config: XLMEConfig) -> None:
        self.masked_head = XLMEMaskedHead(config)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.masked_head(hidden, self.xlme.embedding.weight)


class XLMEForTokenClassification(XLMEModelWithHead):
    """`logits` [B, T, C]; `labels` are −100 for tokens without a label."""


class XLMEForSequenceClassification(XLMEModelWithHead):
    """`logits` [B, C]; `config.problem_type` chooses the loss.

    "single_label_classification": `labels` [B] are classes. "multi_label_classification": `labels` [B, C] are 1 for the
    classes of a text, else 0. "regression": `labels` are numbers, [B, C], or [B] if there is one per text. If
    `config.problem_type` is None, one label (`config.num_labels`) means regression. With more labels the type of
    `labels` decides: integers are single labels, floating-point numbers are multiple labels.
    """

    output_class = SequenceClassifierOutput

    def _add_head(self, config: XLMEConfig) -> None:
        self.head = XLMEHead(config, config.num_labels, torch.tanh)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden[:, 0])

    def _loss(self, logits: Tensor, labels: Tensor, mask_BT: Tensor | None) -> Tensor:
        problem = self.config.problem_type
        if problem is None and self.config.num_labels == 1:
            problem = "regression"
        if problem == "regression":
            return F.mse_loss(logits, labels.view_as(logits).to(logits.dtype))
        if problem == "multi_label_classification" or (problem is None and labels.is_floating_point()):
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return F.cross_entropy(logits, labels.view(-1))


class XLMEForQuestionAnswering(XLMEModelWithHead):
    """`start_logits` and `end_logits` [B, T] of the answer's first and last token."""

    def _add_head(self, config: XLMEConfig) -> None:
        self.head = XLMEHead(config, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **inputs: Any,
    ) -> QuestionAnsweringModelOutput:
        """Take the inputs of `XLMEModel`. The loss is the mean over start and end. As in transformers, a position after
        the row is ignored, and a negative position counts as 0."""
        encoded = self.xlme(input_ids, attention_mask, return_dict=True, **inputs)
        start_BT, end_BT = self.head(encoded.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            outside = start_BT.shape[1]  # all positions after the row become this one, which is ignored
            start_B, end_B = start_positions.view(-1).clamp(0, outside), end_positions.view(-1).clamp(0, outside)
            loss = F.cross_entropy(start_BT, start_B, ignore_index=outside)
            loss = (loss + F.cross_entropy(end_BT, end_B, ignore_index=outside)) / 2
        return QuestionAnsweringModelOutput(loss, start_BT, end_BT, encoded.hidden_states, encoded.attentions)
