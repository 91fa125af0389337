"""Train the demo model and write it as GGUF.

    pip install '.[reference]'
    python -m tests.demo_model.train --stories tinystories_sample.txt --start narrower.gguf

A restarted run continues from its last checkpoint.  Every batch depends on the seed and the step only, and the
learning rate falls with the elapsed time.
"""

import argparse
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

try:
    import torch
except ImportError as error:
    raise SystemExit(f"training needs PyTorch ({error}): pip install '.[reference]' installs it") from None
import torch.nn.functional as F
from torch import Tensor

from tests.demo_model.data import Corpus, Encoder, batch, load_vocabulary, read_sample
from tests.demo_model.export import read_state, write_gguf
from tests.demo_model.model import DemoConfig, DemoModel
from tests.demo_model.muon import Muon
from tests.demo_model.widen import widen

SEED = 20260101
ROOT = Path(__file__).resolve().parents[2]
BATCH_TOKENS = 4096
REPLICAS = 4  # a divisor of the rows in the smallest batch
WARMUP_STEPS = 30
DECAY_SHARE = 0.8  # the last part of the run, during which the learning rate falls to zero
# Rows grow during the run, because attention is cheaper for short rows.  (share of the run, tokens per row)
ROW_LENGTHS = ((0.5, 256), (0.85, 512), (1.0, 1024))


def learning_rate_factor(step: int, share: float) -> float:
    """Return the learning rate factor: warm-up, constant, then linear to zero at the end of the run (share 1)."""
    return min((step + 1) / WARMUP_STEPS, 1.0, (1 - share) / DECAY_SHARE)


def row_length(share: float) -> int:
    """Return the tokens per row at this share of the run."""
    return next(length for end, length in ROW_LENGTHS if share <= end)


def weighted_loss(model: DemoModel, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the cross-entropies of the predicted tokens.  ids, weights: [B, T + 1]."""
    targets = weights[:, 1:] > 0
    hidden = model.hidden(ids[:, :-1])[targets]
    losses = F.cross_entropy(F.linear(hidden, model.token_embd.weight), ids[:, 1:][targets], reduction="none")
    return (losses * weights[:, 1:][targets]).sum()


class Replicas:
    """Copies of a model that share its parameters, each for an equal share of a batch.

    There are more copies than threads, so that threads rarely wait for each other.  On a busy machine this is faster
    than torch's own threads, which synchronise in every operation.  Gradients are summed in order.
    """

    def __init__(self, model: DemoModel, count: int, threads: int) -> None:
        self.model = model
        self.copies = [DemoModel(model.config) for _ in range(count)]
        for replica in self.copies:
            for own, shared in zip(replica.parameters(), model.parameters(), strict=True):
                own.data = shared.data
        # Torch's number of threads is a setting per thread.
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def backward(self, ids: Tensor, weights: Tensor) -> float:
        """Set the model's gradients for the mean loss of a batch, and return the loss."""
        total = weights[:, 1:].sum()

        def share(replica: DemoModel, ids: Tensor, weights: Tensor) -> float:
            replica.zero_grad()
            loss = weighted_loss(replica, ids, weights) / total
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()

        count = len(self.copies)
        losses = list(self.pool.map(share, self.copies, ids.chunk(count), weights.chunk(count)))
        for parameter, *grads in zip(
            self.model.parameters(), *(replica.parameters() for replica in self.copies), strict=True
        ):
            parameter.grad = torch.stack([own.grad for own in grads]).sum(0)
        return sum(losses)


@torch.no_grad()
def held_out_loss(model: DemoModel, encoder: Encoder, stories: list[str]) -> float:
    """Return the mean negative log-likelihood per token, in nats, on held-out stories."""
    total, count = 0.0, 0
    for story in stories:
        ids, _ = encoder.bare("", story)
        length = min(len(ids), model.config.context_length)
        total += weighted_loss(model, torch.tensor([ids[:length]]), torch.ones(1, length)).item()
        count += length - 1
    return total / count


def optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices in the blocks, and AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and name != "token_embd.weight"]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        Muon(matrices, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(
            [
                {"params": [model.token_embd.weight], "lr": 4e-3},
                {"params": vectors, "lr": 4e-3, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.98),
            weight_decay=0.05,
        ),
    ]


def train(options: argparse.Namespace) -> None:
    """Train the model: vocabulary, steps, checkpoints and the GGUF file."""
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    sample, held_out = read_sample(options.stories)
    corpus = Corpus.load(sample)
    config = DemoConfig()
    encoder = Encoder(load_vocabulary(corpus, config.vocab_size, options.work / "vocabulary"))
    model = DemoModel(config)
    if options.start:
        widen(model, read_state(options.start))
    parts = optimizers(model)
    for part in parts:
        for group in part.param_groups:
            group["peak_lr"] = group["lr"] * options.peak
    checkpoint = options.work / "checkpoint.pt"
    step, spent = 0, 0.0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        step, spent = saved["step"], saved["spent"]
        model.load_state_dict(saved["model"])
        for part, state in zip(parts, saved["optimizers"], strict=True):
            part.load_state_dict(state)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, from step {step}", flush=True)

    replicas = Replicas(model, REPLICAS, options.threads)
    started, mean_loss, seen = time.perf_counter() - spent, math.nan, 0
    while (share := (time.perf_counter() - started) / (60 * options.minutes)) < 1:
        length = row_length(share)
        ids, weights = batch(corpus, encoder, BATCH_TOKENS // length, length, f"{SEED}/{step}")
        loss = replicas.backward(torch.from_numpy(ids), torch.from_numpy(weights))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * learning_rate_factor(step, share)
            part.step()
        step, seen = step + 1, seen + BATCH_TOKENS
        mean_loss = loss if math.isnan(mean_loss) else 0.95 * mean_loss + 0.05 * loss
        if step % 10 == 0:
            rate = seen / (time.perf_counter() - started)
            print(f"step {step}, {share:.0%}  loss {mean_loss:.3f}  {rate:.0f} tok/s", flush=True)
        if step % 50 == 0:
            print(
                f"step {step}  held-out stories {held_out_loss(model, encoder, held_out):.4f} nats a token",
                flush=True,
            )
            state = {
                "step": step,
                "spent": time.perf_counter() - started,
                "model": model.state_dict(),
                "optimizers": [part.state_dict() for part in parts],
            }
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").replace(checkpoint)
    write_gguf(options.out, model, encoder.processor)
    summary = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": options.out.stat().st_size,
        "tokens": step * BATCH_TOKENS,
        "held_out_story_nll": round(held_out_loss(model, encoder, held_out), 4),
        "held_out_story_tokens": int(np.sum([len(encoder.text(story)) + 1 for story in held_out])),
    }
    print(json.dumps(summary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=Path, required=True, help="stories separated by <|endoftext|>")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "data" / "demo-f16.gguf")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "demo_model", help="checkpoints go here")
    parser.add_argument("--start", type=Path, help="GGUF file of the narrower model (widen.py) to start from")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--peak", type=float, default=1.0, help="factor of all learning rates, lower with --start")
    parser.add_argument("--threads", type=int, default=2)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
