"""A checkpoint's tokenizer and chat template as GGUF's keys.

``tokenizer.model`` (sentencepiece) and ``tokenizer.jsonl`` (PLaMo) take precedence over ``tokenizer.json``, which has
byte-level BPE, WordPiece, Unigram, or BPE with sentencepiece's spaces. Scores of the last kind are computed from the
order of merges.
"""

from __future__ import annotations

import unicodedata
import warnings
from ast import literal_eval
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from localllm.chat.template import ChatTemplate
from localllm.convert.config import Config
from localllm.convert.settings import read_file, read_json
from localllm.errors import LocalLLMError, TokenizerError, path_text, quoted
from localllm.gguf.writer import read_back
from localllm.nesting import parse_json
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizer, TokenizerWarning
from localllm.tokenizer.vocabulary import BPE, END_TEXTS, PLAMO, RWKV, SPM, UNIGRAM, WORD_PIECE, TokenType

#: GGUF's names of special tokens, by Hugging Face's.
_SPECIAL = {
    "bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "sep": "seperator_token_id",
    "pad": "padding_token_id", "cls": "cls_token_id", "mask": "mask_token_id",
}  # fmt: skip

#: Settings of tokenizer_config.json that change tokens and have no key in GGUF files, with the values that change
#: nothing. Other settings change no tokens, or transformers also reads them from the tokenizer's file.
_MEANT: dict[str, tuple[Any, ...]] = {"split_special_tokens": (False,), "sp_model_kwargs": ({},)}

#: Text that each kind of pre-tokenizer splits differently.
_PROBE = (
    "Hello  world!\n\n\n   It's we'RE I'll   1234567 x1y22z333 3.14159 \t\ttabs  \r\n  camelCaseWord HTTPServer "
    "naïve café e\u0301te\u0301 Привет, мир你好世界こんにちは안녕하세요 नमस्ते ١٢٣٤٥ 12345678901 "
    "(a[b]{c})<d>/e\\f #$%^&*_+-=~`| foo_bar--baz...  'Quoted' \"text\" …—“x” 🚀🙂👍🏽"
    " \n \n\t x\n/y/\r\n\n//z   \n end   "
    "it'so we'rev             nine 'tis 'llama 'Velo <sentinel:12> IMGIMGABCZ 1234\u0303 ..., ?! (12) end"
)


#: `_PROBE` in Unicode's normal form, which GGUF's pre-tokenizers expect.
_TEXT = unicodedata.normalize("NFC", _PROBE)


def vocabulary_keys(folder: Path, config: Config, n_vocab: int) -> dict[str, Any]:
    """Return the keys ``tokenizer.*`` for a model whose embedding has ``n_vocab`` rows.

    Raises:
        TokenizerError: the tokenizer is missing, damaged or unsupported.
    """
    try:
        return _keys(folder, config, n_vocab)
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError) as error:
        raise TokenizerError(
            f"the tokenizer of {path_text(folder)} is damaged ({type(error).__name__}: {error!s:.100}): "
            "download it again"
        ) from error


def _keys(folder: Path, config: Config, n_vocab: int) -> dict[str, Any]:
    settings, json = read_json(folder / "tokenizer_config.json"), read_json(folder / "tokenizer.json")
    if "added_tokens_decoder" not in settings:  # as in transformers, files of that time have the names of tokens here
        settings |= read_json(folder / "special_tokens_map.json")
    for name, harmless in _MEANT.items():
        if (value := settings.get(name)) is not None and value not in harmless:
            raise TokenizerError(
                f"tokenizer_config.json has {name} = {quoted(value)}, for which GGUF files have no key: remove it "
                "from tokenizer_config.json if it changes no tokens, or report the model"
            )
    added = _added_tokens(settings, json, read_json(folder / "added_tokens.json"))
    is_wrong = bool(json) and _has_wrong_pre_tokenizer(read_json(folder / "config.json"), settings, json)
    if (folder / "tokenizer.model").is_file():
        keys = _sentencepiece(folder / "tokenizer.model", added, n_vocab)
    elif (folder / "tokenizer.jsonl").is_file():
        keys = _plamo(folder / "tokenizer.jsonl", n_vocab)
    elif (folder / _RWKV_FILE).is_file():
        # config.json has the ids of other tokens for BOS and EOS.
        return _rwkv(folder / _RWKV_FILE, n_vocab) | _templates(folder, settings)
    elif not json:
        raise TokenizerError(f"{path_text(folder)} has no tokenizer.model or tokenizer.json: download them")
    elif json["model"]["type"] == "WordPiece":
        keys = _word_piece(json, added)
    elif json["model"]["type"] == "Unigram":
        keys = _unigram(folder / "tokenizer.json", json, added, n_vocab)
    else:
        keys = _bpe(folder / "tokenizer.json", json, added, n_vocab, is_wrong)
    if type(n_types := config.get("type_vocab_size")) is int:
        keys["tokenizer.ggml.token_type_count"] = n_types
    tokens = keys["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    for name, key in _SPECIAL.items():
        text = _token_text(settings.get(f"{name}_token"))
        token = None if text is None else ids.get(text)
        token = config.get(f"{name}_token_id") if token is None else token
        if type(token) is int and 0 <= token < len(tokens):
            keys[f"tokenizer.ggml.{key}"] = token
    ends = _end_ids(folder, config, len(tokens))
    if ends:
        keys.setdefault("tokenizer.ggml.eos_token_id", ends[0])
    for name, other in (("bos", "cls"), ("eos", "seperator")):
        if (token := keys.get(f"tokenizer.ggml.{other}_token_id")) is not None:
            keys.setdefault(f"tokenizer.ggml.{name}_token_id", token)
        flag = settings.get(f"add_{name}_token")
        if isinstance(flag, bool):
            keys.setdefault(f"tokenizer.ggml.add_{name}_token", flag)
    if isinstance(settings.get("add_prefix_space"), bool) and keys["tokenizer.ggml.model"] == SPM:
        keys["tokenizer.ggml.add_space_prefix"] = settings["add_prefix_space"]
    keys = _with_ends(keys | _templates(folder, settings), ends)
    _check_text(folder, keys, is_wrong)
    return keys


def _plamo(path: Path, n_vocab: int) -> dict[str, Any]:
    """Return the keys of PLaMo's tokenizer. Each line of its file is a list: text, score, type, …"""
    lines = (read_file(path) or b"").decode().splitlines()
    entries = [parse_json(line) for line in lines if line.strip()]
    kinds = {"UNKNOWN": TokenType.UNKNOWN, "CONTROL": TokenType.CONTROL, "BYTE": TokenType.BYTE}
    tokens, scores = [str(entry[0]) for entry in entries], [float(entry[1]) for entry in entries]
    types = [
        TokenType.CONTROL
        if token.startswith("<|plamo:") and token.endswith("|>") and kind not in kinds
        else kinds.get(kind, TokenType.NORMAL)
        for token, kind in zip(tokens, (entry[2] if len(entry) > 2 else "NORMAL" for entry in entries), strict=True)
    ]
    n = n_vocab - len(tokens)
    return {
        "tokenizer.ggml.model": PLAMO,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(1, n + 1)],
        "tokenizer.ggml.scores": np.array(scores + [-1000.0] * n, np.float32),
        "tokenizer.ggml.token_type": np.array([*types, *[TokenType.UNUSED] * n], np.int32),
        "tokenizer.ggml.eot_token_id": 4,  # <|plamo:op|>, as in llama.cpp's converter
    }


#: Name of the file with RWKV's tokenizer.
_RWKV_FILE = "rwkv_vocab_v20230424.txt"


def _rwkv(path: Path, n_vocab: int) -> dict[str, Any]:
    """Return the keys of RWKV's tokenizer. Each line of its file has an id, a literal of Python and a length."""
    tokens = ["<s>"]
    for number, line in enumerate((read_file(path) or b"").decode().split("\n")):
        parts = line.split(" ")
        if line:
            try:
                value = literal_eval(" ".join(parts[1:-1]))
                token = value.encode() if isinstance(value, str) else bytes(value)
                is_right = (int(parts[0]), int(parts[-1])) == (len(tokens), len(token))
            except (SyntaxError, ValueError, TypeError) as error:
                raise TokenizerError(
                    f"{path_text(path)}: line {number + 1} is not a token: download it again"
                ) from error
            if not is_right:
                raise TokenizerError(f"{path_text(path)}: line {number + 1} has a wrong number: download it again")
            tokens.append(repr(token)[2:-1])
    n = len(tokens)
    types = [TokenType.CONTROL] + [TokenType.NORMAL] * (n - 1) + [TokenType.UNUSED] * (n_vocab - n)
    return {
        "tokenizer.ggml.model": RWKV,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(n, n_vocab)],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        **{f"tokenizer.ggml.{name}_token_id": 0 for name in ("bos", "eos")},
        # A turn ends with an empty line, as in llama.cpp's converter.
        **({"tokenizer.ggml.eot_token_id": tokens.index(r"\n\n")} if r"\n\n" in tokens else {}),
    }


def _check_text(folder: Path, keys: Mapping[str, Any], is_wrong: bool) -> None:
    """Raise TokenizerError if the converted and the original tokenizer encode text differently.

    PLaMo's tokenizer has no library to compare with.
    """
    if keys["tokenizer.ggml.model"] == PLAMO:
        return
    path = folder / "tokenizer.model"
    if path.is_file():
        expected = _read_sentencepiece(path).encode(_TEXT)
    else:
        path = folder / "tokenizer.json"
        expected = _read_tokenizer(path, is_wrong).encode(_TEXT, add_special_tokens=False).ids
    tokenizer = Tokenizer.from_gguf(SimpleNamespace(path=path, metadata=read_back(path, keys, ())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TokenizerWarning)  # characters that neither tokenizer can spell
        ids = tokenizer.encode(_TEXT, add_special=False)
    if ids == expected:
        return
    n = next((i for i, (one, other) in enumerate(zip(ids, expected, strict=False)) if one != other), len(ids))
    remedy = "update localllm, or report the model"
    if path.name == "tokenizer.model" and (folder / "tokenizer.json").is_file():
        remedy = "remove it, so that localllm converts tokenizer.json"
    raise TokenizerError(
        f"{path_text(path)} normalizes or splits text in a way that GGUF files have no key for: after "
        f"{quoted(tokenizer.decode(ids[:n])[-20:])}, its next token is {quoted(expected[n : n + 1])} instead of "
        f"{quoted(ids[n : n + 1])}; {remedy}"
    )


def _end_ids(folder: Path, config: Config, n_tokens: int) -> list[int]:
    """Return the tokens that end a reply, as generation_config.json and config.json list them."""
    lists = [read_json(folder / "generation_config.json").get("eos_token_id"), config.get("eos_token_id")]
    flat = [token for each in lists for token in (each if isinstance(each, list) else [each])]
    return list(dict.fromkeys(token for token in flat if type(token) is int and 0 <= token < n_tokens))


def _with_ends(keys: dict[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    """Return the keys with every token that ends a reply.

    These are ``ends`` and the token after a reply in the chat template. llama.cpp recognises some by their text and
    reads two others from keys. ``eos_token_ids`` lists all.
    """
    eos = keys.get("tokenizer.ggml.eos_token_id")
    after = _end_of_turn(keys)
    ids = list(dict.fromkeys(token for token in (eos, after, *ends) if token is not None))
    others = [token for token in ids if token != eos]
    if not others:
        return keys
    texts = keys["tokenizer.ggml.tokens"]
    unknown = [token for token in others if texts[token] not in END_TEXTS]
    slots = zip(("eot_token_id", "eom_token_id"), unknown, strict=False)
    return keys | {f"tokenizer.ggml.{slot}": token for slot, token in slots} | {"tokenizer.ggml.eos_token_ids": ids}


def _end_of_turn(keys: Mapping[str, Any]) -> int | None:
    """Return the control token that the chat template writes after a reply, or None."""
    template, texts = keys.get("tokenizer.chat_template"), keys["tokenizer.ggml.tokens"]
    if not isinstance(template, str):
        return None
    special = {"bos": "", "eos": ""}
    for name in special:
        if (token := keys.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            special[name] = texts[token]
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": _REPLY}]
    try:
        compiled = ChatTemplate(template, bos_token=special["bos"], eos_token=special["eos"])
        after = compiled.render(messages, add_generation_prompt=False).rpartition(_REPLY)[2].lstrip()
    except LocalLLMError:  # a template that needs more than a conversation
        return None
    types = keys["tokenizer.ggml.token_type"]
    controls = {text: i for i, text in enumerate(texts) if types[i] in (TokenType.CONTROL, TokenType.USER_DEFINED)}
    text = max((text for text in controls if text and after.startswith(text)), key=len, default=None)
    return None if text is None or text in _MESSAGE_ENDS else controls[text]


#: A reply that does not occur in any template.
_REPLY = "localllm-reply"
#: Tokens that end one of several messages in a reply (gpt-oss); the reply then continues.
_MESSAGE_ENDS = ("<|end|>",)


def _token_text(token: Any) -> str | None:
    """Return the text of a special token in the tokenizer's settings."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _added_tokens(
    settings: Mapping[str, Any], json: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[int, tuple[str, bool]]:
    """Return text and specialness of added tokens by id. Special tokens are not recognised in a user's text."""
    names = [value for name, value in settings.items() if name.endswith("_token")]
    names += settings.get("additional_special_tokens") or ()
    special = {_token_text(token) for token in names}
    found = {i: (text, text in special) for text, i in plain.items() if type(i) is int}
    listed = [(entry.get("id"), entry) for entry in json.get("added_tokens") or () if isinstance(entry, dict)]
    listed += list((settings.get("added_tokens_decoder") or {}).items())
    for i, entry in listed:
        if str(i).isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            found[int(str(i))] = (entry["content"], bool(entry.get("special")))
    return found


def _looks_special(text: str) -> bool:
    """Return whether a token looks special, because some files do not mark special tokens."""
    brackets = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        text.startswith(first) and text.endswith(last) for first, last in brackets
    )


def _with_added(
    tokens: list[str], types: list[TokenType], scores: list[float], added: Mapping[int, tuple[str, bool]]
) -> dict[str, Any]:
    for i, (text, is_special) in added.items():
        if i < len(tokens):
            is_control = is_special or _looks_special(text)
            types[i] = TokenType.CONTROL if is_control else TokenType.USER_DEFINED
            tokens[i] = text if is_control else text.replace("\u2581", " ")
            scores[i] = -1000.0
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [int(kind) for kind in types]}


def _sentencepiece(path: Path, added: Mapping[int, tuple[str, bool]], n_vocab: int) -> dict[str, Any]:
    model = _read_sentencepiece(path)
    n = min(len(model), n_vocab)
    kinds: list[tuple[Callable[[int], bool], TokenType]] = [
        (model.is_unknown, TokenType.UNKNOWN), (model.is_control, TokenType.CONTROL),
        (model.is_unused, TokenType.UNUSED), (model.is_byte, TokenType.BYTE),
    ]  # fmt: skip
    tokens = [model.id_to_piece(i) for i in range(n)] + [f"[PAD{i}]" for i in range(n, n_vocab)]
    scores = [model.get_score(i) for i in range(n)] + [-10_000.0] * (n_vocab - n)
    types = [next((kind for is_kind, kind in kinds if is_kind(i)), TokenType.NORMAL) for i in range(n)]
    keys = _with_added(tokens, [*types, *[TokenType.UNUSED] * (n_vocab - n)], scores, added)
    head = {"tokenizer.ggml.model": SPM, "tokenizer.ggml.pre": "default"}
    prefix = {"tokenizer.ggml.add_space_prefix": model.encode("a", out_type=str)[:1] != ["a"]}
    return head | keys | prefix | {"tokenizer.ggml.scores": [float(score) for score in scores]}


def _read_sentencepiece(path: Path) -> Any:
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_proto=read_file(path) or b"")
    except (RuntimeError, OSError) as error:
        raise TokenizerError(f"{path_text(path)} is not a sentencepiece model: download it again") from error


def _word_piece(json: Mapping[str, Any], added: Mapping[int, tuple[str, bool]]) -> dict[str, Any]:
    """Return WordPiece's keys. Tokens at the start of a word get sentencepiece's space, others lose their ``##``."""
    special = {text for text, is_special in added.values() if is_special}
    texts = sorted(json["model"]["vocab"], key=json["model"]["vocab"].__getitem__)
    normalizer = json.get("normalizer") or {}
    keys: dict[str, Any] = {
        "model": WORD_PIECE, "pre": "default",
        "tokens": [t if t in special else t[2:] if t.startswith("##") else "\u2581" + t for t in texts],
        "token_type": [int(TokenType.CONTROL if text in special else TokenType.NORMAL) for text in texts],
        "normalizer.lowercase": bool(normalizer.get("lowercase")),
        "normalizer.strip_accents": normalizer.get("strip_accents"),
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def _unigram(
    path: Path, json: Mapping[str, Any], added: Mapping[int, tuple[str, bool]], n_vocab: int
) -> dict[str, Any]:
    """Return the keys of a Unigram tokenizer such as XLM-R's. Its handling of spaces is found by encoding some."""
    model, tokenizer = json["model"], _read_tokenizer(path)
    n = min(len(model["vocab"]), n_vocab)
    tokens = [text for text, _ in model["vocab"][:n]] + [f"[PAD{i}]" for i in range(n, n_vocab)]
    scores = [float(score) for _, score in model["vocab"][:n]] + [-10_000.0] * (n_vocab - n)
    keys = _with_added(tokens, [TokenType.NORMAL] * n + [TokenType.UNUSED] * (n_vocab - n), [*scores], added)
    keys["tokenizer.ggml.token_type"][model["unk_id"]] = int(TokenType.UNKNOWN)
    keys["tokenizer.ggml.unknown_token_id"] = model["unk_id"]
    normalizer = json.get("normalizer") or {}
    maps = [part.get("precompiled_charsmap") for part in (normalizer, *normalizer.get("normalizers", ()))]
    for charsmap in filter(None, maps):
        keys["tokenizer.ggml.precompiled_charsmap"] = np.frombuffer(b64decode(charsmap), np.uint8)
    once, twice = (tokenizer.encode(text, add_special_tokens=False) for text in ("a a", " a  a"))
    return keys | _added_around(tokenizer) | {
        "tokenizer.ggml.model": UNIGRAM, "tokenizer.ggml.pre": "default", "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": once.tokens[0].startswith("\u2581"),
        "tokenizer.ggml.remove_extra_whitespaces": once.ids == twice.ids,
    }  # fmt: skip


def _read_tokenizer(path: Path, is_wrong: bool = False) -> Any:
    """Return a tokenizer of the library ``tokenizers``. ``is_wrong``: see `_has_wrong_pre_tokenizer`."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(read_file(path) or b"")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library has no error type, and its panics are not an Exception
        raise TokenizerError(f"{path_text(path)} cannot be read ({error!s:.100}): download it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if is_wrong:
        tokenizer.pre_tokenizer = _with_bytes(PRE_TOKENIZERS["tekken"])
    return tokenizer


def _bpe(
    path: Path, json: Mapping[str, Any], added: Mapping[int, tuple[str, bool]], n_vocab: int, is_wrong: bool
) -> dict[str, Any]:
    """Return the keys of a BPE tokenizer. ``is_wrong``: see `_has_wrong_pre_tokenizer`."""
    model = json["model"]
    if model["type"] != "BPE":
        raise TokenizerError(
            f"{path_text(path)} is of the kind {quoted(model['type'])}: localllm converts BPE, Unigram and WordPiece"
        )
    tokens, types = [f"[PAD{i}]" for i in range(n_vocab)], [TokenType.UNUSED] * n_vocab
    for text, i in model["vocab"].items():
        if i < n_vocab:
            tokens[i], types[i] = text, TokenType.NORMAL
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    # Spaces inside a part would split it, so they are written as in byte-level BPE.
    joined = [" ".join(part.replace(" ", "\u0120") for part in merge) for merge in merges]
    tokenizer = _read_tokenizer(path, is_wrong)
    flags = _added_around(tokenizer)
    if _is_byte_level(json):
        head = {"tokenizer.ggml.model": BPE, "tokenizer.ggml.pre": _pre_tokenizer(path, tokenizer, model)}
        return head | _with_added(tokens, types, [0.0] * n_vocab, added) | {"tokenizer.ggml.merges": joined} | flags
    ranks = {"".join(merge): rank for rank, merge in reversed(list(enumerate(merges)))}
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = TokenType.BYTE
    unknown = model.get("unk_token")
    keys = _with_added(tokens, types, scores, added)
    if unknown in tokens:
        keys["tokenizer.ggml.token_type"][tokens.index(unknown)] = int(TokenType.UNKNOWN)
    head = {"tokenizer.ggml.model": SPM, "tokenizer.ggml.pre": "default"}
    prefix = {"tokenizer.ggml.add_space_prefix": tokenizer.encode("a", add_special_tokens=False).tokens[0] != "a"}
    return head | keys | {"tokenizer.ggml.scores": scores} | prefix | flags


def _is_byte_level(json: Mapping[str, Any]) -> bool:
    parts = [json.get("pre_tokenizer") or {}, json.get("decoder") or {}]
    kinds = [part.get("type") for part in parts for part in (part, *part.get("pretokenizers", ()))]
    return "ByteLevel" in kinds


def _added_around(tokenizer: Any) -> dict[str, Any]:
    """Return the keys for tokens that the tokenizer adds before and after a prompt."""
    inner = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    n_before = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
    behind = len(whole) > n_before + len(inner)
    return {"tokenizer.ggml.add_bos_token": n_before > 0, "tokenizer.ggml.add_eos_token": behind}


def _has_wrong_pre_tokenizer(config: Mapping[str, Any], settings: Mapping[str, Any], json: Mapping[str, Any]) -> bool:
    """Return whether transformers replaces the pre-tokenizer of tokenizer.json by Tekken's.

    It does so for ``fix_mistral_regex`` and the files that transformers 4 wrote for Mistral's models.
    """
    return bool(
        settings.get("fix_mistral_regex")
        and config.get("model_type") in ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
        and str(config.get("transformers_version") or "").partition(".")[0] in ("", "0", "1", "2", "3", "4")
        and len(json["model"]["vocab"]) > _MIN_TEKKEN
    )


#: transformers looks for a wrong pre-tokenizer if a vocabulary has more tokens.
_MIN_TEKKEN = 100_000


def _with_bytes(kind: PreTokenizer) -> Any:
    """Return a pre-tokenizer of the library ``tokenizers`` that splits words and writes them as bytes."""
    from tokenizers import pre_tokenizers

    from localllm.tokenizer.encoders import word_splitter

    return pre_tokenizers.Sequence(
        [word_splitter(kind), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _pre_tokenizer(path: Path, tokenizer: Any, model: Mapping[str, Any]) -> str:
    """Return the name of the first pre-tokenizer that splits `_PROBE` like this one."""
    text = tokenizer.normalizer.normalize_str(_PROBE) if tokenizer.normalizer else _PROBE
    wanted = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    whole_words = bool(model.get("ignore_merges"))
    for name in dict.fromkeys((*_USUAL, *PRE_TOKENIZERS)):
        kind = PRE_TOKENIZERS[name]
        if (
            not kind.is_raw
            and kind.ignore_merges == whole_words
            and _with_bytes(kind).pre_tokenize_str(text) == wanted
        ):
            return name
    raise TokenizerError(
        f"{path_text(path)} cuts words as no pre-tokenizer that localllm knows: update localllm, or report the model"
    )


#: Names preferred among equal pre-tokenizers.
_USUAL = ("llama-bpe", "gpt-2", "qwen2", "deepseek-v3", "starcoder", "gpt-4o", "glm4")


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template, and other templates by name.

    As in transformers, separate files (written since 4.52) take precedence over settings.
    """
    found = settings.get("chat_template")
    for file in ("chat_template.json", "processor_config.json"):
        found = found or read_json(folder / file).get("chat_template")
    named: Sequence[Any] = found if isinstance(found, list) else ()
    texts = {entry["name"]: entry["template"] for entry in named if {"name", "template"} <= set(entry)}
    if isinstance(found, str):
        texts["default"] = found
    files = [("default", folder / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    contents = {name: read_file(path) for name, path in files}
    texts |= {name: data.decode("utf-8", "replace") for name, data in contents.items() if data is not None}
    keys = {f"tokenizer.chat_template.{name}": text for name, text in texts.items() if name != "default"}
    if keys:
        keys["tokenizer.chat_templates"] = [name for name in texts if name != "default"]
    return keys | ({"tokenizer.chat_template": texts["default"]} if "default" in texts else {})
