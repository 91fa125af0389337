"""What can be done with a message that is selected."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

from textual import getters
from textual.screen import Screen

from localllm.tui.base_app import BaseApp
from localllm.tui.chat.conversation import Message
from localllm.tui.chat.session import ChatSession
from localllm.tui.screens.streaming import StreamedTurn
from localllm.tui.widgets.composer import Composer
from localllm.tui.widgets.message import MessageView
from localllm.tui.widgets.transcript import Transcript

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

    def hint(self, text: str) -> None:
        raise NotImplementedError

    def run_command(self, text: str) -> None:
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
        if action not in ("on_message", "branch", "step", "unfold"):
            return True
        view = self.selected
        if view is None:
            return False
        message, (number, n) = view.message, view.place.branch
        is_reply, is_busy = message.role == "assistant", self.turn is not None
        if action == "step":
            return not is_busy and 1 <= number + cast(int, parameters[0]) <= n
        if parameters == ("continue",):
            return not is_busy and message.can_go_on and view.place.is_last
        if action == "branch":
            return not is_busy and is_reply and not view.place.is_last
        if action == "unfold":
            return view.can_unfold
        if parameters == ("copy", "code"):
            return is_reply and "```" in message.text
        return parameters == ("copy",) or not is_busy

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

    def action_on_message(self, command: str, more: str = "") -> None:
        """Runs a command on the message that is selected."""
        if (view := self.selected) is not None:
            self.run_command(f"/{command} {view.place.number} {more}")

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

    def action_branch(self) -> None:
        """Has the next message go on from this one, beside what follows it now."""
        if (view := self.selected) is None:
            return
        id_ = view.message.id
        after = next((later for later in self.session.conversation.path() if later.parent == id_), None)
        self.replacing = None if after is None else after.id
        self.composer.empty()
        self.hint("A new branch: what you send goes on from the selected reply. Esc leaves it.")
        self.composer.focus()

    def action_step(self, by: int) -> None:
        if (view := self.selected) is not None:
            self.action_step_message(view.message.id, by)

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

    def action_unfold(self) -> None:
        if (view := self.selected) is not None:
            view.toggle()
