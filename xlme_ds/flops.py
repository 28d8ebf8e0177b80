"""Floating-point operations: of a step by the standard count, and of a run by the count that the paper published.

In both a multiply-add is two, and only matrix products count. The standard takes the backward pass as twice the forward
and includes the vocabulary softmax at the masked positions; what activation checkpointing computes again is no work done.
"""

from .config import ModelConfig, RunConfig


def encoder_forward(cfg: ModelConfig, layers: int, row_tokens: int) -> float:
    """Matrix products of one encoder's layers, a token: projections, feed-forward, scores and weighted sums."""
    products = 4 * cfg.width**2 + 2 * cfg.width * cfg.feed_forward + 2 * row_tokens * cfg.width
    return 2.0 * layers * products


def masked_head_forward(cfg: ModelConfig, mask_fraction: float) -> float:
    """The masked head with its vocabulary softmax at the masked fraction, a token."""
    return 2.0 * mask_fraction * (cfg.width**2 + cfg.width * cfg.vocabulary)


def replaced_head_forward(cfg: ModelConfig) -> float:
    """The discriminator's head, a token."""
    return 2.0 * (cfg.width**2 + cfg.width)


def forward_per_token(cfg: ModelConfig, row_tokens: int, mask_fraction: float) -> float:
    """Both encoders, the masked head with its vocabulary softmax at the masked fraction, and the discriminator's head."""
    encoders = encoder_forward(cfg, cfg.generator_layers + cfg.discriminator_layers, row_tokens)
    return encoders + masked_head_forward(cfg, mask_fraction) + replaced_head_forward(cfg)


def flops_per_step(run: RunConfig, row_tokens: int) -> float:
    """Forward and backward of one optimizer step on full rows of `row_tokens` tokens."""
    tokens = (run.data.mono_rows + run.data.para_rows) * row_tokens
    return 3.0 * tokens * forward_per_token(run.model, row_tokens, run.objective.mask_fraction)


def paper_forward_per_token(cfg: ModelConfig, row_tokens: int) -> float:
    """Forward pass as XLM-E's Table 4 counts it, after ELECTRA: both encoders and the discriminator's head, no softmax.

    252.84 MFLOP a token for Base on rows of 512.
    """
    return forward_per_token(cfg, row_tokens, mask_fraction=0.0)


def paper_training_flops(run: RunConfig, row_tokens: int) -> dict[str, float]:
    """A run as Table 4 counts it: backward as large as forward, 2^20 tokens called 1.0e6, TRTD's tokens taken as half.

    `mrtd`: the monolingual task alone (published: 6.3e19 for Base); `both`: with the parallel one (9.5e19).
    """
    per_row = 2.0 * paper_forward_per_token(run.model, row_tokens) * row_tokens * (1e6 / 2**20)
    mrtd, trtd = (per_row * rows * run.train.steps for rows in (run.data.mono_rows, run.data.para_rows))
    return {"mrtd": mrtd, "both": mrtd + trtd / 2}
