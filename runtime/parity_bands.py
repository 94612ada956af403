"""How large an error may be, by element type.

A tolerance is for the largest error of a tensor: an absolute one, or a share of the largest value that the reference
has there, whichever is more. The share is what counts with real models, whose residuals and logits have outliers of
several hundred: an error of that size is one rounding of the outlier.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """The errors that are accepted.

    Attributes:
        name: The element type that it is for.
        absolute: Accepted whatever the values.
        relative: Accepted as a share of the largest reference value of the tensor.
        reason: Where the numbers come from.
    """

    name: str
    absolute: float
    relative: float
    reason: str

    def tolerance(self, scale: float) -> float:
        """Largest accepted error in a tensor whose largest reference value is `scale`."""
        return max(self.absolute, self.relative * scale)


BANDS = {
    band.name: band
    for band in (
        Band(
            "float32", 1e-4, 5e-6, "the same formula summed in another order; rounding is 6e-8 an operation"
        ),
        Band("float16", 1e-3, 2e-2, "weights, activations and cache rounded to 11 bits, 5e-4 an operation"),
        Band("bfloat16", 8e-3, 1.5e-1, "weights, activations and cache rounded to 8 bits, 4e-3 an operation"),
        Band("int8", 8e-3, 2.5e-1, "values rounded to 255 levels of the largest of their channel or tensor"),
        Band("int4", 8e-3, 6e-1, "weights rounded to 16 levels of the largest of their block or channel"),
    )
}


def band_for(*dtypes: str) -> Band:
    """The band of the coarsest of the element types that two sessions compute with.

    Args:
        dtypes: As the contract spells them; other types count as int8 or, if they have 4 bits, as int4.
    """
    order = list(BANDS)
    return BANDS[max((_band_name(name) for name in dtypes), key=order.index)]


def _band_name(dtype: str) -> str:
    if dtype in BANDS:
        return dtype
    return "int4" if re.match(r"[a-z]*4(?!\d)", dtype) else "int8"
