"""Limit of threads in a step while other programs use the processors.

A step has hundreds of barriers, and at each one all threads wait for the last. If another program takes a thread's
core, the other threads wait until the thread runs again. That takes milliseconds, enough time to do its share
themselves. But if every core has other work, each additional thread gets the process more time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

#: Lost time of a step that is always allowed: threads wait a little even on an idle machine.
IDLE_LOST = 0.3
#: Seconds until the first trial, and the maximum between trials: each failed trial doubles the time.
FIRST_TRIAL_S, LAST_TRIAL_S = 0.2, 3.0
#: Most seconds of a step with fewer threads, relative to more threads: several numbers may be equally slow.
SLOWER = 1.03


@dataclass
class ThreadLimit:
    """Chooses the fastest number of threads by trials.

    While threads lose much of a step's time, one thread less is tried, or one more. A slower number is taken back.

    Attributes:
        most: maximum number of threads.
        newest: weight of the last step in the moving averages.
        trial_steps: steps of a trial. A trial ends early if it takes longer than ``trial_steps`` steps took before.
        now: the number of threads that the next step uses.
    """

    most: int
    newest: float = 0.2
    trial_steps: int = 8
    now: int = field(init=False)

    def __post_init__(self) -> None:
        self.now = self._usual = self.most
        self._lost = self._token_s = 0.0
        self._trial: list[float] = []
        self._direction, self._pause_s, self._next_trial = -1, FIRST_TRIAL_S, 0.0

    @classmethod
    def of_long_steps(cls, most: int) -> ThreadLimit:
        """Return a limit for steps of a tenth of a second: a few are enough to judge a number."""
        return cls(most, newest=0.3, trial_steps=2)

    def record(self, lost: float, token_s: float) -> None:
        """Record a step of ``now`` threads.

        Args:
            lost: largest share of the step's time that a thread slept or had no core.
            token_s: seconds of the step per token.
        """
        if self.most == 1:
            return
        if self.now != self._usual:
            self._record_trial(token_s)
            return
        self._token_s += (self.newest if self._token_s else 1.0) * (token_s - self._token_s)
        self._lost += self.newest * (lost - self._lost)
        if time.monotonic() < self._next_trial:
            return
        possible = [-1] * (self.now > 1 and self._lost > IDLE_LOST) + [1] * (self.now < self.most)
        if possible:
            self.now += self._direction if self._direction in possible else possible[0]

    def _record_trial(self, token_s: float) -> None:
        self._trial.append(token_s)
        seconds, n = sum(self._trial), len(self._trial)
        if n < self.trial_steps and seconds < self.trial_steps * self._token_s:
            return
        if seconds < n * self._token_s * (SLOWER if self.now < self._usual else 1.0):
            self._direction, self._usual = self.now - self._usual, self.now
            self._token_s, self._pause_s = seconds / n, FIRST_TRIAL_S
        else:
            self._direction = self._usual - self.now
            self.now, self._pause_s = self._usual, min(LAST_TRIAL_S, 2 * self._pause_s)
        self._lost, self._trial, self._next_trial = 0.0, [], time.monotonic() + self._pause_s
