"""Guessing what follows, so that one step of the model can check several tokens (speculative decoding).

`lookup` guesses that a text repeats itself; `model` asks a smaller model.  Both weigh by running estimates (`costs`)
whether guessing pays, and stop where it does not.
"""

from localllm.drafting.drafter import Drafter, Drafts

__all__ = ["Drafter", "Drafts"]
