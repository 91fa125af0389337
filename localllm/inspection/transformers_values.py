"""Values inside a model of Hugging Face transformers, by localllm's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm.errors import UsageError, path_text
from localllm.inspection.names import ValueNames

#: Names of the blocks of a layer in transformers.
_BLOCKS = {
    "attention": ("self_attn", "attention", "attn", "self_attention", "norm_attn_norm.attn"),
    "recurrent": ("mamba", "mixer", "linear_attn", "conv"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn"),
    "router": (
        *("mlp.gate", "mlp.router", "feed_forward.router", "feed_forward.gate", "ffn.router.layer", "router.proj"),
        *("block_sparse_moe.gate", "block_sparse_moe.router", "moe.gate", "moe.router", "mixer.gate"),
    ),
}

#: Values that the modules of a model type compute differently: with the residual stream, or before or after a factor.
_DIFFERENT = {
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa"), ("mlp",)),
    "bloom": ("attention", "mlp"),
    "llama4_text": ("router",),  # the scores after the sigmoid
    "falcon_h1": ("attention", "recurrent", "mlp"),
    "mimo_v2_flash": ("attention",),
    "minicpm3": ("attention", "mlp", "final_norm"),
    "mpt": ("mlp",),
}


def transformers_values(folder: Path, ids: Sequence[int], names: ValueNames) -> dict[str, NDArray[Any]]:
    """Return the values of a checkpoint at tokens, in float32: streams, blocks, final norm and logits.

    Raises UsageError if transformers is not installed, or cannot load or evaluate the checkpoint.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise UsageError(
            "transformers:FOLDER needs transformers, which is not installed: pip install transformers torch"
        ) from None
    if not (folder / "config.json").is_file():
        raise UsageError(f"{path_text(folder)} is not a checkpoint: name a folder with config.json and weights")
    try:
        # Without trust_remote_code, transformers prompts on the terminal before it runs the checkpoint's code.
        options = {"dtype": "float32", "local_files_only": True, "trust_remote_code": False}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except Exception as error:  # a damaged checkpoint raises errors of many libraries
        raise UsageError(f"transformers cannot load {path_text(folder)}: {error!s:.200}") from error
    try:
        return values_of(model, ids, names)
    except (IndexError, RuntimeError) as error:
        raise UsageError(
            f"transformers cannot evaluate {path_text(folder)} ({error!s:.200}): name the checkpoint of this model"
        ) from error


def values_of(model: Any, ids: Sequence[int], names: ValueNames) -> dict[str, NDArray[Any]]:
    """Return the values of a transformers model at tokens; see `transformers_values`."""
    import torch

    values: dict[str, NDArray[Any]] = {}
    n_tokens, different = len(ids), _DIFFERENT.get(model.config.model_type, ())

    def keep(name: str, x: Any) -> None:
        """Store a tensor as rows [n_tokens, width]. Several streams are side by side."""
        x = x[0] if isinstance(x, tuple | list) else x
        if not isinstance(x, torch.Tensor) or name not in names or name.rpartition(".")[2] in different:
            return
        rows = x.detach().float().numpy()
        if rows.shape[:2] != (1, n_tokens) and rows.ndim == 4 and rows.shape[1:3] == (1, n_tokens):
            rows = np.moveaxis(rows, 0, 2)  # streams first
        if rows.shape[:2] == (1, n_tokens):
            rows = rows[0]
        if len(rows) == n_tokens and rows[0].size == names[name].width:
            values[name] = rows.reshape(n_tokens, -1).copy()

    def after(name: str) -> Callable[..., None]:
        return lambda module, arguments, result: keep(name, result)

    def before(name: str) -> Callable[..., None]:
        return lambda module, arguments, keywords: keep(name, (*arguments, keywords.get("hidden_states"))[0])

    hooks = []
    for i, layer in enumerate(layers_of(model, names)):
        hooks.append(layer.register_forward_pre_hook(before(f"layers.{i}.input"), with_kwargs=True))
        hooks.append(layer.register_forward_hook(after(f"layers.{i}.output")))
        modules = dict(layer.named_modules())
        for block, candidates in _BLOCKS.items():
            if (module := next((modules[c] for c in candidates if c in modules), None)) is not None:
                hooks.append(module.register_forward_hook(after(f"layers.{i}.{block}")))
    head = model.get_output_embeddings()
    if head is not None:
        hooks.append(head.register_forward_pre_hook(before("final_norm"), with_kwargs=True))
    try:
        with torch.no_grad():
            result = model(torch.tensor([[*ids]]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    keep("logits", getattr(result, "logits", None))
    if "layers.0.input" in values and "embedding" in names:
        values["embedding"] = values["layers.0.input"]
    return values


def layers_of(model: Any, names: ValueNames) -> Sequence[Any]:
    """Return the layers of a model: its first list of as many modules as the model has layers."""
    import torch

    n_layers = sum(name.startswith("layers.") and name.endswith(".output") for name in names)
    lists: list[Any] = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n_layers]
    return lists[0] if lists else ()
