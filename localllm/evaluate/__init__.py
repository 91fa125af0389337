"""Evaluation: how well a model predicts texts, and what was lost where it was made smaller.

    from localllm.evaluate import choices, divergence, perplexity

`perplexity` of a text, and `divergence` from the logits that another model had for it (`BaseLogits`), are those of
llama.cpp's ``llama-perplexity``, and so is the file of logits; `choices` is multiple choice.
`localllm.evaluate.lm_eval` lets lm-evaluation-harness run on an `LLM`.
"""

from localllm.evaluate.base_logits import BaseLogits
from localllm.evaluate.multiple_choice import Accuracy, Question, choices, read_questions
from localllm.evaluate.perplexity import Divergence, Estimate, Perplexity, divergence, perplexity

__all__ = ["Accuracy", "BaseLogits", "Divergence", "Estimate", "Perplexity", "Question"]
__all__ += ["choices", "divergence", "perplexity", "read_questions"]
