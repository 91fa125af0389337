"""Making models smaller: a GGUF file of floats into one of blocks."""

from localllm.quantize.imatrix import ImportanceMatrix
from localllm.quantize.mixes import MIXES
from localllm.quantize.run import QuantizePlan, TensorPlan, TensorResult, plan, run, split_files

__all__ = ["MIXES", "ImportanceMatrix", "QuantizePlan", "TensorPlan", "TensorResult", "plan", "run", "split_files"]
