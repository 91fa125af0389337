"""Sampling: computes the id of the next token from the logits of one position.

A ``Sampler`` follows the settings of a ``Sampling`` in small steps, in the order of llama.cpp's default chain:

    logit bias · processors · repetition penalties · DRY        on all logits
    top-nσ · top-k · typical · top-p · min-p · XTC · temperature · draw  on the remaining candidates

Temperature 0 selects the largest logit after the first line, the lowest id among equal logits. Mirostat 2 replaces
the second line except for temperature, and draws the token. Adaptive-p draws the token after temperature. (With
mirostat, llama.cpp also omits penalties and DRY. It also truncates at temperature 0.)

If a grammar forbids the chosen token, the second line runs again on allowed tokens. Computing the allowed tokens
every time would take longer than all other steps.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from localllm.errors import Argument, LocalLLMError, ModelError, UsageError
from localllm.options.checks import in_vocabulary
from localllm.options.declared import Sampling
from localllm.options.types import LogitsProcessor
from localllm.sampling import candidates as steps
from localllm.sampling.candidates import AdaptiveP, Candidates, IntArray, Mirostat2
from localllm.sampling.penalties import DryPenalty, History, Logits, RepetitionPenalties, SequenceBreakers
from localllm.sampling.tensors import call_with_tensors, takes_tensors

if TYPE_CHECKING:
    from localllm.sampling.call_constraint import CallConstraint
    from localllm.sampling.constraint import Constraint
    from localllm.sampling.reasoning_limit import ReasoningLimit


Step = Callable[[Candidates], Candidates]

#: Random numbers generated together.
_DRAWN_AT_ONCE = 16

#: Returns the chosen id and the remaining candidates.
_Choose = Callable[[Candidates], tuple[int, Candidates]]

greedy = Sampling(temperature=0.0)
"""Always the most likely token."""


def _biased(logits: Logits, ids: IntArray, biases: npt.NDArray[np.float64]) -> Logits:
    biased = logits.copy()
    with np.errstate(over="ignore"):
        biased[ids] = logits[ids] + biases
    return biased


def _processed(logits: Logits, function: LogitsProcessor, history: History) -> Logits:
    """Call a user's function with a copy of the logits, and check its result."""
    result: Any
    if is_tensors := takes_tensors(function):
        result = call_with_tensors(function, history.last(-1), logits)
    else:
        result = function(history.last(-1), logits.copy())
    name = f"the logits processor {getattr(function, '__name__', type(function).__name__)!s:.80}"
    if not isinstance(result, np.ndarray):
        kind = "tensor" if is_tensors else "float32 array"
        raise UsageError(f"{name} returned {type(result).__name__} instead of a {kind}")
    shape = (1, *logits.shape) if is_tensors else logits.shape
    if result.shape != shape or result.dtype != np.float32:
        returned = f"{result.dtype} of shape {result.shape}"
        raise UsageError(f"{name} returned {returned}, but must return float32 of shape {shape}")
    processed: Logits = result.reshape(logits.shape)
    _highest_logit(processed, UsageError, f"{name} returned logits that", "correct the function")
    return processed


def _highest_logit(
    logits: Logits, error: type[LocalLLMError], whose: str, advice: str, ids: IntArray | None = None
) -> int:
    """Return the id of the largest logit, the first among equal ones. Raises ``error`` if it is not finite.

    ``ids``: ids of the logits, if not all logits are given.
    """
    position = int(logits.argmax())  # the first NaN, if any
    peak, id_ = float(logits[position]), position if ids is None else int(ids[position])
    if math.isnan(peak):
        raise error(f"{whose} hold NaN, first for token {id_}: {advice}")
    if peak == math.inf:
        raise error(f"{whose} are infinite for token {id_}: {advice}")
    if peak == -math.inf:
        raise error(f"{whose} are -inf for every token, so no token can be chosen: {advice}")
    return id_


class Choice(NamedTuple):
    """A chosen token.

    Attributes:
        id: Token id.
        logprob: Natural logarithm of its probability in the model, before any setting, as in the OpenAI API. None
            unless requested.
        top: Most likely tokens and their log-probabilities, most likely first. Tokens with probability 0 are
            omitted.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence.

    Calls choose a token. ``accept`` adds the next token of the sequence.
    """

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        *,
        prompt_ids: Sequence[int] | IntArray = (),
        token_bytes: Callable[[int], bytes] | None = None,
        constraint: Constraint | CallConstraint | None = None,
        reasoning: ReasoningLimit | None = None,
    ) -> None:
        """
        Args:
            prompt_ids: the prompt, for penalties and DRY.
            token_bytes: returns the bytes of a token; needed for DRY's sequence breakers.
            constraint: enforces the grammar of the settings, or of tool calls.
            reasoning: ends the reasoning of a chat's reply.
        """
        in_vocabulary(prompt_ids, n_vocab, "prompt_ids")
        in_vocabulary(list(sampling.logit_bias), n_vocab, "logit_bias")
        self.sampling, self.reasoning = sampling, reasoning
        # Seed of the random numbers, also if the settings have no seed. The same seed, settings, prompt and logits
        # give the same ids on every platform, up to the rounding of ``exp``, which may differ in the last place.
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._ids, self._history, self._constraint = np.arange(n_vocab), History(prompt_ids), constraint
        trackers = _trackers(sampling, self._history, token_bytes)
        adjustments: list[Callable[[Logits], Logits]] = []
        if biases := sampling.logit_bias:
            ids, added = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float64)
            adjustments.append(partial(_biased, ids=ids, biases=added))
        n_biases = len(adjustments)
        adjustments += [partial(_processed, function=f, history=self._history) for f in sampling.processors]
        adjustments += trackers
        self._adjustments = adjustments
        self._listeners = [item.accept for item in (*trackers, constraint, reasoning) if item is not None]
        self._uniform = UniformNumbers(self.seed) if sampling.temperature > 0 else None
        # None: select the largest logit
        self._choose = _make_choose(sampling, self.seed, self._uniform) if self._uniform else None
        self._n_enough = 0 if len(adjustments) > n_biases else _n_enough(sampling, n_vocab)

    @property
    def n_enough(self) -> int:
        """Number of largest logits that `among` needs for the next token; 0 if it needs all logits."""
        return self._n_enough if self._constraint is None or self._constraint.is_free else 0

    def draws(self, n: int) -> list[tuple[float, ...]]:
        """Return parameters of the next draws from the `n_enough` largest logits, for `Batch.draws` of a backend.

        Empty if no token is drawn or other settings affect the choice.
        """
        s = self.sampling
        is_alone = not (s.logit_bias or s.typical_p < 1 or s.xtc_probability > 0 or s.draws_depend)
        if not (self._uniform and self.n_enough and is_alone):
            return []
        return [(s.top_k, s.top_p, s.min_p, s.temperature, u) for u in self._uniform.ahead(n)]

    @property
    def is_slow(self) -> bool:
        """True if a choice may take long and can run in any thread: a grammar may be slow to evaluate.

        Processors always run in the engine thread.
        """
        return self._constraint is not None and not self._constraint.is_free and not self.sampling.processors

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows no further text."""
        return self._constraint is not None and self._constraint.is_complete

    def n_possible(self, ids: Sequence[int]) -> int:
        """Return the number of leading tokens of ``ids`` that the grammar allows."""
        return len(ids) if self._constraint is None else self._constraint.n_possible(ids)

    def __call__(self, logits: npt.NDArray[Any]) -> Choice:
        """Choose the next token.

        Args:
            logits: float32 ``[n_vocab]``; -inf forbids a token.  Not changed.
        """
        raw: Logits = np.asarray(logits, dtype=np.float32)
        if raw.shape != self._ids.shape:
            raise UsageError(f"logits of shape {raw.shape} given to a sampler for {len(self._ids):,} tokens")
        chosen_id = _highest_logit(raw, ModelError, *_MODELS)
        if (forced := self._forced_id()) is not None:
            logprobs = self.sampling.logprobs
            return Choice(forced) if logprobs is None else _with_logprobs(raw, forced, logprobs)
        adjusted = raw
        for adjust in self._adjustments:
            adjusted = adjust(adjusted)
        if self._adjustments:
            chosen_id = _highest_logit(adjusted, UsageError, *_ADJUSTED)
        drawn_among: Candidates | None = None
        constraint = None if self._constraint is None or self._constraint.is_free else self._constraint
        # Samplers with state must draw only from allowed tokens.
        if self._choose is not None and not (constraint and self.sampling.draws_depend):
            chosen_id, drawn_among = self._choose(Candidates(self._ids, adjusted))
        if constraint is not None and (self.sampling.draws_depend or not constraint.allows(chosen_id)):
            allowed = constraint.masked(adjusted)
            chosen_id = _highest_logit(allowed, UsageError, *_ADJUSTED)
            if self._choose is not None:
                chosen_id, drawn_among = self._choose(Candidates(self._ids, allowed))
        if self.sampling.logprobs is None:
            return Choice(chosen_id)
        if not self.sampling.post_sampling_probs:
            return _with_logprobs(raw, chosen_id, self.sampling.logprobs)
        return _drawn(drawn_among, chosen_id, self.sampling.logprobs)

    def among(self, ids: IntArray, logits: Logits) -> Choice:
        """Choose the next token from at least the `n_enough` largest logits, with the same result as from all logits.

        Args:
            ids: ``[n]``, integers: ids of the largest logits, the lowest ids among equal logits. NaN counts as larger
                than any number.
            logits: float32 ``[n]``.
        """
        if (forced := self._forced_id()) is not None:
            return Choice(forced)
        order = np.argsort(ids)
        ids, logits = ids[order], logits[order]
        chosen_id = _highest_logit(logits, ModelError, *_MODELS, ids)
        if biases := self.sampling.logit_bias:
            added = np.array([biases.get(id_, 0.0) for id_ in ids.tolist()])
            with np.errstate(over="ignore"):
                logits = (logits + added).astype(np.float32)
            chosen_id = _highest_logit(logits, UsageError, *_ADJUSTED, ids)
        return Choice(chosen_id if self._choose is None else self._choose(Candidates(ids, logits))[0])

    def _forced_id(self) -> int | None:
        """Return the token that must follow to end the reasoning; None if any, or if the grammar has another end."""
        id_ = None if self.reasoning is None else self.reasoning.next_id
        return id_ if id_ is None or self._constraint is None or self._constraint.allows(id_) else None

    def accept(self, id_: int) -> None:
        """Append a token to the history that penalties, DRY and processors use."""
        in_vocabulary([id_], len(self._ids))
        self._history.append(id_)
        for listener in self._listeners:
            listener(id_)


#: Subject and advice of error messages, for logits of the model and for logits after the settings were applied.
_MODELS = "the model's logits", "its file may be damaged"
_ADJUSTED = "after logit_bias, processors, penalties, DRY and grammar the logits", "use milder settings"


def _n_enough(sampling: Sampling, n_vocab: int) -> int:
    """Return the number of largest logits that determine the choice; 0 if all logits may be needed.

    Assumes that only biases change the logits. Each negative bias can bring at most one other token among the
    largest. Top-k needs one more logit than it keeps, so that it sorts in the same way as with all logits.
    """
    if sampling.logprobs is not None or any(bias > 0 for bias in sampling.logit_bias.values()):
        return 0
    if not sampling.temperature:
        n_largest = 1
    elif sampling.top_k and not sampling.mirostat and sampling.top_n_sigma <= 0:
        n_largest = sampling.top_k + 1
    else:
        return 0
    n = n_largest + len(sampling.logit_bias)
    return n if n <= n_vocab else 0


def _with_logprobs(logits: Logits, chosen_id: int, n_top: int) -> Choice:
    total = steps.relative_weights(logits).sum(dtype=np.float64)
    log_total = float(logits.max()) + math.log(total)
    top = steps.highest(logits, n_top).tolist() if n_top else []
    likeliest = tuple((id_, float(logits[id_]) - log_total) for id_ in top)
    return Choice(chosen_id, float(logits[chosen_id]) - log_total, likeliest)


def _drawn(among: Candidates | None, chosen_id: int, n_top: int) -> Choice:
    """Return a choice with probabilities among its candidates. None: there was only one candidate."""
    if among is None:
        return Choice(chosen_id, 0.0, ((chosen_id, 0.0),) if n_top else ())
    weights = steps.relative_weights(among.logits)
    with np.errstate(divide="ignore"):
        logprobs = np.log(weights / weights.sum(dtype=np.float64))
    order = steps.highest(logprobs, n_top) if n_top else ()
    logprob = logprobs[np.flatnonzero(among.ids == chosen_id)[0]]
    return Choice(chosen_id, float(logprob), tuple((int(among.ids[i]), float(logprobs[i])) for i in order))


def _trackers(
    sampling: Sampling, history: History, token_bytes: Callable[[int], bytes] | None
) -> list[RepetitionPenalties | DryPenalty]:
    s, trackers = sampling, list[RepetitionPenalties | DryPenalty]()
    strengths = {"repeat": s.repeat_penalty, "presence": s.presence_penalty, "frequency": s.frequency_penalty}
    if s.repeat_last_n and tuple(strengths.values()) != (1, 0, 0):
        last = history.last(s.repeat_last_n).tolist()
        trackers.append(RepetitionPenalties(last, window=s.repeat_last_n, **strengths))
    if s.dry_penalty_last_n and s.dry_multiplier:
        breakers = None
        if texts := s.dry_sequence_breakers:
            if token_bytes is None:
                why = " need the text of each token: give Sampler token_bytes, or set "
                raise UsageError(Argument("dry_sequence_breakers"), why, Argument("dry_sequence_breakers", ()))
            breakers = SequenceBreakers(texts, token_bytes)
        penalty = partial(DryPenalty, history, window=s.dry_penalty_last_n, allowed_length=s.dry_allowed_length)
        trackers.append(penalty(multiplier=s.dry_multiplier, base=s.dry_base, breakers=breakers))
    return trackers


def _make_choose(sampling: Sampling, seed: int, uniform: Callable[[], float]) -> _Choose:
    """Return the second line of the chain: a function that chooses an id from candidates."""
    s = sampling
    pick: Callable[[Candidates], int]
    if s.mirostat:
        pick = Mirostat2(s.mirostat_tau, s.mirostat_eta, uniform)
    elif s.adaptive_target >= 0:
        pick = AdaptiveP(s.adaptive_target, s.adaptive_decay, uniform)
    else:

        def pick(candidates: Candidates) -> int:
            return int(candidates.ids[steps.draw(candidates, uniform())])

    chance = UniformNumbers(seed, is_single=True)
    xtc = partial(steps.xtc, probability=s.xtc_probability, threshold=s.xtc_threshold, uniform=chance)
    truncations: tuple[tuple[bool, Step], ...] = (
        (s.top_n_sigma > 0, partial(steps.top_n_sigma, n=s.top_n_sigma)),
        (s.top_k > 0, partial(steps.top_k, k=s.top_k)),
        (s.typical_p < 1, partial(steps.typical, p=s.typical_p)),
        (s.top_p < 1, partial(steps.top_p, p=s.top_p)),
        (s.min_p > 0, partial(steps.min_p, p=s.min_p)),
        (s.xtc_probability > 0 and s.xtc_threshold <= 0.5, xtc),
    )
    chain = [step for is_on, step in truncations if is_on and not s.mirostat]
    if s.temperature != 1:
        chain.append(partial(steps.temper, temperature=s.temperature))

    def choose(candidates: Candidates) -> tuple[int, Candidates]:
        for step in chain:
            candidates = step(candidates)
        return pick(candidates), candidates

    return choose


class UniformNumbers:
    """Random numbers, 0 <= u < 1, equal to llama.cpp's numbers for the same seed if built with GCC or Clang.

    Computes C++'s ``std::mt19937`` and ``std::uniform_real_distribution``, for double or float, from the raw output
    of `numpy.random.RandomState`, which NumPy guarantees never to change.
    """

    def __init__(self, seed: int, *, is_single: bool = False) -> None:
        words = [seed >> 32 * i & 0xFFFFFFFF for i in range(-(-seed.bit_length() // 32))]
        self._words = np.random.RandomState(words if len(words) > 1 else seed)
        self._is_single = is_single
        self._known: list[float] = []

    def __call__(self) -> float:
        (number,) = self.ahead(1)
        del self._known[0]
        return number

    def ahead(self, n: int) -> list[float]:
        """Return the results of the next ``n`` calls."""
        while len(self._known) < n:
            data = self._words.bytes(8 * _DRAWN_AT_ONCE)
            # A float uses one word of 32 bits, a double uses two. Results are rounded, but not up to 1.
            if self._is_single:
                numbers = np.frombuffer(data, "<u4").astype(np.float32).astype(np.float64) * 2.0**-32
            else:
                numbers = np.frombuffer(data, "<u8").astype(np.float64) * 2.0**-64
            self._known += np.minimum(numbers, 1 - (2.0**-24 if self._is_single else 2.0**-53)).tolist()
        return self._known[:n]
