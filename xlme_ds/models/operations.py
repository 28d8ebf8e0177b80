"""Floating-point operations of the parts of a model, forward, a token; a multiply-add is two, and only matrix products
count."""

from dataclasses import dataclass

from ..config import ModelConfig


@dataclass(frozen=True)
class Work:
    """Operations of an objective's forward pass, a token, by where a pipeline does them."""

    layers: int  # of the encoder that a pipeline cuts
    layer: float  # of each of them
    before: float = 0.0  # layers of another encoder, in the first part
    softmax_first: float = 0.0  # a masked head with its vocabulary softmax, in the first part
    softmax_last: float = 0.0  # the same in the last part
    head: float = 0.0  # any other head, in the last part
    layer_ahead: float = 0.0  # of each of those layers in a pass that goes ahead without gradient
    softmax_ahead: float = 0.0  # of the last part's masked head in that pass

    @property
    def softmax(self) -> float:
        """Of the masked head, wherever it is."""
        return self.softmax_first + self.softmax_last

    @property
    def forward(self) -> float:
        """Of everything that a gradient goes through."""
        return self.layers * self.layer + self.before + self.softmax + self.head

    @property
    def training(self) -> float:
        """Of forward and backward, the latter as twice the former."""
        return 3.0 * self.forward + self.layers * self.layer_ahead + self.softmax_ahead


def encoder_forward(cfg: ModelConfig, layers: int, row_tokens: int) -> float:
    """Matrix products of one encoder's layers, a token: projections, feed-forward, scores and weighted sums."""
    products = 4 * cfg.width**2 + 2 * cfg.width * cfg.feed_forward + 2 * row_tokens * cfg.width
    return 2.0 * layers * products


def masked_head_forward(cfg: ModelConfig, mask_fraction: float) -> float:
    """The masked head with its vocabulary softmax at the masked fraction, a token."""
    dense = cfg.width**2 if cfg.masked_head == "dense" else 0
    return 2.0 * mask_fraction * (dense + cfg.width * cfg.vocabulary)
