"""CC-100's language codes, and the other spellings that corpora use for them."""

import difflib
import re

_CODES = """
af am ar as az be bg bn bn_rom br bs ca cs cy da de el en eo es et eu fa fi fr fy ga gd gl gu ha he hi hi_rom hr hu hy
id is it ja jv ka kk km kn ko ku ky la lo lt lv mg mk ml mn mr ms my my_zaw ne nl no om or pa pl ps pt ro ru sa sd si
sk sl so sq sr su sv sw ta ta_rom te te_rom th tl tr ug uk ur ur_rom uz vi xh yi zh-Hans zh-Hant
"""
LANGUAGES: tuple[str, ...] = tuple(_CODES.split())

# Other spellings seen in CC-100, OPUS, WikiMatrix and CCAligned file names, in lower case with `_`.
_ALIASES: dict[str, str] = {
    "zh": "zh-Hans",
    "zh_cn": "zh-Hans",
    "zh_sg": "zh-Hans",
    "zh_hans": "zh-Hans",
    "zh_tw": "zh-Hant",
    "zh_hk": "zh-Hant",
    "zh_hant": "zh-Hant",
    "nb": "no",
    "nb_no": "no",
    "iw": "he",
    "in": "id",
    "jw": "jv",
    "fil": "tl",
    "ckb": "ku",
    "kmr": "ku",
    "pt_br": "pt",
    "pt_pt": "pt",
    "sr_cyrl": "sr",
    "sr_latn": "sr",
    "az_latn": "az",
    "uz_latn": "uz",
    "ug_arab": "ug",
    "es_es": "es",
    "fa_ir": "fa",
    "my_zg": "my_zaw",
    "qd": "my_zaw",
}
_REGION = re.compile(r"([a-z]{2,3})_[a-z]{2}")  # en_XX, fr_FR: a language with a country that makes no difference here
_KNOWN = {code.lower().replace("-", "_"): code for code in LANGUAGES} | _ALIASES


def canonical(code: str) -> str:
    """CC-100's spelling of a language code. Raises ValueError naming the nearest known code."""
    key = code.lower().replace("-", "_")
    region = _REGION.fullmatch(key)
    for spelling in (key, region[1] if region else key):
        if spelling in _KNOWN:
            return _KNOWN[spelling]
    near = difflib.get_close_matches(key, _KNOWN, n=1, cutoff=0.0)[0]
    known = "data_prep/languages.py lists the known ones"
    raise ValueError(f"unknown language code {code!r}: did you mean {_KNOWN[near]!r}? {known}")


# Scripts that a language is written in, by the names of data_prep/scripts.py; the others are written in Latin.
_SCRIPTS = {
    "Arabic": "ar fa ku ps sd ug ur",
    "Armenian": "hy",
    "Bengali": "as bn",
    "Cyrillic": "be bg bs kk ky mk mn ru sr uk uz",
    "Devanagari": "hi mr ne sa",
    "Ethiopic": "am om",
    "Georgian": "ka",
    "Greek": "el",
    "Gujarati": "gu",
    "Gurmukhi": "pa",
    "Han": "ja ko zh-Hans zh-Hant",
    "Hangul": "ko",
    "Hebrew": "he yi",
    "Kana": "ja",
    "Kannada": "kn",
    "Khmer": "km",
    "Lao": "lo",
    "Malayalam": "ml",
    "Myanmar": "my my_zaw",
    "Oriya": "or",
    "Sinhala": "si",
    "Tamil": "ta",
    "Telugu": "te",
    "Thai": "th",
    "Latin": "bs kk ku om sr uz",
}


def scripts_of(language: str) -> tuple[str, ...]:
    """Names of the scripts that a language (CC-100's code) is written in."""
    return tuple(script for script, codes in _SCRIPTS.items() if language in codes.split()) or ("Latin",)
