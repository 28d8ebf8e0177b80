"""Hidden states of every layer for many items, and sentence vectors, which are means of hidden states (XLM-E section
4.6).

B rows, T tokens, N vectors, D width; layer 0 is the embeddings.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..data.rows import LAYOUTS, PAD, batches_by_length
from ..models.text_encoder import TextEncoder, languages_of, positions_and_segments


@torch.no_grad()
def hidden_states(
    encoder: TextEncoder, items: Sequence[np.ndarray], batch_size: int = 64, languages: Sequence[tuple[str, ...]] = ()
) -> Iterator[tuple[list[int], Tensor, list[Tensor]]]:
    """Yield (indices, mask, states) for each batch of `items`, which are ids with special tokens. `indices`: the
    batch's items, by their index in `items`. `mask`: int64 [B, T], 1 for tokens and 0 for padding. `states`: a list of
    every layer's states, float32 [B, T, D].

    `batch_size`: the number of items in a batch. `languages`: codes of the sides of every item, for models with
    language embeddings.
    """
    encoder.eval()
    device = next(encoder.parameters()).device
    for indices in batches_by_length([len(item) for item in items], batch_size):
        tokens_BT = pad_sequence([torch.from_numpy(items[i]).long() for i in indices], True, PAD).to(device)
        positions_BT, mask_BT = positions_and_segments(tokens_BT)
        languages_BT = languages_of(encoder.cfg, [languages[i] for i in indices], tokens_BT) if languages else None
        layers = encoder.hidden_states(tokens_BT, positions_BT, mask_BT, languages_BT)
        yield indices, mask_BT, [state_BTD.float() for state_BTD in layers]


def sentence_vectors(
    encoder: TextEncoder, sentences: Sequence[np.ndarray], batch_size: int = 64, languages: Sequence[str] = ()
) -> np.ndarray:
    """The mean vector of each sentence at every layer, float32 [layers, sentences, width].

    `sentences` are ids without special tokens. Each is cut to the model's maximum length, and read as `<s> ids </s>`
    (or in the model's layout). The mean includes the special tokens. `languages`: the language code of every sentence,
    for models with language embeddings.
    """
    cfg = encoder.cfg
    items = [LAYOUTS[cfg.layout].item(sentence[: cfg.max_positions - 2]) for sentence in sentences]
    vectors = np.zeros((cfg.discriminator_layers + 1, len(items), cfg.width), dtype=np.float32)
    for indices, mask_BT, layers in hidden_states(encoder, items, batch_size, [(code,) for code in languages]):
        weights_BT = mask_BT.float() / mask_BT.sum(1, keepdim=True)
        for layer, state_BTD in enumerate(layers):
            vectors[layer, indices] = torch.einsum("btd,bt->bd", state_BTD, weights_BT).cpu().numpy()
    return vectors


def unit_vectors(vectors_ND: np.ndarray) -> np.ndarray:
    """The vectors divided by their norms, so that dot products are cosines; a zero vector stays zero."""
    return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
