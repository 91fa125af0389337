"""How many threads take part in a step while other programs use the processors.

A step of few tokens has hundreds of barriers, at each of which all threads wait for the last.  Where one has lost its
core to another program, the others wait until it is back: milliseconds, in which they could have done its share.
"""

from __future__ import annotations

import time

#: How much of the mean that decides the last step makes up.
NEWEST = 0.2
#: Lost time, in that of one thread, from which on one thread fewer is taken: at 1 both would be as fast.  And the
#: share of a step that is never too much: threads wait a little for each other on an idle machine, too.
MOST_LOST, IDLE_LOST = 0.8, 0.2
#: Steps of a trial with one thread more, which ends earlier if all goes to one of them.
TRIAL_STEPS = 8
#: Seconds until the first trial, and at most between two: each that fails doubles them.
FIRST_TRIAL_S, LAST_TRIAL_S = 0.2, 3.0


class ThreadLimit:
    """Fewer than ``most`` threads while that many lose more time than one of them is worth.

    Of n threads, those that wait for one without a core lose a share of each step.  Once this is about 1/n, the
    others are as fast without it.  From time to time one more is tried.
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._lost, self._trial_steps = 0.0, 0
        self._pause_s, self._next_trial = FIRST_TRIAL_S, 0.0

    def record(self, lost: float) -> None:
        """Takes note of a step of ``now`` threads, in which one of them had no core, or slept, for such a share."""
        if self.most == 1:
            return
        self._lost += NEWEST * (lost - self._lost)
        if self.now > 1 and self._lost > max(MOST_LOST / self.now, IDLE_LOST):
            self._pause_s = min(LAST_TRIAL_S, 2 * self._pause_s) if self._trial_steps else FIRST_TRIAL_S
            self._set(self.now - 1)
            self._next_trial = time.monotonic() + self._pause_s
        elif self._trial_steps:
            self._trial_steps -= 1
        elif self.now < self.most and time.monotonic() > self._next_trial:
            self._set(self.now + 1)
            self._trial_steps, self._next_trial = TRIAL_STEPS, time.monotonic() + FIRST_TRIAL_S

    def _set(self, n: int) -> None:
        self.now, self._lost, self._trial_steps = n, 0.0, 0
