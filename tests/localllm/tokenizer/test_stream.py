"""The stream decoder compared with decoding the whole text."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings, strategies as st

from localllm.errors import TokenizerError, UsageError
from localllm.tokenizer import Tokenizer
from localllm.tokenizer.stream import StreamDecoder, _StopStrings
from tests.helpers.vocabularies import (
    CONTROL,
    FakeFile,
    bpe_metadata,
    real_tokenizer,
    spm_metadata,
    tiny_spm_pieces,
)

PIECES = [("▁", -1.0), ("a", -2.0), ("b", -3.0), ("▁a", -4.0), ("ab", -5.0), ("▁漢字", -6.0), ("STOP", -7.0)]


@functools.cache
def spm() -> Tokenizer:
    return Tokenizer.from_gguf(FakeFile(spm_metadata(tiny_spm_pieces(PIECES))))


@functools.cache
def bpe() -> Tokenizer:
    merges = [("Ġ", "a"), ("a", "b"), ("ð", "Ł")]  # the last is half an emoji
    return Tokenizer.from_gguf(FakeFile(bpe_metadata(merges, [("<|im_end|>", CONTROL)])))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False)


def feed(decoder: StreamDecoder, ids: list[int]) -> list[str]:
    return [*(decoder.feed(token) for token in ids), decoder.finish()]


@settings(max_examples=150)
@given(st.data(), st.sampled_from([spm, bpe]), st.booleans(), st.booleans())
def test_the_parts_make_up_the_decoded_text(data: st.DataObject, make: object, special: bool, more: bool) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=20))
    parts = feed(StreamDecoder(tokenizer, special=special, continuation=more), ids)
    assert "".join(parts) == tokenizer.decode(ids, special=special, continuation=more)


@settings(max_examples=100)
@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")),
    st.sampled_from([spm, bpe]),
)
def test_text_comes_in_whole_characters(text: str, make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    parts = feed(StreamDecoder(tokenizer), ids_of(tokenizer, text))
    assert "".join(parts) == text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_half_a_character_waits_for_the_other_half() -> None:
    tokenizer = bpe()
    ids = ids_of(tokenizer, "🙂!")
    assert feed(StreamDecoder(tokenizer), ids) == ["", "", "🙂", "!", ""]
    # An incomplete character shows as one replacement character, at the end or before other text.
    assert feed(StreamDecoder(tokenizer), ids[:2]) == ["", "", "\ufffd"]
    assert feed(StreamDecoder(tokenizer), [*ids[:2], *ids_of(tokenizer, "a")]) == ["", "", "\ufffda", ""]


def test_special_tokens_are_shown_only_on_request() -> None:
    tokenizer = bpe()
    ids = tokenizer.encode("a<|im_end|>b", parse_special=True)
    assert feed(StreamDecoder(tokenizer), ids) == ["a", "", "b", ""]
    assert feed(StreamDecoder(tokenizer, special=True), ids) == ["a", "<|im_end|>", "b", ""]


def test_the_space_that_encoding_adds_is_removed_once() -> None:
    tokenizer = spm()
    a = ids_of(tokenizer, "a")  # "▁a"
    assert feed(StreamDecoder(tokenizer), [1, *a, *a]) == ["", "a", " a", ""]
    assert feed(StreamDecoder(tokenizer, continuation=True), [*a, *a]) == [" a", " a", ""]


# --- stop strings


def cut_at_first(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Apply the rule to a whole text: the earliest stop string; among several at one position the shortest."""
    for begin in range(len(text)):
        found = [stop for stop in stops if text.startswith(stop, begin)]
        if found:
            return text[:begin], min(found, key=len)
    return text, None


@settings(max_examples=300)
@given(
    st.text("ab 漢", max_size=20),
    st.lists(st.text("ab 漢", min_size=1, max_size=6), max_size=4),
    st.sampled_from([spm, bpe]),
)
def test_stop_strings_are_independent_of_token_boundaries(text: str, stops: list[str], make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    expected, stop = cut_at_first(text, stops)
    decoder = StreamDecoder(tokenizer, stops)
    seen = ""
    for part in feed(decoder, ids_of(tokenizer, text)):
        seen += part
        assert expected.startswith(seen)  # no part of a stop string was ever shown
    assert (seen, decoder.stopped) == (expected, stop)


@settings(max_examples=300)
@given(
    st.lists(st.text("ab", max_size=5), max_size=10),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_text_is_released_as_early_as_it_is_certain(chunks: list[str], stops: list[str]) -> None:
    """Only text that a later token could turn into a stop string is held back."""
    finder = _StopStrings(stops)
    endings = ["", *(stop[i:] for stop in stops for i in range(1, len(stop)))]
    text = seen = ""
    for chunk in chunks:
        text += chunk
        seen += finder.feed(chunk, final=False)
        assert seen == min((cut_at_first(text + ending, stops)[0] for ending in endings), key=len)
    assert seen + finder.feed("", final=True) == cut_at_first(text, stops)[0]


@pytest.mark.parametrize(
    ("end", "expected"),
    [("d", ("x", "abcd")), ("e", ("xa", "bc")), ("", ("xa", "bc"))],
)
def test_the_earliest_of_overlapping_stop_strings_wins(end: str, expected: tuple[str, str]) -> None:
    decoder = StreamDecoder(bpe(), ["bc", "abcd"])
    ids = [id_ for letter in "xabc" + end for id_ in ids_of(bpe(), letter)]
    assert ("".join(feed(decoder, ids)), decoder.stopped) == expected


def test_only_a_possible_stop_string_is_held_back() -> None:
    tokenizer = bpe()
    decoder = StreamDecoder(tokenizer, ["<end>", "\n\n"])
    assert feed(decoder, ids_of(tokenizer, "x<en<e\ny\n")) == [
        "x",
        "",
        "",
        "",
        "<en",
        "",
        "<e",
        "\ny",
        "",
        "\n",
    ]
    assert decoder.stopped is None


def test_nothing_comes_after_a_stop_string() -> None:
    tokenizer = bpe()
    decoder = StreamDecoder(tokenizer, "bb")  # one string is one stop string, not two letters
    b = ids_of(tokenizer, "b")[0]
    assert [decoder.feed(token) for token in [*ids_of(tokenizer, "x "), b, b, b]] == ["x", " ", "", "", ""]
    assert decoder.stopped == "bb"
    assert decoder.finish() == ""


def test_a_stop_string_completed_by_the_last_flush_still_stops() -> None:
    tokenizer = bpe()
    decoder = StreamDecoder(tokenizer, ["\ufffd"])
    assert feed(decoder, [*ids_of(tokenizer, "a"), ids_of(tokenizer, "🙂")[0]]) == ["a", "", ""]
    assert decoder.stopped == "\ufffd"


@pytest.mark.parametrize("stops", [[""], ["a", ""], ""])
def test_empty_stop_strings_are_refused(stops: list[str] | str) -> None:
    with pytest.raises(UsageError, match="stop string is empty"):
        StreamDecoder(bpe(), stops)


def test_ids_out_of_range_are_refused() -> None:
    with pytest.raises(TokenizerError, match="not a token id"):
        StreamDecoder(bpe()).feed(10**6)


@pytest.mark.parametrize("name", ["llama-bpe", "llama-spm", "qwen2"])
def test_real_vocabularies_stream_as_they_decode(name: str) -> None:
    tokenizer = real_tokenizer(f"vocab/ggml-vocab-{name}.gguf")
    text = "Once upon a time, 🙂👩‍👩‍👧 met 漢字 and  naïve café.\n\tThe END\r\n"
    ids = ids_of(tokenizer, text)
    parts = feed(StreamDecoder(tokenizer), ids)
    assert "".join(parts) == text
    assert "".join(feed(StreamDecoder(tokenizer, ["naïve c"]), ids)) == text.partition("naïve c")[0]
