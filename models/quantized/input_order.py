"""The group of every input, where inputs were sorted before they were quantized."""

from __future__ import annotations

import torch
from torch import Tensor


def input_order(groups: Tensor, block_size: int, name: str) -> Tensor | None:
    """The order of inputs under which every group lies together; None where it is the stored one.

    Args:
        groups: [I], the group of each input; -1 everywhere says that there is no order.
        block_size: How many inputs a group has.
        name: What the groups are, to be named in errors.

    Returns:
        [I] int64: the input that comes first, second, ...

    Raises:
        ValueError: A group is out of range, or has another number of inputs.
    """
    groups = groups.to(torch.int64)
    count = -(-len(groups) // block_size)
    if bool((groups == -1).all()):
        return None
    if bool(((groups < 0) | (groups >= count)).any()):
        low, high = int(groups.min()), int(groups.max())
        raise ValueError(
            f"{name} holds groups from {low} to {high}, expected 0 to {count - 1}: {len(groups)} inputs in groups of "
            f"{block_size}"
        )
    regular = torch.arange(len(groups)) // block_size
    if torch.equal(groups, regular):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], regular):
        sizes = torch.bincount(groups, minlength=count)
        odd = int((sizes != block_size).nonzero()[0])
        raise ValueError(
            f"{name} puts {int(sizes[odd])} inputs into group {odd}, expected {block_size} as in every group"
        )
    return order
