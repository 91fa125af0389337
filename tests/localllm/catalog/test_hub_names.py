"""Names on the hub, and the files that they mean."""

from __future__ import annotations

import pytest

from localllm.catalog.hub_names import FileGroup, HubName, choose, group_files, label
from localllm.errors import UsageError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/repo", HubName("org/repo")),
        ("org/repo:Q4_K_M", HubName("org/repo", "Q4_K_M")),
        ("Org-1/a_b.C-GGUF:sub/m.gguf", HubName("Org-1/a_b.C-GGUF", "sub/m.gguf")),
        ("hf.co/org/repo:Q4_K_M", HubName("org/repo", "Q4_K_M")),
        ("https://huggingface.co/org/repo", HubName("org/repo")),
        ("https://www.huggingface.co/org/repo/tree/main", HubName("org/repo")),
        ("https://huggingface.co/org/repo/resolve/main/sub/m.gguf?download=true", HubName("org/repo", "sub/m.gguf")),
        ("hf://org/repo/m.gguf", HubName("org/repo", "m.gguf")),
        ("https://huggingface.co/org", None),
        ("https://example.com/org/repo", None),
        ("models/model.gguf", None),
        ("./org/repo", None),
        ("../repo", None),
        ("/org/repo", None),
        ("~/repo", None),
        ("org/repo/more", None),
        ("repo", None),
        ("C:/repo", None),
        ("org/repo:", None),
        ("org\\repo", None),
        ("é/repo", None),
    ],
)
def test_what_is_a_name_and_what_a_path(text: str, name: HubName | None) -> None:
    assert HubName.parse(text) == name
    if name is not None and "hf" not in text and "hugging" not in text:
        assert str(name) == text


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat.q4_0.gguf", "Q4_0"),
        ("m-IQ4_XS.gguf", "IQ4_XS"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("m.BF16.gguf", "BF16"),
        ("m-f16.gguf", "F16"),
        ("m_Q8_0.gguf", "Q8_0"),
        ("Q5_K_M/m-00001-of-00002.gguf", "Q5_K_M"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("Qwen2-0.5B.gguf", None),
        ("phi-4.gguf", None),
        ("m-F16-to-Q4_0.gguf", "Q4_0"),
        ("Q8_0/m-Q4_0.gguf", "Q4_0"),
        ("q4all.gguf", None),
    ],
)
def test_the_quantisation_in_a_name(file: str, quant: str | None) -> None:
    assert FileGroup((file,), 1).quant == quant


FILES = {
    "README.md": 10,
    "m-Q4_K_M.gguf": 4_000_000_000,
    "m-Q8_0-00002-of-00002.gguf": 3,
    "m-Q8_0-00001-of-00002.gguf": 5,
    "m-UD-Q4_K_XL.gguf": 70,
    "sub/m-IQ4_NL.gguf": 9,
    "mmproj-m-F16.gguf": 6,
    "m.imatrix.gguf": 6,
    "m-Q6_K-00001-of-00003.gguf": 1,
}


def test_parts_are_one_model_and_what_is_beside_models_is_none() -> None:
    groups = {label(group, group_files(FILES)): group for group in group_files(FILES)}
    assert set(groups) == {"Q4_K_M", "Q8_0", "UD-Q4_K_XL", "IQ4_NL", "Q6_K"}
    assert groups["Q8_0"] == FileGroup(("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"), 8, 2)
    assert groups["Q8_0"].stem == "m-Q8_0"
    assert {name for name, group in groups.items() if not group.is_complete} == {"Q6_K"}


@pytest.mark.parametrize(
    ("choice", "first"),
    [
        (None, "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", "m-Q8_0-00001-of-00002.gguf"),
        ("M-Q8_0-00002-OF-00002.GGUF", "m-Q8_0-00001-of-00002.gguf"),
        ("m-Q8_0.gguf", "m-Q8_0-00001-of-00002.gguf"),
        ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"),
        ("ud-q4_k_xl", "m-UD-Q4_K_XL.gguf"),
        ("sub/m-IQ4_NL.gguf", "sub/m-IQ4_NL.gguf"),
        ("m-IQ4_NL", "sub/m-IQ4_NL.gguf"),
    ],
)
def test_choosing(choice: str | None, first: str) -> None:
    assert choose(HubName("org/repo", choice), group_files(FILES), "org/repo").names[0] == first


@pytest.mark.parametrize("choice", ["Q4_K", "4_K_M", "Q4", "NL", "gguf", "Q4_NL", ".*"])
def test_a_part_of_a_word_chooses_nothing(choice: str) -> None:
    with pytest.raises(UsageError) as raised:
        choose(HubName("org/repo", choice), group_files(FILES), "the hub")
    assert str(raised.value).startswith(f"the hub has no {choice!r}: there are org/repo:Q4_K_M (4.00 GB), ")


def test_several_that_fit_are_listed() -> None:
    groups = group_files({"a-Q8_0.gguf": 2_000_000, "b-Q8_0.gguf": 1, "c-Q4_0.gguf": 1})
    with pytest.raises(UsageError) as raised:
        choose(HubName("org/repo", "q8_0"), groups, "the hub")
    assert str(raised.value) == (
        "'q8_0' fits 2 models of the hub: choose one, org/repo:a-Q8_0.gguf (2.00 MB), org/repo:b-Q8_0.gguf (0.00 MB)"
    )
    with pytest.raises(UsageError, match="the hub has 3 models: choose one, "):
        choose(HubName("org/repo"), groups, "the hub")
    only = group_files({"x.gguf": 1})
    assert choose(HubName("org/repo"), only, "the hub") is only[0]
    with pytest.raises(UsageError, match=r"no GGUF file: choose a repository of .*: localllm convert org/repo$"):
        choose(HubName("org/repo"), [], "the hub")
