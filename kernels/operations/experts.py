"""Mixtures of experts: selection of experts per token, and products with the matrices of the selected experts."""

from __future__ import annotations

from functools import cached_property

from localllm.errors import KernelError
from localllm.kernels import graph as g
from localllm.kernels.graph import Operation, Routing, Rows, Tensor, Weight

#: Functions of `Route` from logits to probabilities of experts.
GATINGS = ("softmax", "sigmoid", "sqrt_softplus", "sigmoid_of_best", "sparsemixer")
#: Maximum relative distance of a logit that "sparsemixer" counts: twice the jitter of the training.
SPARSEMIXER_DISTANCE = 0.02
#: Maximum number of groups of experts.
MAX_GROUPS = 64


class Route(Operation[Routing]):
    """The k experts of each token: the largest of the token's logits [T, E], the lowest number first if equal.

    The experts' weights are their probabilities (softmax, sigmoid or √softplus of the logits) times ``scale``. With
    ``norm_topk_prob`` they are divided by their sum, so that softmax covers only the k selected experts.
    ``expert_scales`` [E] are further factors of the weights. ``expert_ids`` [T, k] sets the experts independently of
    the logits.

    With ``selection_bias`` [E], the experts with the largest sums of probability and bias are selected. With
    ``n_groups`` groups of E / n_groups neighbours, only experts of ``n_top_groups`` groups can be selected: the
    groups with the largest sums of their best ``n_group_best`` (1 or 2) probabilities, including biases.

    Two gatings are different. "sigmoid_of_best" weighs with the sigmoid, but selects the largest sums of *logit* and
    bias (Kolibri). "sparsemixer" weighs an expert with logit m by 1 / Σ exp(l - m). The sum contains the logits l of
    experts that were not selected before and whose distance m - l is at most `SPARSEMIXER_DISTANCE` * max(|l|, m).
    Source: arXiv:2409.12136 (GRIN, Phi-3.5-MoE).

    All layers of a graph have the same k. Sources: arXiv:2401.04088 (Mixtral), arXiv:2405.04434 (DeepSeek V2: groups
    by their best), arXiv:2412.19437 (V3: by their two best).
    """

    logits: Tensor
    k: int
    norm_topk_prob: bool
    scale: float = 1.0
    gating: str = "softmax"
    selection_bias: Weight | None = None
    n_groups: int = 1
    n_top_groups: int = 1
    n_group_best: int = 2
    expert_scales: Weight | None = None
    expert_ids: Tensor | None = None

    @property
    def is_by_logits(self) -> bool:
        """Return whether experts are selected and weighted by logits alone, without probabilities of all experts."""
        is_plain = self.selection_bias is None and self.expert_ids is None and self.n_groups == 1
        return self.gating in ("softmax", "sparsemixer") and is_plain

    @cached_property
    def result(self) -> Routing:
        n = self.logits.width
        g.check_rows(Rows.TOKENS, self.logits)
        g.check_choice("gating", self.gating, GATINGS)
        g.check_shape(self.selection_bias, n)
        g.check_shape(self.expert_scales, n)
        if self.gating == "sparsemixer" and (self.norm_topk_prob or not self.is_by_logits):
            raise KernelError("sparsemixer cannot be combined with normed weights, biases, groups or set experts")
        if not 1 <= self.k <= self.logits.width:
            raise KernelError(
                f"{self.k} of {self.logits.width} experts cannot be chosen: choose 1 to {self.logits.width}"
            )
        if self.expert_ids is not None:
            g.check_rows(Rows.TOKENS, self.expert_ids)
            if self.expert_ids.width != self.k or self.selection_bias is not None or self.n_groups > 1:
                raise KernelError(
                    f"{self.expert_ids.width} experts per token are set, but {self.k} are needed, without bias or "
                    "groups"
                )
        if not 1 <= self.n_group_best <= 2:
            raise KernelError(
                f"groups must be chosen by their best or their two best experts, not by {self.n_group_best}"
            )
        if not 1 <= self.n_groups <= min(MAX_GROUPS, n // 2 or 1) or n % self.n_groups:
            raise KernelError(
                f"{n} experts cannot be {self.n_groups} groups of at least two, of at most {MAX_GROUPS}"
            )
        if not 1 <= self.n_top_groups <= self.n_groups or self.k > n // self.n_groups * self.n_top_groups:
            raise KernelError(f"{self.k} experts cannot be chosen of {self.n_top_groups} in {self.n_groups} groups")
        return Routing(self.logits.width, self.k)


class ExpertLinears(Operation[tuple[Tensor, ...]]):
    """Products of each token of x [T, d] with weights [E, n_out, d], such as gate and up, of each selected expert.

    The results have a row per token and expert, in an order that depends on the backend. `Gated` and `ExpertOutput`
    accept such rows. ``biases`` [E, n_out] are empty or one per weight. If ``is_weighted``, a token's row is first
    multiplied by its weight for the expert, as in Llama 4.
    """

    x: Tensor
    experts: tuple[Weight, ...]
    routing: Routing
    biases: tuple[Weight, ...] = ()
    is_weighted: bool = False
    float_rows = ("biases",)

    @cached_property
    def result(self) -> tuple[Tensor, ...]:
        g.check_rows(Rows.TOKENS, self.x)
        if len(self.biases) not in (0, len(self.experts)):
            raise KernelError(
                f"{len(self.biases)} biases do not match {len(self.experts)} matrices: give one per matrix, or none"
            )
        for i, weight in enumerate(self.experts):
            _check_experts(weight, self.x, self.routing, self.biases[i] if self.biases else None)
        return tuple(Tensor(Rows.CHOSEN, weight.shape[1]) for weight in self.experts)


class ExpertOutput(Operation[Tensor]):
    """Each row of h times the weight [E, d, n_in] of its expert, summed per token with its weights, plus a residual.

    The result is [T, d]. The sum starts with a token's best expert. ``bias`` is [E, d]. If ``is_weighted`` is False,
    rows are added without weights.
    """

    h: Tensor
    experts: Weight
    routing: Routing
    residual: Tensor | None = None
    bias: Weight | None = None
    is_weighted: bool = True
    overwrites = "residual"
    float_rows = ("bias",)

    @cached_property
    def result(self) -> Tensor:
        g.check_rows(Rows.CHOSEN, self.h)
        _check_experts(self.experts, self.h, self.routing, self.bias)
        if self.residual is not None:
            g.check_residual(self.residual, Rows.TOKENS, self.experts.shape[1])
        return Tensor(Rows.TOKENS, self.experts.shape[1])


def _check_experts(weight: Weight, x: Tensor, routing: Routing, bias: Weight | None) -> None:
    g.check_dimensions(weight, 3)
    g.check_shape(weight, routing.n_experts, weight.shape[1], x.width)
    g.check_shape(bias, *weight.shape[:2])
