"""Evaluation of models: how well a model predicts texts, and the loss by quantisation.

    from localllm.evaluate import choices, divergence, perplexity

`perplexity` of texts, `divergence` from another model's logits (`BaseLogits`), and the file of logits follow
llama.cpp's ``llama-perplexity``. `choices` evaluates multiple-choice questions.
`localllm.evaluate.lm_eval` runs lm-evaluation-harness on an `LLM`.
"""

from localllm.evaluate.base_logits import BaseLogits
from localllm.evaluate.multiple_choice import Accuracy, Question, choices, read_questions
from localllm.evaluate.perplexity import Divergence, Estimate, Perplexity, divergence, perplexity

__all__ = ["Accuracy", "BaseLogits", "Divergence", "Estimate", "Perplexity", "Question"]
__all__ += ["choices", "divergence", "perplexity", "read_questions"]
