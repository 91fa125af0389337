"""Tokenizers of checkpoints: the converted vocabulary gives the ids of the original."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from localllm.convert.config import Config
from localllm.convert.vocabulary import _TEXT, vocabulary_keys
from localllm.errors import TokenizerError
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.encoders import word_splitter
from localllm.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.helpers.checkpoints import bytes_field, write_tokenizer

TEXTS = [
    "The quick brown fox jumps over 12345 lazy dogs.\n\n  It's 3.14, isn't it?  \tEND",
    "camelCaseWords naïve — “quoted” 你好世界 🙂\n",
    "   leading and trailing   ",
]
N_VOCAB = 600


def read(folder: Path, n_vocab: int = N_VOCAB, **config: Any) -> tuple[dict[str, Any], Tokenizer]:
    keys = vocabulary_keys(folder, Config(config), n_vocab)
    arrays = {key: np.array(keys[key]) for key in keys if key.endswith((".token_type", ".scores"))}
    return keys, Tokenizer.from_gguf(SimpleNamespace(path=folder, metadata=keys | arrays))


def byte_level(folder: Path, pre: str, *, bos: bool = False) -> tokenizers.Tokenizer:
    """Return a byte-level BPE tokenizer with a known pre-tokenizer."""
    kind = PRE_TOKENIZERS[pre]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=kind.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken("<|begin|>", special=True), AddedToken("<|end|>", special=True), AddedToken("<tool>")]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special[:2],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    tokenizer.add_tokens(special[2:])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


@pytest.mark.parametrize("pre", sorted(name for name, kind in PRE_TOKENIZERS.items() if not kind.is_raw))
def test_the_pre_tokenizer_is_recognised(pre: str, tmp_path: Path) -> None:
    """The pre-tokenizer's name, or another one with the same rules."""
    byte_level(tmp_path, pre)
    found = read(tmp_path)[0]["tokenizer.ggml.pre"]
    assert PRE_TOKENIZERS[found].ignore_merges == PRE_TOKENIZERS[pre].ignore_merges
    if pre not in ("bailingmoe", "bailingmoe2", "llada-moe"):  # these have Qwen 2's rules in other words
        assert PRE_TOKENIZERS[found].patterns == PRE_TOKENIZERS[pre].patterns


@pytest.mark.parametrize("bos", [False, True])
def test_byte_level_bpe(bos: bool, tmp_path: Path) -> None:
    original = byte_level(tmp_path, "llama-bpe", bos=bos)
    keys, tokenizer = read(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids
    assert len(keys["tokenizer.ggml.tokens"]) == N_VOCAB
    types = dict(zip(keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"], strict=True))
    assert [types[token] for token in ("<|begin|>", "<tool>", "[PAD599]", "Ġ")] == [3, 4, 5, 1]
    assert keys["tokenizer.ggml.eos_token_id"] == 1
    assert keys["tokenizer.ggml.add_bos_token"] is bos
    assert keys["tokenizer.chat_template"] == "{{ messages }}"


def test_bpe_with_sentencepieces_spaces(tmp_path: Path) -> None:
    """A tokenizer.json like those of Llama 2, Gemma and Mistral: spaces are U+2581, unknown characters are bytes."""
    alphabet = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    base = tokenizers.Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=False)
    base.train_from_iterator(
        TEXTS * 2, trainers.BpeTrainer(vocab_size=300, special_tokens=alphabet, show_progress=False)
    )
    model = json.loads(base.to_str())["model"]
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    whole = json.loads(base.to_str()) | {
        "model": model,
        "pre_tokenizer": None,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "added_tokens": [
            {"id": i, "content": alphabet[i], "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for i in range(3)
        ],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    keys, tokenizer = read(tmp_path, bos_token_id=1, eos_token_id=2)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids


@pytest.mark.parametrize("splits", [False, True])
def test_unigram(splits: bool, tmp_path: Path) -> None:
    """A tokenizer.json like XLM-R's, with SentencePiece's map of characters."""
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = space = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained.train_from_iterator(
        TEXTS * 2,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=made, vocab_size=100, hard_vocab_limit=False, minloglevel=2
    )
    charsmap = normalizers.Precompiled(bytes_field(bytes_field(made.getvalue(), 3), 2))
    merge = normalizers.Replace(Regex(" {2,}"), " ")
    trained.normalizer = charsmap if splits else normalizers.Sequence([charsmap, merge])
    if splits:
        trained.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    trained.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 2)])
    trained.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    keys, tokenizer = read(tmp_path, trained.get_vocab_size() + 2)
    assert keys["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 2, 1]
    assert keys["tokenizer.ggml.remove_extra_whitespaces"] is True
    for text in [*TEXTS, "a  b", "ﬁne ①"]:
        text = text if splits else text.rstrip()
        assert tokenizer.encode(text) == trained.encode(text).ids, text


def test_sentencepiece_with_added_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 298)
    decoder = {"297": {"content": "<|im_start|>"}, "298": {"content": "<tool>"}, "999": {"content": "<beyond>"}}
    settings = {"added_tokens_decoder": decoder, "eos_token": "<|im_start|>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    keys, tokenizer = read(tmp_path, 300, bos_token_id=1)
    assert keys["tokenizer.ggml.tokens"][297] == "<|im_start|>"
    assert [keys["tokenizer.ggml.token_type"][i] for i in (0, 1, 297, 4, 260, 298, 299)] == [2, 3, 3, 6, 1, 4, 5]
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 297)
    assert tokenizer.encode("the<tool>")[-1] == 298


def test_chat_templates_in_files_of_their_own(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 290)
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "from the processor"}))
    assert read(tmp_path)[0]["tokenizer.chat_template"] == "from the processor"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert read(tmp_path)[0]["tokenizer.chat_template"] == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert read(tmp_path)[0]["tokenizer.chat_template"] == "from jinja"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from settings"}))
    assert read(tmp_path)[0]["tokenizer.chat_template"] == "from jinja"
    named = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    keys = read(tmp_path)[0]
    assert (keys["tokenizer.chat_template"], keys["tokenizer.chat_template.rag"]) == ("from jinja", "b")
    assert keys["tokenizer.chat_template.tool_use"] == "c"
    assert keys["tokenizer.chat_templates"] == ["rag", "tool_use"]
    (tmp_path / "chat_template.jinja").unlink()
    assert read(tmp_path)[0]["tokenizer.chat_template"] == "a"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [1]}))
    with pytest.raises(TokenizerError, match="is damaged"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer.model or tokenizer.json"),
        ({"tokenizer.model": "no protocol buffer"}, "is not a sentencepiece model"),
        ({"tokenizer.json": '{"model": {"type": "WordLevel"}}'}, "is of the kind 'WordLevel'"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": [], "merges": []}}'}, "is damaged"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {}, "merges": [1]}}'}, "is damaged"),
        ({"tokenizer.json": '{"added_tokens": true}'}, "is damaged"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, "is damaged"),
    ],
)
def test_damaged_tokenizers_are_refused(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        read(tmp_path)


def test_word_pieces(tmp_path: Path) -> None:
    """A vocabulary like BERT's: tokens at the start of words get SentencePiece's space, others lose ``##``."""
    words = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "run": 4, "##ning": 5, "a": 6}
    added = [
        {"id": i, "content": text, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for text, i in words.items()
        if i < 4
    ]
    model = {"type": "WordPiece", "vocab": words, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    model["max_input_chars_per_word"] = 100
    normalizer = {"type": "BertNormalizer", "lowercase": True, "strip_accents": None}
    normalizer |= {"clean_text": True, "handle_chinese_chars": True}
    settings = {"model": model, "added_tokens": added, "normalizer": normalizer}
    settings["pre_tokenizer"] = {"type": "BertPreTokenizer"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "CLS", "SEP", "UNK")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    keys, tokenizer = read(tmp_path, 7, type_vocab_size=2)
    assert keys["tokenizer.ggml.tokens"] == ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "▁run", "ning", "▁a"]
    assert keys["tokenizer.ggml.token_type_count"] == 2
    assert tokenizer.encode("A RUNNING") == [1, 6, 4, 5, 2]


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_says_whether_texts_get_a_space_at_the_start(prefix: bool, tmp_path: Path) -> None:
    """Llama's models add one, Gemma's do not."""
    original = trained(tmp_path, model_type="bpe", add_dummy_prefix=prefix)
    keys, tokenizer = read(tmp_path, len(original))
    assert keys["tokenizer.ggml.add_space_prefix"] is prefix
    for text in TEXTS:
        assert tokenizer.encode(text, add_special=False) == original.encode(text)


def trained(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """Write a trained tokenizer.model, and return it."""
    with (folder / "tokenizer.model").open("wb") as file:
        options = {"byte_fallback": True, "normalization_rule_name": "identity"} | options
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*TEXTS, _TEXT] * 2), model_writer=file, vocab_size=480, hard_vocab_limit=False,
            remove_extra_whitespaces=False, minloglevel=2, **options,
        )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize(
    "options", [{"model_type": "unigram"}, {"model_type": "bpe", "normalization_rule_name": "nfkc_cf"}]
)
def test_sentencepiece_of_another_kind_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    original = trained(tmp_path, **options)
    with pytest.raises(TokenizerError, match="normalizes or splits text in a way that GGUF files have no key for"):
        read(tmp_path, len(original))
    byte_level(tmp_path, "gpt-2")
    with pytest.raises(TokenizerError, match=r"remove it, so that localllm converts tokenizer\.json"):
        read(tmp_path, len(original))


def test_a_normalizer_without_a_key_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path, "gpt-2")
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    read(tmp_path)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json normalizes or splits text"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({"fix_mistral_regex": True}, {"model_type": "mistral3", "transformers_version": "4.57.1"}, "tekken"),
        ({"fix_mistral_regex": True}, {"model_type": "mistral"}, "tekken"),
        ({"fix_mistral_regex": True}, {"model_type": "mistral3", "transformers_version": "5.0.0"}, "llama-bpe"),
        ({"fix_mistral_regex": True}, {"model_type": "llama", "transformers_version": "4.57.1"}, "llama-bpe"),
        ({"fix_mistral_regex": False}, {"model_type": "mistral3"}, "llama-bpe"),
        ({}, {"model_type": "mistral3"}, "llama-bpe"),
    ],
)
def test_mistrals_wrong_pre_tokenizer_is_replaced_as_in_transformers(
    settings: dict[str, Any], config: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    byte_level(tmp_path, "llama-bpe")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read(tmp_path)[0]["tokenizer.ggml.pre"] == "llama-bpe"  # transformers looks at large vocabularies only
    monkeypatch.setattr("localllm.convert.vocabulary._MIN_TEKKEN", 300)
    keys, tokenizer = read(tmp_path)
    assert keys["tokenizer.ggml.pre"] == expected
    words = tokenizers.pre_tokenizers.Sequence([word_splitter(PRE_TOKENIZERS[expected])]).pre_tokenize_str(TEXTS[0])
    assert tokenizer.encode(TEXTS[0]) == [i for word, _ in words for i in tokenizer.encode(word)]


def test_special_tokens_of_old_files(tmp_path: Path) -> None:
    """special_tokens_map.json counts if tokenizer_config.json lists no added tokens."""
    write_tokenizer(tmp_path, 290)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[A]": 295, "[B]": 296}))
    map_ = {"eos_token": {"content": "[A]"}, "additional_special_tokens": ["[A]"], "bos_token": "<s>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(map_))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    keys = read(tmp_path, 300)[0]
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.bos_token_id"]) == (295, 1)
    assert [keys["tokenizer.ggml.token_type"][i] for i in (295, 296)] == [3, 4]
    settings = {"eos_token": "</s>", "added_tokens_decoder": {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert read(tmp_path, 300)[0]["tokenizer.ggml.eos_token_id"] == 2
