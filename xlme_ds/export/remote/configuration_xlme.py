"""Settings of an XLM-E encoder (Chi et al., ACL 2022) for Hugging Face transformers."""

from typing import Any

from transformers import PretrainedConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 250_002,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
    "norm": "post",
    "embedding_norm": False,
    "absolute_positions": True,
    "relative_bias": "gated",
    "relative_buckets": 32,
    "relative_max_distance": 128,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "mask_token_id": None,  # None: the last id of the vocabulary
    "layout": "xlme",
    "languages": [],
    "language": None,
    "masked_head": "dense",
    "decoder_form": None,
    "decoder_layers": 0,
    "source_language": None,
    "target_language": None,
}


class XLMEConfig(PretrainedConfig):
    """Settings of an XLM-E encoder; `DEFAULTS` has their defaults. Sizes have the names that transformers uses.

    `norm`: "post" or "pre". `embedding_norm`: normalise the embedded tokens in pre-LN models too. `relative_bias`:
    "gated" (XLM-E section 3.3), "plain" (T5's buckets) or "none". Dropout is 0; set it for fine-tuning. `layout`: with
    "xlm" positions restart on the second side of a pair. `languages`: codes of the languages that have an embedding; a
    model's input `language_ids` has indices into them. `language`: the language of texts without `language_ids`.
    `masked_head`: "dense", or "linear" for a head that is only the token embedding and a bias (XLM). `decoder_form`:
    "xlm" or "interleaved" (DeltaLM) for a model with a decoder of `decoder_layers`, which translates from
    `source_language` into `target_language` unless `generate` names others.
    """

    model_type = "xlme"

    def __init__(self, **kwargs: Any):
        settings = {name: kwargs.pop(name, default) for name, default in DEFAULTS.items()}
        if settings["mask_token_id"] is None:
            settings["mask_token_id"] = settings["vocab_size"] - 1
        settings["languages"] = list(settings["languages"])
        specials = {name: settings[name] for name in ("bos_token_id", "pad_token_id", "eos_token_id")}
        super().__init__(**specials, **kwargs)
        # Set after `super().__init__`, which itself sets the special ids in transformers 4 but not in transformers 5.
        for name, value in settings.items():
            setattr(self, name, value)
