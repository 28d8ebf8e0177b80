"""Settings of an XLM-E encoder (Chi et al., ACL 2022) for Hugging Face transformers."""

from typing import Any

from transformers import PretrainedConfig


class XLMEConfig(PretrainedConfig):
    """Sizes under the names that transformers uses; below them what shapes an XLM-E encoder.

    `norm`: "post" or "pre". `embedding_norm`: normalise the embedded tokens in pre-LN models too. `relative_bias`:
    "gated" (XLM-E section 3.3), "plain" (T5's buckets) or "none". Dropout is 0, as in pre-training; set it for
    fine-tuning. `layout`: "xlm" where positions start anew on the second side of a pair. `languages`: codes of the
    languages that have an embedding, in the order of `language_ids`; `language`: the one of texts whose `language_ids`
    are not given. `masked_head`: "linear" where the token embedding reads the last hidden states themselves (XLM).
    """

    model_type = "xlme"

    def __init__(
        self,
        vocab_size: int = 250_002,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        max_position_embeddings: int = 512,
        layer_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        hidden_dropout_prob: float = 0.0,
        attention_probs_dropout_prob: float = 0.0,
        classifier_dropout: float | None = None,
        norm: str = "post",
        embedding_norm: bool = False,
        absolute_positions: bool = True,
        relative_bias: str = "gated",
        relative_buckets: int = 32,
        relative_max_distance: int = 128,
        bos_token_id: int = 0,
        pad_token_id: int = 1,
        eos_token_id: int = 2,
        mask_token_id: int | None = None,
        layout: str = "xlme",
        languages: list[str] | tuple[str, ...] = (),
        language: str | None = None,
        masked_head: str = "dense",
        **kwargs: Any,
    ):
        super().__init__(bos_token_id=bos_token_id, pad_token_id=pad_token_id, eos_token_id=eos_token_id, **kwargs)
        # transformers 5 keeps none of these three, transformers 4 all.
        self.bos_token_id, self.pad_token_id, self.eos_token_id = bos_token_id, pad_token_id, eos_token_id
        self.mask_token_id = vocab_size - 1 if mask_token_id is None else mask_token_id
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.layer_norm_eps = layer_norm_eps
        self.initializer_range = initializer_range
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.classifier_dropout = classifier_dropout
        self.norm = norm
        self.embedding_norm = embedding_norm
        self.absolute_positions = absolute_positions
        self.relative_bias = relative_bias
        self.relative_buckets = relative_buckets
        self.relative_max_distance = relative_max_distance
        self.layout = layout
        self.languages = list(languages)
        self.language = language
        self.masked_head = masked_head
