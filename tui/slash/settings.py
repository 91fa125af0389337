"""Slash commands on how replies are generated, and by which model."""

from __future__ import annotations

import shlex

from localllm.errors import UsageError
from localllm.sampling import Sampling
from localllm.tui.chat import settings as chat_settings
from localllm.tui.slash.frontend import Frontend


def system(front: Frontend, argument: str) -> None:
    if argument:
        front.session.set_system("" if argument == "none" else argument)
    front.say(f"system prompt: {front.session.conversation.system or 'none'}")


def set_(front: Frontend, argument: str) -> None:
    settings = front.session.conversation.settings
    name, *rest = argument.split(maxsplit=1) or [""]
    if rest:
        settings = chat_settings.with_setting(settings, name, rest[0])
        front.session.set_options(settings)
    elif name:
        chat_settings.with_setting(settings, name, "default")  # complains where there is none
    defaults = vars(Sampling())
    wanted = [chat_settings.full_name(name)] if name else list(chat_settings.READERS)
    lines = []
    for each in wanted:
        value = settings.get(each, defaults.get(each, "default"))
        lines.append(f"{each:<20} {_value(value)}{'' if each in settings else '  (default)'}")
    front.say("\n".join(lines))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else f"{value}"


def prefix(front: Frontend, argument: str) -> None:
    if argument:
        _change(front, "reply_prefix", "default" if argument == "none" else argument)
    front.say(f"replies begin with: {front.session.conversation.settings.get('reply_prefix') or 'nothing given'}")


def stop_strings(front: Frontend, argument: str) -> None:
    session = front.session
    if argument:
        try:
            texts = [] if argument == "none" else shlex.split(argument)
        except ValueError:
            raise UsageError(
                'a quotation mark is open: give texts in quotes, as in /stop-strings "###" "User:"'
            ) from None
        rest = {name: value for name, value in session.conversation.settings.items() if name != "stop"}
        session.set_options({**rest, "stop": texts} if texts else rest)
    stop = session.conversation.settings.get("stop") or []
    front.say("replies end before: " + (", ".join(map(repr, stop)) or "nothing given"))


def _change(front: Frontend, name: str, text: str) -> None:
    front.session.set_options(chat_settings.with_setting(front.session.conversation.settings, name, text))


def model(front: Frontend, argument: str) -> None:
    if argument:
        front.use_model(argument)
    elif front.session.model is None:
        front.say("no model is loaded: /model FILE loads one")
    else:
        info = front.session.model.info
        front.say(f"{info.name or info.path.name}: {info.path}, {info.context:,} tokens of context")


def stats(front: Frontend, argument: str) -> None:
    used, context = front.session.meter()
    lines = [f"context {used:,} / {context:,} tokens ({used / max(1, context):.0%})"]
    if (stats := front.session.last) is not None:
        lines.append(
            f"last prompt {stats.prompt_tokens:,} tokens: {stats.cached_tokens:,} cached, "
            f"{stats.prefilled_tokens:,} evaluated"
        )
        lines.append(
            f"last reply {stats.new_tokens:,} tokens: the first after {stats.first_token_s:.2f} s, "
            f"then {stats.rate:.1f} tok/s, by {stats.model}"
        )
    front.say("\n".join(lines))
