"""Which weights of experts the graphs read."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from family_cases import experts

from kvgraph.export.bundle import Bundle


def consumers(path: Path) -> dict[str, set[str]]:
    """What kinds of operators read each parameter of experts."""
    model = onnx.load(path, load_external_data=False)
    read: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            if ".experts." in name:
                read.setdefault(name, set()).add(node.op_type)
    return read


@pytest.mark.parametrize("name", [case.name for case in experts.CASES])
def test_decode_gathers_the_weights_of_chosen_experts_alone(name: str, bundle: Bundle) -> None:
    decode, prefill = (consumers(bundle.graph_path(graph)) for graph in ("decode", "prefill"))
    assert decode.keys() == prefill.keys()
    assert decode
    assert set.union(*decode.values()) == {"Gather"}
    assert set.union(*prefill.values()) == {"Gather" if name == experts.GROUPED else "MatMul"}
