"""Options of a mixture of experts, as a task's config has them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from dlo_framework.errors import DloError, check_choice, check_number, did_you_mean

RouterKind = Literal["softmax", "sigmoid", "expert_choice"]


@dataclass(frozen=True)
class MixtureOptions:
    """Mixtures that replace MLPs of a model's blocks, and the losses of their routers.

    Args:
        count: Number of experts of a mixture; None for a model that has mixtures, whose routers get the losses.
        every: Period of the blocks with a mixture: 2 replaces the MLP of each second block, the last one included.
        top_k: Number of experts that compute a token; with `expert_choice`, their mean over the tokens.
        router: Scores of the experts: `softmax`, `sigmoid`, or `expert_choice`, where experts select tokens.
        normalize: Whether a token's weights are divided by their sum, so that experts that are copies of an MLP compute
            what the MLP does.
        aux_loss: Factor of the load-balancing loss; Switch uses 0.01.
        z_loss: Factor of the squared logarithm of the routers' normaliser; ST-MoE uses 0.001.
        bias_rate: Change of a loss-free bias in an optimizer step; DeepSeek-V3 uses 0.001. 0 has no bias.
        capacity_factor: Bound of an expert's tokens within a row (image or sequence), as a multiple of an equal share;
            the tokens beyond it are dropped. None drops none. A model that has mixtures drops tokens in training only,
            because other libraries run it without.
        shared: Whether each mixture keeps its MLP as a shared expert, which computes all tokens; the others start at 0.

    Raises:
        DloError: If a value is out of range, or values contradict each other.
    """

    count: int | None = None
    every: int = 2
    top_k: int = 2
    router: RouterKind = "softmax"
    normalize: bool = True
    aux_loss: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0
    capacity_factor: float | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        check_choice("experts.router", self.router, get_args(RouterKind))
        if self.count is None:
            self._check_no_layer()
        elif self.count < 2:
            raise DloError(f"experts.count must be at least 2, got {self.count}; 8 is usual")
        elif not 1 <= self.top_k <= self.count:
            raise DloError(f"experts.top_k must be in 1 to count={self.count}, got {self.top_k}; 2 is usual")
        check_number("experts.every", self.every, "at least 1", "2 is usual")
        for name, usual in (("aux_loss", 0.01), ("z_loss", 0.001), ("bias_rate", 0.001)):
            check_number(f"experts.{name}", getattr(self, name), "at least 0", f"{usual} is usual")
        check_number("experts.capacity_factor", self.capacity_factor, "above 0", "1.25 is usual")
        if self.top_k == 1 and self.normalize and self.router != "expert_choice":
            raise DloError(
                "experts.normalize must be false with top_k: 1, got true, by which each weight is 1 and the router gets"
                " no gradient; set normalize: false, or top_k: 2"
            )
        for name in ("bias_rate", "capacity_factor"):
            if self.router == "expert_choice" and getattr(self, name):
                raise DloError(
                    f"experts.{name} must be unset with router: expert_choice, whose load is equal by construction, got"
                    f" {getattr(self, name)}; remove it"
                )

    def _check_no_layer(self) -> None:
        defaults = MixtureOptions.__dataclass_fields__
        for name in ("every", "top_k", "router", "normalize", "shared"):
            if getattr(self, name) != defaults[name].default:
                raise DloError(
                    f"experts.count must be set with {name}, got none; set count: 8 to replace MLPs by mixtures, or"
                    f" leave {name} to the model's own config"
                )

    def settings(self) -> dict[str, Any]:
        """Returns the options as plain data, for checkpoints."""
        return asdict(self)


def read_options(given: MixtureOptions | dict[str, Any] | None) -> MixtureOptions | None:
    """Returns a task's option `experts`, which is a dict where a checkpoint builds the task.

    Raises:
        DloError: If a name is unknown, or a value is out of range.
    """
    if not isinstance(given, dict):
        return given
    known = MixtureOptions.__dataclass_fields__
    for name in given:
        if name not in known:
            raise DloError(
                f"experts must have options of mixtures, got '{name}'{did_you_mean(name, known) or '; remove it'}"
            )
    return MixtureOptions(**given)
