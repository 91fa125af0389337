"""Limit of threads in a step while other programs use the processors.

A step of few tokens has hundreds of barriers, and at each one all threads wait for the last.  If another program
takes a thread's core, the other threads wait until the thread runs again.  That takes milliseconds, enough time to do
its share themselves.
"""

from __future__ import annotations

import time

#: Weight of the last step in the moving average of lost time.
NEWEST = 0.2
#: Lost time, in units of one thread's time, at which a thread is removed: at 1 both numbers of threads are equally
#: fast.  And the lost share of a step that is always allowed: threads wait a little even on an idle machine.
MOST_LOST, IDLE_LOST = 0.8, 0.2
#: Steps of a trial with one more thread.  A trial ends early if one step loses all the allowed time.
TRIAL_STEPS = 8
#: Seconds until the first trial, and the maximum between trials: each failed trial doubles the time.
FIRST_TRIAL_S, LAST_TRIAL_S = 0.2, 3.0


class ThreadLimit:
    """Uses fewer than ``most`` threads while they lose more time than one thread contributes.

    Threads that wait for a thread without a core lose a share of each step.  If n threads lose about 1/n, n - 1
    threads are as fast.  From time to time one more thread is tried.
    """

    def __init__(self, most: int) -> None:
        self.most = self.now = most
        self._lost, self._trial_steps = 0.0, 0
        self._pause_s, self._next_trial = FIRST_TRIAL_S, 0.0

    def record(self, lost: float) -> None:
        """Record a step of ``now`` threads.  ``lost``: share of its time that a thread slept or had no core."""
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
