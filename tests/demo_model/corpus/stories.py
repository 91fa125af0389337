"""Training stories from small plots written for the model, and matching requests.

`plots.txt` contains plots and lists of words.  A plot is `# name` and one paragraph per line, in the pattern language
of topics.py.  Names in braces get one value per story: the hero ({hero}, {Name}, {he}, {him}, {his}), the friend
({friend}, {Pal}, {he2}, {him2}, {his2}) and props ({toy}, {colour}, {place}, {food}, {skill}, {rope}).
"""

import random
import re
from pathlib import Path

from tests.demo_model.corpus.topics import read_lists, sample_pattern

PLOTS = Path(__file__).parent / "plots.txt"
_LISTS = read_lists(PLOTS)
ANIMALS, PEOPLE, THINGS = _LISTS["animals"], _LISTS["people"], _LISTS["things"]
GIRLS, BOYS = _LISTS["girls"], _LISTS["boys"]
FEMALE, MALE = frozenset(_LISTS["female"]), frozenset(_LISTS["male"])
PROPS = {name: _LISTS[name] for name in ("toy", "colour", "place", "food", "skill", "rope")}
# Words that differ between stories and stay the same within a story.
BOUND_WORDS = frozenset((*ANIMALS, *PEOPLE, *THINGS, *GIRLS, *BOYS, *PROPS["toy"], *PROPS["food"], *PROPS["colour"]))

OPENINGS = (
    "(Once upon a time|Once|Long ago|Once upon a time,|A long time ago) there was a {adjective}{hero} named {Name}.",
    "(Once upon a time there lived|In a house near {place} lived|Near {place} there lived) "
    "a {adjective}{hero}. {His} name was {Name}.",
    "{Name} was a {adjective}{hero} who lived near {place}.",
    "There once was a {adjective}{hero} (called|named) {Name}.",
)
ADJECTIVES = ("little ", "small ", "young ", "", "happy ", "clever ", "kind ", "curious ", "brave ", "funny ")

REQUESTS = (
    "(Tell|Write) me a (short |little |nice |small |)story about {a}.",
    "(Can|Could|Will|Would) you (please |)tell (me |us |)a (short |)story about {a}?",
    "(Please tell|Tell|Give|Write|Make up) (me |)a (short |)story (about|with|of) {a}(|, please).",
    "I (want|would like) (to hear |)a story about {a}.",
    "(Write|Invent|Make) a (short |little |)story about {a}.",
    "Do you know a story about {a}?",
    "A story about {a}(|, please|!)",
    "story about {a}",
    "Now (tell me |)a story about {a}.",
    "(Once more|Another one), but about {a}.",
)
PLAIN_REQUESTS = (
    "(Tell|Read) (me |us |)a (short |little |nice |bedtime |good |funny |)story(|, please)(.|!|)",
    "(Can|Could|Will|Would) you (please |)tell (me |us |)a (short |)story?",
    "(Please |)(tell|write|make up) (me |)(a|another|one more|some) (short |)story.",
    "I (want|would like) (to hear |)(a|another) story.",
    "(Write|Invent|Tell) a (short |little |)story(.|)",
    "(Another|One more) (one|story)(|, please)(.|!)",
    "Do you know (any stories|a story|a good story)?",
    "(story|a story|Story, please|Story time)(!|.|)",
    "(Tell|Read) me (something|a bedtime story|a tale|a fairy tale|a children's story).",
)


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def request_for(subjects: list[str], rng: random.Random) -> str:
    """Return a request for a story about the subjects ("a dog", "a cat named Tom"), or for any story."""
    if not subjects:
        return sample_pattern(rng.choice(PLAIN_REQUESTS), {}, rng)
    wanted = " and ".join(subjects)
    return sample_pattern(rng.choice(REQUESTS), {"a": [wanted]}, rng)


def read_plots() -> list[str]:
    """Return the plots as patterns whose paragraphs are lines."""
    plots: list[list[str]] = []
    for line in PLOTS.read_text(encoding="utf-8").splitlines():
        if re.fullmatch(r"# \w+", line):
            plots.append([])
        elif line and not line.startswith("#") and "} = " not in line:
            plots[-1].append(line)
    return ["\n".join(plot) for plot in plots]


def _pronouns(noun: str, rng: random.Random) -> tuple[dict[str, str], list[str]]:
    """Return pronouns for a character and matching names."""
    female = noun in FEMALE or (noun not in MALE and rng.random() < 0.5)
    if female:
        return {"he": "she", "him": "her", "his": "her"}, GIRLS
    return {"he": "he", "him": "him", "his": "his"}, BOYS


def written_story(plots: list[str], rng: random.Random) -> tuple[list[str], str]:
    """Return a story from a plot, with the subjects that a request for it may name."""
    group = rng.choices((ANIMALS, PEOPLE, THINGS), weights=(6, 2, 2))[0]
    hero, friend = rng.choice(group), rng.choice(ANIMALS)
    while friend == hero:
        friend = rng.choice(ANIMALS)
    words = {name: [rng.choice(choices)] for name, choices in PROPS.items()}
    hero_pronouns, hero_names = _pronouns(hero, rng)
    pal_pronouns, pal_names = _pronouns(friend, rng)
    # Heroes and friends have different names, so that the most likely story does not give both the same name.
    name = rng.choice(hero_names[: len(hero_names) // 2])
    pal = rng.choice(pal_names[len(pal_names) // 2 :])
    words |= {
        "hero": [hero],
        "friend": [friend],
        "Name": [name],
        "Pal": [pal],
        "adjective": [rng.choice(ADJECTIVES)],
    }
    for key, value in hero_pronouns.items():
        words[key], words[key.capitalize()] = [value], [value.capitalize()]
    for key, value in pal_pronouns.items():
        words[key + "2"], words[key.capitalize() + "2"] = [value], [value.capitalize()]
    plot = rng.choice(plots).replace("{Opening}", rng.choice(OPENINGS))
    story = sample_pattern(plot, words, rng)
    story = re.sub(r"\ba ([aeiou])", r"an \1", story)
    kind = rng.random()
    if kind < 0.5:
        subjects = [article(hero)]
    elif kind < 0.6:
        subjects = [f"{article(hero)} (named|called) {name}"]
    elif kind < 0.75:
        subjects = [article(hero), article(friend)]
    else:
        subjects = []
    return subjects, story
