"""A declared option appears in help, on the command line, in the settings file and in the chat's form."""

from __future__ import annotations

import inspect
import re

import pytest

import localllm
from localllm import UsageError
from localllm.cli.argument_types import reader
from localllm.cli.parser import command_names, parser_of
from localllm.kernels.graph import CACHE_TYPES
from localllm.options.declared import CheckedOptions, LoadOptions, Sampling, declared, default_text, flags_of
from localllm.options.keywords import SamplingOptions
from localllm.options.settings import KEYS, SAMPLING_KEYS
from localllm.tui.chat.settings import READERS


@pytest.mark.parametrize(
    ("cls", "documented"),
    [(LoadOptions, localllm.load), (Sampling, localllm.Sampling), (CheckedOptions, localllm.Options)],
)
def test_help_describes_every_option_with_its_default(cls: type, documented: object) -> None:
    text = str(documented.__doc__)
    assert text == inspect.cleandoc(text)  # equal on all Python versions
    described = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w|^$|\Z)", text, re.MULTILINE | re.DOTALL))
    for name, option in declared(cls).items():
        words = " ".join(described[name].split())
        assert option.brief in words
        assert default_text(cls, name) in words


def test_options_are_declared_as_type_checkers_know_them() -> None:
    own = set(localllm.Options.__annotations__) - set(SamplingOptions.__annotations__)
    assert own == {*declared(CheckedOptions), "logits_processor"}  # another name of processors


@pytest.mark.parametrize("cls", [LoadOptions, Sampling, CheckedOptions])
def test_flags_set_the_option_of_their_name(cls: type) -> None:
    parsers = parser_of("serve"), parser_of("generate")
    actions = {flag: action for parser in parsers for action in parser._actions for flag in action.option_strings}
    flags = {flag: name for name, option in declared(cls).items() for flag in flags_of(name, option)}
    assert flags
    for flag, name in flags.items():
        assert actions[flag].dest == name
        assert declared(cls)[name].brief in str(actions[flag].help)
        if name not in ("stop", "ignore_eos", "post_sampling_probs", "cpu_moe", "override_tensor"):
            assert f"(default: {default_text(cls, name)})" in str(actions[flag].help)


#: Flags whose destination is an option, with a description different from the option's.
_OTHER_FLAGS = {
    "cache_type": {"--cache-type-k", "--cache-type-v", "-ctk", "-ctv"},
    "chat_template": {"--chat-template"},
    "dry_sequence_breakers": {"--dry-sequence-breaker"},
    "grammar": {"--grammar-file"},
    "json_schema": {"--json-schema-file", "-jf"},
    "logit_bias": {"--logit-bias", "-l"},
    "logprobs": {"--logprobs"},
    "mmproj": {"--no-mmproj"},
    "parallel": {"--parallel", "-np"},
    "speculate": {"--lookup"},
    "tool_grammar": {"--tool-grammar"},
}


@pytest.mark.parametrize("command", command_names())
def test_a_flag_with_an_options_destination_sets_that_option(command: str) -> None:
    """Flags set the option with the name of their destination, so no other flag may use such a name."""
    options = {name: each for cls in (LoadOptions, Sampling, CheckedOptions) for name, each in declared(cls).items()}
    for action in parser_of(command)._actions:
        if action.dest in options:
            allowed = {*flags_of(action.dest, options[action.dest]), *_OTHER_FLAGS.get(action.dest, ())}
            assert {*action.option_strings} <= allowed, action.dest


def test_what_is_kept_is_in_the_settings_file_and_numbers_in_the_chat() -> None:
    kept = {name for name, option in declared(LoadOptions).items() if option.is_setting}
    assert kept == {"device", "n_gpu_layers", "tensor_split", "split_mode", "context", "threads", "cache_type"}
    assert kept < KEYS.keys()
    asked = {"logit_bias", "logprobs", "post_sampling_probs", "processors", "json_schema", "regex", "grammar"}
    assert declared(Sampling).keys() - SAMPLING_KEYS.keys() == asked
    assert {name for name, option in declared(Sampling).items() if option.label} <= READERS.keys()
    assert SAMPLING_KEYS.keys() - READERS.keys() == {"dry_sequence_breakers"}


def test_words_of_a_range_name_what_it_has() -> None:
    for type_ in CACHE_TYPES:
        assert repr(type_) in declared(LoadOptions)["cache_type"].kind.words
    with pytest.raises(
        UsageError, match=r"^n_gpu_layers is -1, but must be .* at least 0, or None \(the largest number that fits\)$"
    ):
        LoadOptions(n_gpu_layers=-1)
    patterns = "(", "a{99999999999999999999}", "(" * 5000 + ")" * 5000
    for rule in (*(f"{pattern}=CPU" for pattern in patterns), "exps=CUDA" + "9" * 5000):
        with pytest.raises(UsageError, match=r"^override_tensor is .*, but must be rules such as 'exps=CPU'"):
            LoadOptions(override_tensor=rule)
    with pytest.raises(UsageError, match=r"^parallel is 0, but must be a whole number from 1 .*, or None \("):
        LoadOptions(parallel=0)
    with pytest.raises(UsageError, match=r"^context is a number of very many digits, but must be a whole number"):
        LoadOptions(context=10**5000)


def test_minus_one_means_unset_for_optional_values() -> None:
    for cls in (LoadOptions, Sampling):
        for option in declared(cls).values():
            if option.kind.parse is int and option.none:
                assert reader(option)("-1") is None
