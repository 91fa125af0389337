"""Conversations are trees: every operation keeps the tree valid and the path within it."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from localllm.errors import UsageError
from localllm.tui.chat.conversation import ChatMessage, Conversation
from tests.helpers.fake_chat import leaves


def texts(messages: list[ChatMessage]) -> list[str]:
    return [message.text for message in messages]


def talk(*words: str) -> Conversation:
    conversation = Conversation()
    for i, word in enumerate(words):
        conversation.add("assistant" if i % 2 else "user", word)
    return conversation


def test_the_path_leads_to_the_leaf() -> None:
    conversation = talk("a", "b", "c")
    assert texts(conversation.path()) == ["a", "b", "c"]
    assert conversation.leaf == conversation.path()[-1]
    assert texts(conversation.path(conversation.path()[1].id)) == ["a", "b"]
    assert Conversation().path() == []
    assert Conversation().leaf is None


def test_a_branch_reopens_at_its_last_message() -> None:
    conversation = talk("a", "b", "c")
    a, b, c = conversation.path()
    second = conversation.add_sibling(c.id, "c2")
    conversation.switch(c.id)
    conversation.add_sibling(b.id, "B")
    conversation.switch(b.id)
    assert conversation.leaf == c
    conversation.switch(second.id)
    conversation.switch(conversation.siblings(b.id)[1].id)
    conversation.switch(b.id)
    assert conversation.leaf == second
    assert conversation.path()[0] == a


def test_deleting_goes_to_the_nearest_branch() -> None:
    conversation = talk("a", "b", "c")
    a, b, c = conversation.path()
    other = conversation.add_sibling(b.id, "B")
    assert conversation.delete(other.id) == [other.id]
    assert conversation.leaf == c
    assert set(conversation.delete(b.id)) == {b.id, c.id}
    assert conversation.leaf == a
    assert conversation.delete(a.id) == [a.id]
    assert conversation.leaf is None
    assert len(conversation) == 0


def test_missing_messages_are_reported() -> None:
    conversation = talk("a")
    for act in (conversation.path, conversation.switch, conversation.delete, conversation.siblings):
        with pytest.raises(UsageError, match="has no message 'x'"):
            act("x")
    with pytest.raises(UsageError):
        conversation.add("user", "b", parent="x")
    with pytest.raises(UsageError):
        conversation.update("x", text="y")
    assert conversation.get("x") is None


def test_restoring_repairs_missing_messages() -> None:
    whole = talk("a", "b", "c")
    a, b, c = whole.path()
    again = Conversation()
    again.restore([a, b, c], b.id)
    assert again.path() == [a, b]
    orphan = Conversation()
    orphan.restore([b, c], "gone")
    assert texts(orphan.path()) == ["b", "c"]
    assert orphan.path()[0].parent is None


class Trees(RuleBasedStateMachine):
    """Compare with a plain dictionary of parents."""

    @initialize()
    def begin(self) -> None:
        self.conversation = Conversation()
        self.parents: dict[str, str | None] = {}

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.parents, key=list(self.parents).index)))

    @rule(at_leaf=st.booleans(), data=st.data())
    def add(self, at_leaf: bool, data: st.DataObject) -> None:
        leaf = self.conversation.leaf
        parent = None if at_leaf or not self.parents else self.pick(data)
        message = self.conversation.add("user", "x", parent=parent)
        expected = parent or (leaf.id if leaf else None)
        self.parents[message.id] = expected
        assert self.conversation.leaf == message

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def edit(self, data: st.DataObject) -> None:
        old = self.pick(data)
        self.parents[self.conversation.add_sibling(old, "y").id] = self.parents[old]

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def switch(self, data: st.DataObject) -> None:
        id_ = self.pick(data)
        self.conversation.switch(id_)
        assert id_ in [message.id for message in self.conversation.path()]

    @precondition(lambda self: self.parents)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        id_ = self.pick(data)
        doomed = {id_}
        while more := {child for child, parent in self.parents.items() if parent in doomed} - doomed:
            doomed |= more
        assert set(self.conversation.delete(id_)) == doomed
        self.parents = {child: parent for child, parent in self.parents.items() if child not in doomed}

    @rule()
    def restore(self) -> None:
        again = Conversation()
        leaf = self.conversation.leaf
        again.restore(self.conversation.messages, leaf.id if leaf else None)
        assert again.path() == self.conversation.path()
        assert again.messages == self.conversation.messages
        self.conversation = again

    @invariant()
    def it_is_the_tree(self) -> None:
        c = self.conversation
        assert {message.id: message.parent for message in c.messages} == self.parents
        ends = set(self.parents) - set(self.parents.values())
        assert {message.id for message in leaves(c)} == ends
        path = [message.id for message in c.path()]
        if self.parents:
            assert [self.parents[id_] for id_ in path] == [None, *path[:-1]]
        else:
            assert c.leaf is None
        for id_, parent in self.parents.items():
            siblings = [other for other, above in self.parents.items() if above == parent]
            assert [message.id for message in c.siblings(id_)] == siblings
            assert c.branch_of(id_) == (siblings.index(id_) + 1, len(siblings))


TestTrees = Trees.TestCase
TestTrees.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
