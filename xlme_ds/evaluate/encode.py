"""Sentence vectors: the mean over the hidden vectors of every layer (XLM-E section 4.6)."""

from collections.abc import Sequence

import numpy as np
import torch

from ..data.schema import BOS, EOS, PAD
from ..models.text_encoder import TextEncoder, one_item_a_row


@torch.no_grad()
def sentence_vectors(model: TextEncoder, sentences: Sequence[np.ndarray], batch: int = 64) -> np.ndarray:
    """float32 [layers + 1, sentences, width]; index 0 is the embedding layer.

    `sentences` are ids without special tokens; each is read as `<s> ids </s>`, cut to the model's longest item.
    """
    model.eval()
    device = next(model.parameters()).device
    longest = model.cfg.max_positions
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))  # little padding inside a batch
    out = np.zeros((model.cfg.discriminator_layers + 1, len(sentences), model.cfg.width), dtype=np.float32)
    for start in range(0, len(order), batch):
        here = order[start : start + batch]
        items = [np.concatenate([[BOS], sentences[i][: longest - 2], [EOS]]) for i in here]
        width = max(len(item) for item in items)
        tokens_BT = torch.full((len(items), width), PAD, dtype=torch.int64)
        for row, item in enumerate(items):
            tokens_BT[row, : len(item)] = torch.from_numpy(item)
        tokens_BT = tokens_BT.to(device)
        positions_BT, inside_BT = one_item_a_row(tokens_BT)
        states = model.hidden_states(tokens_BT, positions_BT, inside_BT)
        weights = inside_BT.float() / inside_BT.sum(1, keepdim=True)
        for layer, state_BTD in enumerate(states):
            out[layer, here] = torch.einsum("btd,bt->bd", state_BTD.float(), weights).cpu().numpy()
    return out
