"""What a scorer answers with: numbers, and the declaration of what they mean."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class ScoreScale(StrEnum):
    """What a scorer's numbers mean; declared by whoever made them, never inferred from their values."""

    LOGIT = "logit"
    PROBABILITY = "probability"
    PASSTHROUGH = "passthrough"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    """One scorer's answer to one query.

    Attributes:
        values: [N] numbers in the order of the passages; float32 logits from a local model.
        scale: What the numbers mean.
        model_id: Names everything that can change a number: see ``CrossEncoder.model_id``.
        member: Which scorer answered, as a chain or a log names it.
    """

    values: NDArray[np.floating]
    scale: ScoreScale
    model_id: str
    member: str
