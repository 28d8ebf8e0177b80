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
    "bn_latn": "bn_rom",
    "hi_latn": "hi_rom",
    "ta_latn": "ta_rom",
    "te_latn": "te_rom",
    "ur_latn": "ur_rom",
}
# ISO 639-3 and 639-2 by CC-100's code: the language's own, the older one of libraries (ger), and where a code of a
# group stands for one member (ara, arb). No code of a member that the group is not used for: prs is not fa, nno not no.
_THREE_LETTERS = """
af afr, am amh, ar ara arb, as asm, az aze azj, be bel, bg bul, bn ben, br bre, bs bos, ca cat, cs ces cze, cy cym wel,
da dan, de deu ger, el ell gre, en eng, eo epo, es spa, et est ekk, eu eus baq, fa fas per pes, fi fin, fr fra fre,
fy fry, ga gle, gd gla, gl glg, gu guj, ha hau, he heb, hi hin, hr hrv, hu hun, hy hye arm, id ind, is isl ice, it ita,
ja jpn, jv jav, ka kat geo, kk kaz, km khm, kn kan, ko kor, ku kur, ky kir, la lat, lo lao, lt lit, lv lav lvs,
mg mlg plt, mk mkd mac, ml mal, mn mon khk, mr mar, ms msa may zsm, my mya bur, ne nep npi, nl nld dut, no nor nob,
om orm gaz, or ori ory, pa pan, pl pol, ps pus, pt por, ro ron rum, ru rus, sa san, sd snd, si sin, sk slk slo, sl slv,
so som, sq sqi alb, sr srp, su sun, sv swe, sw swa swh, ta tam, te tel, th tha, tl tgl, tr tur, ug uig, uk ukr, ur urd,
uz uzb uzn, vi vie, xh xho, yi yid ydd, zh-Hans zho chi cmn
"""
_ALIASES |= {code: own for own, *codes in (entry.split() for entry in _THREE_LETTERS.split(",")) for code in codes}
_REGION = re.compile(r"([a-z]{2,3})_[a-z]{2}")  # en_XX, fr_FR: a language with a country that makes no difference here
_KNOWN = {code.lower().replace("-", "_"): code for code in LANGUAGES} | _ALIASES


def canonical(code: str) -> str:
    """CC-100's spelling of a language code. Raises ValueError, which names a code of the same language if one is
    near."""
    key = code.lower().replace("-", "_")
    region = _REGION.fullmatch(key)
    for spelling in (key, region[1] if region else key):
        if spelling in _KNOWN:
            return _KNOWN[spelling]
    # Nearly every two or three letters are some language's: of codes that begin otherwise none is meant.
    same = [known for known in _KNOWN if known.split("_")[0] == key.split("_")[0]]
    near = [_KNOWN[known] for known in difflib.get_close_matches(key, same, n=1, cutoff=0.0)]
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown language code {code!r}: {meant}data_prep/languages.py lists the known ones")


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
