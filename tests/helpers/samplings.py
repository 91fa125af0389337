"""Settings that cover every sampler."""

from __future__ import annotations

import numpy as np

from localllm.sampling import Sampling

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "logprobs": Sampling(temperature=0, logprobs=3),
    "sampled": Sampling(temperature=0.5, seed=3),
    "hot": Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=4),
    "penalties": Sampling(temperature=0.4, seed=5, repeat_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
    "dry": Sampling(temperature=0, dry_multiplier=2.0, dry_sequence_breakers=()),
    "xtc": Sampling(temperature=0.7, seed=6, xtc_probability=0.5, xtc_threshold=0.05),
    "typical": Sampling(temperature=0.7, seed=6, typical_p=0.7),
    "mirostat": Sampling(temperature=0.5, seed=7, mirostat=2, mirostat_tau=2.0),
    "adaptive-p": Sampling(seed=7, adaptive_target=0.4),
    "bias": Sampling(temperature=0, logit_bias={5: 3.0, 6: -np.inf}),
    "processor": Sampling(temperature=0, processors=(lambda ids, logits: np.roll(logits, len(ids) % 3),)),
}
