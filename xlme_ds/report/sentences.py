"""Real sentences with a model's tokens in the masked places and, where it judges tokens, its verdict on each, as HTML.

A token is flagged when its score is among the N highest of all the samples, N being the number of replaced tokens in
them. A threshold of 0.5 would flag next to nothing while replaced tokens are a rare class; this one gives every model,
good or bad, the same number of flags to place. Tokens without a score (null) were not judged.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

Token = Mapping[str, Any]

_SPACE = "▁"  # SentencePiece's mark of a space before the piece
_SPECIAL = {"<s>", "</s>", "<pad>"}


@dataclass(frozen=True)
class Sample:
    """One rendered item: its text (one paragraph a side) and how many tokens got which verdict."""

    language: str
    task: str
    html: Markup
    counts: Counter[str]


def render_samples(samples: Sequence[Mapping[str, Any]]) -> tuple[list[Sample], float]:
    """Every sample rendered, and the score from which on a token is flagged.

    That is the N-th highest score, N = replaced tokens; infinite when no token was replaced or none was judged.
    """
    tokens = [token for sample in samples for token in sample["tokens"]]
    judged = [token for token in tokens if token["original"] not in _SPECIAL and token["score"] is not None]
    replaced = sum(bool(token["replaced"]) for token in judged)
    scores = sorted((token["score"] for token in judged), reverse=True)
    threshold = scores[replaced - 1] if replaced else math.inf
    return [_render(sample, threshold) for sample in samples], threshold


def _verdict(token: Token, threshold: float) -> str:
    """`hit` or `miss` for a replaced token, `alarm` or `passed` for an original one; without a score `miss`, `restored`
    for a masked one that is right, or `passed`."""
    if token["score"] is None:
        return "miss" if token["replaced"] else "restored" if token["masked"] else "passed"
    if token["replaced"]:
        return "hit" if token["score"] >= threshold else "miss"
    return "alarm" if token["score"] >= threshold else "passed"


def _render(sample: Mapping[str, Any], threshold: float) -> Sample:
    sides: list[list[Token]] = [[]]
    for token in sample["tokens"]:
        if token["original"] == "</s>":
            sides.append([])
        elif token["original"] not in _SPECIAL:
            sides[-1].append(token)
    language = Markup(' lang="{}"').format(language_tag(sample["language"])) if sample["task"] == "mono" else ""
    html, counts = Markup(""), Counter[str]()
    for side in filter(None, sides):
        # Right to left when most letters of the original text are.
        classes = Counter(unicodedata.bidirectional(letter) for token in side for letter in token["original"])
        direction = "rtl" if classes["R"] + classes["AL"] > classes["L"] else "ltr"
        spans = Markup("").join(_span(token, threshold, first=i == 0) for i, token in enumerate(side))
        html += Markup('<p dir="{}"{}>{}</p>').format(direction, language, spans)
        counts.update(_verdict(token, threshold) for token in side)
    return Sample(sample["language"], sample["task"], html, counts)


def _span(token: Token, threshold: float, first: bool) -> Markup:
    """One token: a space where the piece has one, then a span with the verdict's colour and a tooltip."""
    piece, kind = token["piece"], _verdict(token, threshold)
    space = " " if piece.startswith(_SPACE) and not first else ""
    text = piece.replace(_SPACE, " ").strip()
    judged = token["score"] is not None
    facts = [f"probability of being replaced: {token['score']:.3f}"] if judged else []
    body = Markup("{}").format(text)
    if token["replaced"]:
        original = token["original"].replace(_SPACE, " ").strip()
        body = Markup("<ruby>{}<rt><s>{}</s></rt></ruby>").format(text or "␣", original or "␣")
        facts.append(f"original: {original or 'space'}")
    elif token["masked"]:
        kind = f"{kind} restored" if judged else kind
        facts.append(f"masked, and the {'generator' if judged else 'model'} chose the original")
    return Markup('{}<span class="{}" title="{}">{}</span>').format(space, kind, "; ".join(facts), body)


def language_tag(code: str) -> str:
    """BCP 47 tag of a CC-100 code, which picks fonts and hyphenation: `bn_rom` is `bn-Latn`, `my_zaw` is `my`."""
    base, _, variant = code.partition("_")
    return f"{base}-Latn" if variant == "rom" else base
