r"""Pre-tokenizers: how each kind of byte-level BPE vocabulary splits text into words before merging.

``tokenizer.ggml.pre`` names the kind. Each kind is a list of regular expressions in Oniguruma syntax, for the
``tokenizers`` library. The first one splits the text into its matches and the gaps between them, the next one splits
these pieces, and so on. Merges never cross a split.

Sources: the ``pre_tokenizer`` sections of the models' ``tokenizer.json`` files, and the names and expressions in
llama.cpp (``src/llama-vocab.cpp``). Where llama.cpp only approximates the original, because its engine has no Unicode
classes inside brackets, the original is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm.errors import quoted, warn


class TokenizerWarning(UserWarning):
    """The file's tokenizer is not fully known, so texts may be split differently than in training."""


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split words."""

    patterns: tuple[str, ...]  # regular expressions, applied in order
    ignore_merges: bool = False  # a word in the vocabulary is one token, regardless of merges
    add_bos: bool = False  # default of ``add_bos_token``
    # Tokens are plain characters instead of GPT-2's characters for bytes. An unknown character becomes its UTF-8
    # bytes, which are tokens such as ``<0x0A>``.
    is_raw: bool = False
    space: str = " "  # replacement of a space if ``is_raw``; empty: white space is removed
    unsplit: str = ""  # ``ignore_merges`` applies to words of only these characters


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_NEWLINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS_AND_SPACES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SYMBOLS_AND_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
)

# OpenAI's o200k family: a word is capitals followed by small letters, so "camelCase" is two words.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS_AND_SLASHES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_NEWLINES_AND_SPACES}"
_TEKKEN = rf"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*|\p{{N}}|{_SYMBOLS_AND_SLASHES}"
_CASED_WORDS = rf"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
_GPT4O = rf"{_CASED_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SLASHES}"
_YOUTU = rf"{_CASED_WORDS}|\p{{N}}|{_SYMBOLS_AND_SLASHES}"
_UPPER_NO_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER_NO_HAN = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_K2 = (
    rf"[\p{{Han}}]+|{_PREFIX}{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_CONTRACTIONS}?"
    rf"|{_PREFIX}{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}"
)

_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_DEEPSEEK3_WORDS = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3_MAIN = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_NEWLINES_AND_SPACES}"
_SPARK_MAIN = rf"{_DEEPSEEK3_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CJK, _DEEPSEEK3_MAIN)
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

# Cased letters of Unicode, as listed by DeepSeek-LLM.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    # The original is \s+$. The look-behind prevents an attempt at each space of a long run.
    r"(?<!\s)\s+$",
    _HAN_AND_HANGUL,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")

# Groups of three digits from the right. The originals look ahead to the end of the number at each group, which takes
# quadratic time. One look-ahead, at the first digit, splits at the same positions.
_DIGIT_GROUPS = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}"
_SUPERBPE = (r"\p{N}+", r"(?<!\d)\d{1,2}(?=(?:\d{3})+(?!\d))|\d{3}")  # was (?=(\d{3})+(?!\d))
_TINY_AYA = (  # was \d{1,3}(?=(?:\d{3})*\b): a number that runs into a letter is not grouped
    r"(?<!\d)\d++\b",
    r"\A\d{1,2}(?=(?:\d{3})+\z)|\G\d{3}",
    _GPT4O,
)
_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)

# The original's \s*[\r\n]+ scans to the end of a run of spaces at each split. Here it scans at most 4096 characters.
_JAIS2 = (
    rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|(?:(?>[^\S\r\n]{0,4096})[\r\n]++)++"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)"
    r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_NEWLINES_AND_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)

DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_LINES = (r"[^\n]+|\n+",)
GEMMA4 = PreTokenizer(_LINES, add_bos=True, is_raw=True, space="\u2581", unsplit="\n")

_KINDS: list[tuple[PreTokenizer, str]] = [
    (DEFAULT, "default"),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_JAIS2,)), "jais-2"),
    (PreTokenizer(_DEEPSEEK_LLM), "deepseek-llm"),
    (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    (PreTokenizer(_DEEPSEEK3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreTokenizer((r"\p{N}{1,3}", _CJK, _SPARK_MAIN, r"\p{N}")), "spark2_5"),
    (
        PreTokenizer(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b"
                "\uff0c\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK,
                _YOUTU,
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")), "falcon"),
    (PreTokenizer((r"\p{N}", _GPT2)), "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2"),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum modern-bert exaone4 "
        "jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe",
    ),
    (PreTokenizer((_QWEN2,)), "qwen2 stablelm2 hunyuan megrez deepseek-r1-qwen kormo f2llmv2 solar-open grok-2"),
    (PreTokenizer((_QWEN35,)), "qwen35"),
    (PreTokenizer((_BLOOM,)), "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer(_CHAMELEON, add_bos=True), "chameleon"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((_GPT4O,), ignore_merges=True), "granite-embed-multi-97m"),
    (PreTokenizer(_TINY_AYA), "tiny_aya cohere2moe"),
    (PreTokenizer((_KIMI_K2,)), "kimi-k2"),
    (PreTokenizer(_SUPERBPE), "superbpe"),
    (PreTokenizer((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_SEED_CODER,)), "seed-coder"),
    (PreTokenizer((rf"{_LETTERS}|\p{{N}}|{_SYMBOLS_AND_SPACES}",)), "ufakzeka"),
    (PreTokenizer((_DIGIT_GROUPS, _ASIAN_SCRIPTS, _DEEPSEEK3_MAIN)), "afmoe"),
    (PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
    (PreTokenizer((_EXAONE_MOE,)), "exaone-moe"),
    (
        PreTokenizer(
            (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}+|{_SYMBOLS_AND_SPACES}"), ignore_merges=True
        ),
        "minicpm5",
    ),
    (GEMMA4, "gemma4 granite-embed-multi-311m"),
    (PreTokenizer(_LINES, is_raw=True, space="\u2581"), "sarvam-moe"),
    (PreTokenizer((r"\s+",), is_raw=True, space=""), "whitespace"),
]

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: pre_tokenizer for pre_tokenizer, names in _KINDS for name in names.split()
}
"""Pre-tokenizer by ``tokenizer.ggml.pre`` name."""


def warn_if_unknown(name: str | None, file_name: str) -> None:
    """Warn if the pre-tokenizer ``name`` of the file ``file_name`` is unknown, so that the default one is used."""
    if name in PRE_TOKENIZERS:
        return
    fault = "names no pre-tokenizer" if name is None else f"uses the unknown pre-tokenizer {quoted(name)}"
    warn(
        f"{file_name} {fault} (tokenizer.ggml.pre): falling back to 'default', so texts may be split differently "
        "than in training and answers may be worse; a newer conversion of the model may help",
        TokenizerWarning,
    )
