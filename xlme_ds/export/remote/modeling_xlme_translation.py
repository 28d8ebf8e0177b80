"""A translation model for Hugging Face transformers: XLM-E's encoder with a decoder, in XLM's form (Conneau and Lample,
2019) or DeltaLM's (Ma et al., 2021).

B rows, S source tokens, R new target tokens, T target tokens (cached and new), H heads, D width, K head size, V
vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from .configuration_xlme import XLMEConfig
from .modeling_xlme import (
    XLMEAttention,
    XLMEEncoder,
    XLMELayer,
    XLMEMaskedHead,
    XLMEModel,
    XLMEPreTrainedModel,
    attend,
    heads,
)


class XLMEDecoderAttention(XLMEAttention):
    """Self-attention: a target token sees itself and the earlier target tokens. `cache_index`: index of this attention
    in the cache."""

    def __init__(self, config: XLMEConfig, cache_index: int):
        super().__init__(config)
        self.cache_index = cache_index

    def forward(  # type: ignore[override]
        self,
        x_BRD: Tensor,
        allowed_RT: Tensor | None,
        position_bias_HRT: Tensor | None,
        source_BSD: Tensor,
        source_bias_B11S: Tensor,
        past: EncoderDecoderCache | None,
    ) -> tuple[Tensor, None]:
        """Output, [B, R, D]. The decoder gives all its attention modules the same arguments; this one ignores the
        source."""
        q_BHRK, k_BHTK, v_BHTK = heads(self.qkv(x_BRD), 3, self.config)
        if past is not None:
            k_BHTK, v_BHTK = past.self_attention_cache.update(k_BHTK, v_BHTK, self.cache_index)
        bias = position_bias_HRT
        if bias is not None and self.gate is not None:
            bias = bias * self.gate(q_BHRK)
        if allowed_RT is not None:
            bias = torch.where(allowed_RT, 0.0 if bias is None else bias, float("-inf"))
        return self.output(attend(q_BHRK, k_BHTK, v_BHTK, bias, self)[0]), None


class XLMECrossAttention(nn.Module):
    """Attention of target tokens to source tokens, without a position bias."""

    def __init__(self, config: XLMEConfig, cache_index: int):
        super().__init__()
        self.config, self.cache_index = config, cache_index
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key_value = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        x_BRD: Tensor,
        allowed_RT: Tensor | None,
        position_bias_HRT: Tensor | None,
        source_BSD: Tensor,
        source_bias_B11S: Tensor,
        past: EncoderDecoderCache | None,
    ) -> tuple[Tensor, None]:
        """Output, [B, R, D]. `past` caches the source's keys and values. `allowed_RT` and `position_bias_HRT` are
        ignored."""
        (q_BHRK,) = heads(self.query(x_BRD), 1, self.config)
        if past is not None and past.is_updated.get(self.cache_index):
            layer = past.cross_attention_cache.layers[self.cache_index]
            k_BHSK, v_BHSK = layer.keys, layer.values
        else:
            k_BHSK, v_BHSK = heads(self.key_value(source_BSD), 2, self.config)
            if past is not None:
                k_BHSK, v_BHSK = past.cross_attention_cache.update(k_BHSK, v_BHSK, self.cache_index)
                past.is_updated[self.cache_index] = True
        return self.output(attend(q_BHRK, k_BHSK, v_BHSK, source_bias_B11S, self)[0]), None


class XLMEDecoderLayer(XLMELayer):
    """In XLM's form, a layer with self-attention, cross-attention and a feed-forward network. In the interleaved form,
    two objects of this class are one layer of DeltaLM: the first has self-attention and a feed-forward network, the
    second has cross-attention and a feed-forward network. `number`: index of the object in the decoder."""

    def __init__(self, config: XLMEConfig, number: int):
        has_self_attention = config.decoder_form == "xlm" or number % 2 == 0
        cache_index = number if config.decoder_form == "xlm" else number // 2
        attention = XLMEDecoderAttention if has_self_attention else XLMECrossAttention
        super().__init__(config, attention(config, cache_index))
        self.cross_attention = self.cross_norm = None
        if config.decoder_form == "xlm":
            self.cross_attention = XLMECrossAttention(config, cache_index)
            self.cross_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, x_BRD: Tensor, *shared: Any) -> Tensor:  # type: ignore[override]
        """Output, [B, R, D]."""
        x_BRD, _ = self._add_attention(x_BRD, self.attention_norm, self.attention, *shared)
        if self.cross_attention is not None and self.cross_norm is not None:
            x_BRD, _ = self._add_attention(x_BRD, self.cross_norm, self.cross_attention, *shared)
        return self._add_feed_forward(x_BRD)


class XLMEDecoder(XLMEEncoder):
    """The decoder without its token embedding: position and language embeddings, relative bias, layers and norms."""

    def _stack(self, config: XLMEConfig) -> list[nn.Module]:
        object_count = config.decoder_layers * (1 if config.decoder_form == "xlm" else 2)
        return [XLMEDecoderLayer(config, number) for number in range(object_count)]

    def forward(  # type: ignore[override]
        self,
        embedded_BRD: Tensor,
        languages_B: Tensor,
        source_BSD: Tensor,
        mask_BS: Tensor,
        past: EncoderDecoderCache | None = None,
    ) -> Tensor:
        """The last hidden states, [B, R, D], of the target tokens in `embedded_BRD`, which follow the tokens cached in
        `past`. `mask_BS`: bool, false at the source's padding."""
        cached, tokens = 0 if past is None else past.get_seq_length(), embedded_BRD.shape[1]
        positions_T = torch.arange(cached + tokens, device=embedded_BRD.device)
        x_BRD = self.embed(embedded_BRD, positions_T[cached:], languages_B[:, None])
        allowed_RT = None if tokens == 1 else positions_T <= positions_T[cached:, None]
        position_bias_HRT = None if self.relative is None else self.relative(tokens, cached + tokens)
        bias_BS = torch.zeros_like(mask_BS, dtype=x_BRD.dtype).masked_fill(~mask_BS, float("-inf"))
        source_bias_B11S = bias_BS[:, None, None]
        for layer in self.layers:
            x_BRD = layer(x_BRD, allowed_RT, position_bias_HRT, source_BSD, source_bias_B11S, past)
        return x_BRD if self.output_norm is None else self.output_norm(x_BRD)


class XLMLengths(StoppingCriteria):
    """Ends the translation of sentence b after `limit_B[b]` target tokens. In beam search a sentence has several
    rows."""

    def __init__(self, limit_B: Tensor):
        self.limit_B = limit_B

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each row has ended, bool."""
        limits = self.limit_B.to(input_ids.device).repeat_interleave(len(input_ids) // len(self.limit_B))
        return input_ids.shape[1] - 1 >= limits  # - 1: the first token, `</s>`, is not a target token


class XLMEForConditionalGeneration(XLMEPreTrainedModel, GenerationMixin):
    """Encoder, decoder, and the head that predicts target tokens. All three share one token embedding.

    A target consists of ordinary tokens and a final `</s>`. The first token that the decoder reads is `</s>`.
    """

    _no_split_modules = ["XLMELayer", "XLMEDecoderLayer"]  # noqa: RUF012 - as in all of transformers

    def __init__(self, config: XLMEConfig):
        super().__init__(config)
        self.xlme = XLMEModel(config)
        self.decoder = XLMEDecoder(config)
        self.masked_head = XLMEMaskedHead(config)
        self.post_init()

    def get_encoder(self, *_: Any, **__: Any) -> XLMEModel:
        """The encoder, which `generate` runs once."""
        return self.xlme

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        inputs_embeds: Tensor | None = None,
        language_ids: Tensor | None = None,
        decoder_language_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> Seq2SeqLMOutput:
        """Returns `logits` [B, R, V], which predict the token after each of `decoder_input_ids` [B, R]. By default
        `decoder_input_ids` are made from `labels` [B, R] (−100 at padding). With `labels`, the loss is returned too:
        the mean over all labels except −100.

        `language_ids` and `decoder_language_ids` [B] are indices into `config.languages`, by default those of
        `config.source_language` and `config.target_language`. Attention weights and hidden states are the encoder's.
        """
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give decoder_input_ids or labels")
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        rows, device = len(decoder_input_ids), decoder_input_ids.device
        if attention_mask is None and input_ids is not None:
            attention_mask = input_ids != self.config.pad_token_id
        if encoder_outputs is None:
            encoder_outputs = self.xlme(
                input_ids,
                attention_mask,
                inputs_embeds=inputs_embeds,
                language_ids=self._language("source_language", rows, device) if language_ids is None else language_ids,
                output_attentions=output_attentions,
                output_hidden_states=output_hidden_states,
                return_dict=True,
            )
        source_BSD = encoder_outputs[0]
        if attention_mask is None:
            attention_mask = source_BSD.new_ones(source_BSD.shape[:2])
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(), DynamicCache())
        if decoder_language_ids is None:
            decoder_language_ids = self._language("target_language", rows, device)
        embedding = self.xlme.embedding
        hidden_BRD = self.decoder(
            embedding(decoder_input_ids), decoder_language_ids, source_BSD, attention_mask != 0, past_key_values
        )
        logits = self.masked_head(hidden_BRD, embedding.weight)
        return Seq2SeqLMOutput(
            loss=None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            logits=logits,
            past_key_values=past_key_values,
            encoder_last_hidden_state=source_BSD,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            encoder_attentions=getattr(encoder_outputs, "attentions", None),
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Decoder inputs for `labels`: `</s>`, then all labels except the last one."""
        before = F.pad(labels[:, :-1], (1, 0), value=self.config.decoder_start_token_id)
        return before.masked_fill(before == -100, self.config.pad_token_id)

    def prepare_inputs_for_generation(self, *given: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of `forward` for the next token."""
        inputs = super().prepare_inputs_for_generation(*given, **kwargs)
        inputs.pop("cache_position", None)  # transformers 4 gives it; the cache counts its tokens itself
        return inputs

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *settings: Any,
        source_language: str | None = None,
        target_language: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Translate as `GenerationMixin.generate` does, from one language into another; the default languages are the
        config's. For rows of several languages, give `language_ids` and `decoder_language_ids`.

        The translation of a text of n ordinary tokens has at most 1.3 n + 5 tokens, as in XLM, and at most
        `config.max_position_embeddings`. Raises ValueError for an unknown language, for a missing source and for a
        static cache.
        """
        names = ("input_ids", "inputs_embeds", "encoder_outputs")
        source = next((given for given in (inputs, *map(kwargs.get, names)) if given is not None), None)
        if source is None:
            raise ValueError("give input_ids, the tokens of the sources")
        source = source["last_hidden_state"] if isinstance(source, dict) else source
        for name, code in (("source_language", source_language), ("target_language", target_language)):
            argument = "language_ids" if name == "source_language" else "decoder_language_ids"
            if kwargs.get(argument) is None:
                kwargs[argument] = self._language(name, len(source), source.device, code)
        if kwargs.get("attention_mask") is None:
            mask = source != self.config.pad_token_id if source.dim() == 2 else source.new_ones(source.shape[:2])
            kwargs["attention_mask"] = mask.long()
        if "static" in str(kwargs.get("cache_implementation")):
            raise ValueError("a static cache does not fit this model: leave out cache_implementation")
        given_config = kwargs.get("generation_config") or (settings[0] if settings else None)
        beams = (kwargs.get("num_beams"), getattr(given_config, "num_beams", None), self.generation_config.num_beams, 1)
        unset = GenerationConfig().early_stopping  # None, or False in transformers 4
        configs = given_config, self.generation_config
        early_stopping_is_set = any(getattr(config, "early_stopping", unset) != unset for config in configs)
        if next(count for count in beams if count) > 1 and not early_stopping_is_set:
            kwargs.setdefault("early_stopping", True)  # as in XLM: stop when there are as many translations as beams
        lengths_B = (kwargs["attention_mask"] != 0).sum(1) - 2  # without the special tokens around a text
        limit_B = (1.3 * lengths_B.double() + 5).long().clamp(max=self.config.max_position_embeddings)
        criteria = StoppingCriteriaList([*(kwargs.pop("stopping_criteria", None) or []), XLMLengths(limit_B)])
        return super().generate(inputs, *settings, stopping_criteria=criteria, **kwargs)

    def _language(self, name: str, rows: int, device: torch.device, code: str | None = None) -> Tensor:
        """int64 [B]: for every row the index of the language `code`, by default the one in the config's setting `name`.
        `zh` means `zh-Hans` if there is no `zh`. Raises ValueError for an unknown language."""
        languages, code = self.config.languages, code or getattr(self.config, name)
        indices = [n for n, listed in enumerate(languages) if listed == code]
        indices += [n for n, listed in enumerate(languages) if listed.startswith(f"{code}-")]
        if not indices:
            problem = f"{code} is no language of this model" if code else "is missing"
            raise ValueError(f"{name} {problem}: choose one of {' '.join(languages)}")
        return torch.full((rows,), indices[0], device=device)
