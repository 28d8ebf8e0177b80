"""Lists CC-100's language codes, the other spellings that corpora use for them, and the scripts of the languages.

A letter is a character of Unicode's categories L*, but no modifier letter that many scripts share, such as ʻ. Vowel
signs, accents and other marks (M*) belong to the letter before them and do not count: é is one letter in composed and
in decomposed form. Digits, signs and punctuation do not count either.
"""

import difflib
import re
import unicodedata
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np

# CC-100's code of each language, then its other spellings, in lower case with `_`: those in file names of CC-100, OPUS,
# WikiMatrix and CCAligned, and the language's codes in ISO 639-3 and 639-2: the current code, the bibliographic code
# (ger), and for a macrolanguage (ara) the code of its main member (arb). Other members are left out unless such names
# have them (ckb): prs is not fa, nno is not no.
_SPELLINGS = """
af afr, am amh, ar ara arb, as asm, az az_latn aze azj, be bel, bg bul, bn ben, bn_rom bn_latn, br bre, bs bos, ca cat,
cs ces cze, cy cym wel, da dan, de deu ger, el ell gre, en eng, eo epo, es es_es spa, et est ekk, eu eus baq,
fa fa_ir fas per pes, fi fin, fr fra fre, fy fry, ga gle, gd gla, gl glg, gu guj, ha hau, he iw heb, hi hin,
hi_rom hi_latn, hr hrv, hu hun, hy hye arm, id in ind, is isl ice, it ita, ja jpn ja_jpan, jv jw jav, ka kat geo,
kk kaz, km khm, kn kan, ko kor ko_kore, ku ckb kmr kur, ky kir, la lat, lo lao, lt lit, lv lav lvs, mg mlg plt,
mk mkd mac, ml mal, mn mon khk, mr mar, ms msa may zsm, my mya bur, my_zaw my_zg qd, ne nep npi, nl nld dut,
no nb nb_no nor nob, om orm gaz, or ori ory, pa pan, pl pol, ps pus pbt, pt pt_br pt_pt por, ro ron rum, ru rus,
sa san, sd snd, si sin, sk slk slo, sl slv, so som, sq sqi alb als_latn, sr sr_cyrl sr_latn srp, su sun, sv swe,
sw swa swh, ta tam, ta_rom ta_latn, te tel, te_rom te_latn, th tha, tl fil tgl, tr tur, ug ug_arab uig, uk ukr, ur urd,
ur_rom ur_latn, uz uz_latn uzb uzn, vi vie, xh xho, yi yid ydd,
zh-Hans zh zh_cn zh_sg zh_hans zho chi cmn zho_hans cmn_hans, zh-Hant zh_tw zh_hk zh_mo zh_hant zho_hant cmn_hant
"""
# Spelling, in lower case with `_` -> CC-100's code.
_CANONICAL = {
    spelling.lower().replace("-", "_"): code
    for code, *others in map(str.split, _SPELLINGS.split(","))
    for spelling in (code, *others)
}
CC100_LANGUAGES: tuple[str, ...] = tuple(dict.fromkeys(_CANONICAL.values()))
_LANGUAGE_PARTS = frozenset(spelling.split("_")[0] for spelling in _CANONICAL)  # the language part of every spelling

# The scripts of ISO 15924.
_SCRIPT_CODES = """
adlm afak aghb ahom arab aran armi armn avst bali bamu bass batk beng bhks blis bopo brah brai bugi buhd cakm cans cari
cham cher chrs cirt copt cpmn cprt cyrl cyrs deva diak dogr dsrt dupl egyd egyh egyp elba elym ethi gara geok geor glag
gong gonm goth gran grek gujr gukh guru hanb hang hani hano hans hant hatr hebr hira hluw hmng hmnp hrkt hung inds ital
jamo java jpan jurc kali kana kawi khar khmr khoj kitl kits knda kore kpel krai kthi lana laoo latf latg latn leke lepc
limb lina linb lisu loma lyci lydi mahj maka mand mani marc maya medf mend merc mero mlym modi mong moon mroo mtei mult
mymr nagm nand narb nbat newa nkdb nkgb nkoo nshu ogam olck onao orkh orya osge osma ougr palm pauc pcun pelm perm phag
phli phlp phlv phnx piqd plrd prti psin ranj rjng rohg roro runr samr sara sarb saur sgnw shaw shrd shui sidd sidt sind
sinh sogd sogo sora soyo sund sunu sylo syrc syre syrj syrn tagb takr tale talu taml tang tavt tayo telu teng tfng tglg
thaa thai tibt tirh tnsa todr tols toto tutg ugar vaii visp vith wara wcho wole xpeo xsux yezi yiii zanb zinh zmth zsye
zsym zxxx zyyy zzzz
"""
_VARIANTS = "rom zaw zg"  # CC-100 and OPUS write these where other codes have a script
# The regions of ISO 3166-1, then others that corpora use: former and unofficial ones, and XX for none.
_REGIONS = """
ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bl bm bn bo bq br bs bt bv bw by bz ca cc cd
cf cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg eh er es et fi fj fk fm fo fr ga gb gd ge gf
gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh ki km kn
kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc md me mf mg mh mk ml mm mn mo mp mq mr ms mt mu mv mw mx my mz na
nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pl pm pn pr ps pt pw py qa re ro rs ru rw sa sb sc sd se sg sh si
sj sk sl sm sn so sr ss st sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug um us uy uz va vc ve vg vi
vn vu wf ws ye yt za zm zw
an cs dd eu su tp uk xk xx yu zr zz
"""
# A language code, with `_` or `-` between its parts. The region may be a number (es_419) or repeat the language
# (en_EN).
_CODE = re.compile(
    r"(?P<language>[a-z]{2,3})"
    rf"(?:[-_](?P<script>(?i:{'|'.join(f'{_SCRIPT_CODES} {_VARIANTS}'.split())})))?"
    rf"(?:[-_](?P<region>(?i:{'|'.join(_REGIONS.split())}|(?P=language))|[0-9]{{3}}))?"
)


# Script name -> its code in ISO 15924, and the languages written in it. Languages without an entry are written in
# Latin.
_SCRIPT_TABLE: dict[str, tuple[str, str]] = {
    "Arabic": ("arab", "ar fa ku ps sd ug ur"),
    "Armenian": ("armn", "hy"),
    "Bengali": ("beng", "as bn"),
    "Cyrillic": ("cyrl", "be bg bs kk ky mk mn ru sr uk uz"),
    "Devanagari": ("deva", "hi mr ne sa"),
    "Ethiopic": ("ethi", "am om"),
    "Georgian": ("geor", "ka"),
    "Greek": ("grek", "el"),
    "Gujarati": ("gujr", "gu"),
    "Gurmukhi": ("guru", "pa"),
    "Han": ("hani", "ja ko zh-Hans zh-Hant"),
    "Hangul": ("hang", "ko"),
    "Hebrew": ("hebr", "he yi"),
    "Kana": ("kana", "ja"),
    "Kannada": ("knda", "kn"),
    "Khmer": ("khmr", "km"),
    "Lao": ("laoo", "lo"),
    "Malayalam": ("mlym", "ml"),
    "Myanmar": ("mymr", "my my_zaw"),
    "Oriya": ("orya", "or"),
    "Sinhala": ("sinh", "si"),
    "Tamil": ("taml", "ta"),
    "Telugu": ("telu", "te"),
    "Thai": ("thai", "th"),
    "Latin": ("latn", "bs kk ku om sr uz"),
}


def scripts_of(language: str) -> tuple[str, ...]:
    """Names of the scripts in which a language (CC-100's code) is written."""
    return tuple(name for name, (_, languages) in _SCRIPT_TABLE.items() if language in languages.split()) or ("Latin",)


def cc100_code(code: str) -> str:
    """CC-100's spelling of a language code. Raises ValueError for an unknown code. If the code's language is known, the
    error suggests a similar code."""
    key = code.lower().replace("-", "_")
    if key in _CANONICAL:
        return _CANONICAL[key]
    language = key.partition("_")[0]
    cc100 = _CANONICAL.get(language, "")  # the code of the language without script and region; empty if unknown
    if cc100 and (match := _CODE.fullmatch(key)):
        script, region = match["script"], match["region"]
        usual_script = script is None or script in [_SCRIPT_TABLE[name][0] for name in scripts_of(cc100)]
        for spelling in (
            f"{language}_{script}",
            f"{cc100}_{script}",
            f"{cc100.partition('-')[0]}_{region}" if usual_script else "",
        ):
            if spelling in _CANONICAL:
                return _CANONICAL[spelling]
        if usual_script:  # a region that the tables do not list does not change the language
            return cc100
    # Suggest only codes of this language: nearly any two or three letters are the code of some other language.
    spellings = [spelling for spelling in _CANONICAL if cc100 and spelling.split("_")[0] == language]
    similar = [_CANONICAL[spelling] for spelling in difflib.get_close_matches(key, spellings, n=1, cutoff=0.0)]
    advice = f"did you mean {similar[0]!r}?" if similar else "write one of CC-100 or ISO 639, such as de or zh-Hant"
    raise ValueError(f"unknown language code {code!r}: {advice}")


def all_listed(codes: Sequence[str]) -> bool:
    """True if this file lists all of these codes. In a code that it does not list, such as en_ca, the part after `_`
    may be a country or a second language."""
    return all(code.lower().replace("-", "_") in _CANONICAL for code in codes)


@lru_cache(100_000)
def is_code(text: str) -> bool:
    """True if a text has the form of a language code of ISO 639, with or without a script and a region."""
    return _CODE.fullmatch(text) is not None


def may_be_pair(code: str) -> bool:
    """True if a code could also be a pair of languages, as `de_en` and `en_ca` could. `en_CA` and `pt_br` could not."""
    first, _, second = code.replace("-", "_").partition("_")
    return second in CC100_LANGUAGES and _CANONICAL.get(first, second) != second and not all_listed([code])


def language_of(code: str) -> str:
    """CC-100's spelling of a language code (`cc100_code`). For a language that CC-100 does not have, its ISO 639 code,
    with the script if the code has one: `qu`, `gsw-Latn`.

    Raises ValueError for a text that is no code, and for a language of CC-100 in a script that is not its own.
    """
    match = _CODE.fullmatch(code)
    if not match or match["language"] in _LANGUAGE_PARTS or (match["script"] or "") in _VARIANTS.split():
        return cc100_code(code)
    return match["language"] + (f"-{match['script'].title()}" if match["script"] else "")


def english_first(languages: Sequence[str]) -> tuple[str, ...]:
    """Sort languages as the name of a pair lists them: English first, then alphabetically."""
    return tuple(sorted(languages, key=lambda code: (code != "en", code)))


# Ranges of code points (first, last) in Unicode 15 that hold the letters of the 100 languages' scripts.
_RANGES: dict[str, tuple[tuple[int, int], ...]] = {
    "Latin": (
        (0x41, 0x5A),
        (0x61, 0x7A),
        (0xAA, 0xAA),
        (0xBA, 0xBA),
        (0xC0, 0xD6),
        (0xD8, 0xF6),
        (0xF8, 0x2AF),
        (0x1E00, 0x1EFF),
        (0xFF21, 0xFF5A),
    ),
    "Greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "Cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "Armenian": ((0x531, 0x58A), (0xFB13, 0xFB17)),
    "Hebrew": ((0x591, 0x5F4), (0xFB1D, 0xFB4F)),
    "Arabic": ((0x620, 0x65F), (0x66E, 0x6EF), (0x6FA, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF), (0xFB50, 0xFEFC)),
    "Devanagari": ((0x900, 0x963), (0x970, 0x97F), (0xA8E0, 0xA8FF)),
    "Bengali": ((0x980, 0x9E3), (0x9F0, 0x9FF)),
    "Gurmukhi": ((0xA00, 0xA65), (0xA70, 0xA7F)),
    "Gujarati": ((0xA80, 0xAE5), (0xAF0, 0xAFF)),
    "Oriya": ((0xB00, 0xB65), (0xB70, 0xB7F)),
    "Tamil": ((0xB80, 0xBE5),),
    "Telugu": ((0xC00, 0xC65),),
    "Kannada": ((0xC80, 0xCE5),),
    "Malayalam": ((0xD00, 0xD65), (0xD7A, 0xD7F)),
    "Sinhala": ((0xD80, 0xDE5), (0xDF2, 0xDF4)),
    "Thai": ((0xE01, 0xE3A), (0xE40, 0xE4E)),
    "Lao": ((0xE80, 0xECE), (0xEDC, 0xEDF)),
    "Myanmar": ((0x1000, 0x103F), (0x1050, 0x108F), (0x109A, 0x109F), (0xA9E0, 0xA9FE), (0xAA60, 0xAA7F)),
    "Georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF), (0x2D00, 0x2D2D)),
    "Ethiopic": ((0x1200, 0x135F), (0x1380, 0x138F), (0x2D80, 0x2DDE), (0xAB01, 0xAB2E)),
    "Khmer": ((0x1780, 0x17D3),),
    "Hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97C), (0xAC00, 0xD7FB), (0xFFA0, 0xFFDC)),
    "Kana": ((0x3041, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "Han": (
        (0x3005, 0x3007),
        (0x3100, 0x312F),
        (0x3400, 0x4DBF),
        (0x4E00, 0x9FFF),
        (0xF900, 0xFAFF),
        (0x20000, 0x323AF),
    ),
}
SCRIPTS = tuple(_RANGES)


@cache
def script_numbers() -> np.ndarray:
    """A uint8 table with an entry for each code point: 1 + the script's index in SCRIPTS for a letter of one of
    SCRIPTS, 0 for any other character."""
    table = np.zeros(0x110000, np.uint8)
    for number, ranges in enumerate(_RANGES.values(), 1):
        for first, last in ranges:
            table[[code_point for code_point in range(first, last + 1) if chr(code_point).isalpha()]] = number
    return table


@cache
def _letter_numbers() -> np.ndarray:
    """`script_numbers`, and numbers for the letters outside its ranges: 1 + the index in SCRIPTS if the letter's name
    begins with the script (LATIN LETTER SMALL CAPITAL A), else 1 + the number of SCRIPTS. Modifier letters there, and
    the micro sign, stay 0: many scripts share them."""
    numbers = script_numbers().copy()
    for code_point in np.flatnonzero(numbers == 0).tolist():
        character = chr(code_point)
        if unicodedata.category(character) in ("Lu", "Ll", "Lt", "Lo") and character != "\N{MICRO SIGN}":
            script = unicodedata.name(character, "TANGUT").split()[0].title()  # Python has no names for Tangut letters
            numbers[code_point] = 1 + (SCRIPTS.index(script) if script in SCRIPTS else len(SCRIPTS))
    return numbers


def count_letters(lines: Sequence[str], scripts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns two int64 arrays with an entry for each line: the number of its letters that belong to `scripts`, and the
    number of all its letters, without signs such as ʻ. No line may be empty, because `reduceat` has no empty sums."""
    numbers = _letter_numbers()[np.frombuffer("".join(lines).encode("utf-32-le"), np.uint32)]
    is_wanted = np.zeros(len(SCRIPTS) + 2, bool)
    is_wanted[[1 + SCRIPTS.index(script) for script in scripts]] = True
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    starts = np.cumsum(lengths) - lengths
    in_scripts, is_letter = is_wanted[numbers], numbers > 0
    return np.add.reduceat(in_scripts, starts, dtype=np.int64), np.add.reduceat(is_letter, starts, dtype=np.int64)
