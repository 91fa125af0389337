"""What can be done with a message that is selected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import cast

from textual import getters
from textual.screen import Screen

from localllm.errors import UsageError
from localllm.tui.base_app import BaseApp
from localllm.tui.chat.conversation import Message
from localllm.tui.chat.events import Turn
from localllm.tui.chat.session import ChatSession
from localllm.tui.screens.dialogs import Choose, confirm
from localllm.tui.screens.streaming import StreamedTurn
from localllm.tui.text import CodeBlock, code_blocks
from localllm.tui.widgets.composer import Composer
from localllm.tui.widgets.message import MessageView
from localllm.tui.widgets.transcript import Transcript

_ON_A_MESSAGE = ("edit", "regenerate", "branch", "step", "continue_reply", "copy", "copy_code", "unfold", "delete")


#: Seconds that selecting waits for what was just sent to be drawn.
_DRAWN_SECONDS = 0.5


class MessageActions(Screen[None]):
    """The part of a `ChatScreen` that keys on a message call."""

    app = getters.app(BaseApp)
    session: ChatSession
    turn: StreamedTurn | None
    transcript: Transcript
    composer: Composer
    replacing: str | None

    def begin(self, start: Callable[[Turn], None]) -> None:
        raise NotImplementedError

    def hint(self, text: str) -> None:
        raise NotImplementedError

    async def refresh_all(self) -> None:
        raise NotImplementedError

    @property
    def selected(self) -> MessageView | None:
        """The message that is selected; None if the editor has the focus."""
        focused = self.focused
        nodes = () if focused is None else focused.ancestors_with_self
        return next((node for node in nodes if isinstance(node, MessageView)), None)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys for what cannot be done are not shown."""
        if action not in _ON_A_MESSAGE:
            return True
        view = self.selected
        if view is None:
            return False
        message, (number, n) = view.message, view.place.branch
        is_reply, is_busy = message.role == "assistant", self.turn is not None
        if action == "step":
            return not is_busy and 1 <= number + cast(int, parameters[0]) <= n
        if action == "continue_reply":
            return not is_busy and message.can_go_on and view.place.is_last
        if action == "branch":
            return not is_busy and is_reply and not view.place.is_last
        if action == "unfold":
            return view.can_unfold
        if action == "copy_code":
            return is_reply and "```" in message.text
        return action == "copy" or not is_busy

    # -- Selecting -------------------------------------------------------------------------------------------------

    def action_select(self, by: int) -> None:
        """Selects the message before or after; from the editor, the last one."""
        self.app.ask(self._select(by), group="select")

    async def _select(self, by: int) -> None:
        if (
            self.turn is not None and not self.turn.has_ended
        ):  # what was just sent may take the place of what is there
            with suppress(TimeoutError):
                await asyncio.wait_for(self.turn.is_drawn.wait(), _DRAWN_SECONDS)
        views = self.transcript.views
        view = self.selected
        if not views:
            return
        at = len(views) if view is None else views.index(view)
        place = at + by
        if place >= len(views):
            self.action_compose_message()
        elif place < 0:
            self.action_show_earlier()
        else:
            self.transcript.release_anchor()
            views[place].focus()

    def action_select_first(self) -> None:
        """Selects the first message that is drawn, and draws earlier ones where there are any."""
        views = self.transcript.views
        if views:
            views[0].focus()
            self.action_show_earlier()

    def action_show_earlier(self) -> None:
        self.app.spawn(self.transcript.show_earlier(), group="earlier")

    def action_compose_message(self) -> None:
        self.transcript.follow()
        self.composer.focus()

    def action_scroll_page(self, by: int) -> None:
        if by < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    # -- Doing -----------------------------------------------------------------------------------------------------

    @property
    def _picked(self) -> Message:
        view = self.selected
        assert view is not None  # else `check_action` lets no key through
        return view.message

    def action_edit(self) -> None:
        self.edit(self._picked)

    def edit(self, message: Message) -> None:
        """Puts a message into the editor; what is sent next takes its place, as another branch."""
        self.replacing = message.id
        self.composer.put(message.text)
        what = (
            "your message"
            if message.role == "user"
            else f"the reply; {self.app.key_of('continue')} continues it then"
        )
        is_kept = self.session.conversation.was_replied_to(message.id)
        stays = "keeps the old one as a branch" if is_kept else "sends it"
        self.hint(f"Editing {what}: Enter {stays}, Esc leaves it.")
        self.composer.focus()

    def action_regenerate(self) -> None:
        start = partial(self.session.regenerate, self._picked.id)
        self.composer.focus()
        self.begin(start)

    def action_branch(self) -> None:
        """Has the next message go on from this one, beside what follows it now."""
        id_ = self._picked.id
        after = next((later for later in self.session.conversation.path() if later.parent == id_), None)
        self.replacing = None if after is None else after.id
        self.composer.empty()
        self.hint("A new branch: what you send goes on from the selected reply. Esc leaves it.")
        self.composer.focus()

    def action_step(self, by: int) -> None:
        self.action_step_message(self._picked.id, by)

    def action_step_message(self, id_: str, by: int) -> None:
        """For clicks."""
        self.app.ask(self.step(id_, by), group="step")

    async def switch(self, id_: str) -> None:
        """Goes to the branch that a message is in."""
        await self.app.offload(self.session.switch, id_)
        await self.refresh_all()

    async def step(self, id_: str, by: int) -> None:
        """Goes to another branch, and selects the message there."""
        session = self.session
        parent = session.conversation[id_].parent
        await self.app.offload(session.step, id_, by)
        await self.refresh_all()
        there = next((m.id for m in session.conversation.path() if m.parent == parent), "")
        if (view := self.transcript.view(there)) is not None:
            self.transcript.release_anchor()
            view.focus()

    def action_continue_reply(self) -> None:
        self.composer.focus()
        self.begin(self.session.continue_reply)

    def action_copy(self) -> None:
        self.copy_message(self._picked)

    def copy_message(self, message: Message) -> None:
        """Puts what was said on the clipboard."""
        self.app.copy_to_clipboard(message.content)
        self.app.notify(f"copied {len(message.content):,} characters")

    def action_copy_code(self) -> None:
        self.app.ask(self.copy_code(self._picked, None), group="copy")

    async def copy_code(self, message: Message, number: int | None) -> None:
        """Puts a block of code on the clipboard: the one of a number, from 1, or one that is chosen.

        Raises:
            UsageError: there is none.
        """
        blocks = await self.app.offload(code_blocks, message.content)
        if not blocks:
            raise UsageError("there is no block of code in this message")
        if number is None and len(blocks) > 1:
            labels = [(str(i), _label(i, block)) for i, block in enumerate(blocks, 1)]
            chosen = await self.app.push_screen_wait(Choose("Copy which block?", "", labels))
            if chosen is None:
                return
            number = int(chosen)
        number = 1 if number is None else number
        if not 1 <= number <= len(blocks):
            raise UsageError(f"there are {len(blocks)} blocks of code: give a number from 1 to {len(blocks)}")
        block = blocks[number - 1]
        self.app.copy_to_clipboard(block.text)
        n_lines = len(block.text.splitlines())
        self.app.notify(f"copied {n_lines:,} line{'s' * (n_lines != 1)} of code")

    def action_unfold(self) -> None:
        if (view := self.selected) is not None:
            view.toggle()

    def action_delete(self) -> None:
        self.app.ask(self.delete_asked(self._picked), group="delete")

    async def delete_asked(self, message: Message) -> None:
        """Deletes a message and what follows it, if that is meant."""
        text = "It goes for good, and so does all that follows it."
        if await self.app.push_screen_wait(confirm("Delete this message?", text, "Delete")) == "yes":
            await self.app.offload(self.session.delete, message.id)
            await self.refresh_all()
            self.composer.focus()


def _label(number: int, block: CodeBlock) -> str:
    lines = block.text.splitlines() or [""]
    size = f"{len(lines):,} line{'s' * (len(lines) != 1)}"
    return f"{number}  {block.language or 'text'}, {size}: {lines[0].strip():.50}"
