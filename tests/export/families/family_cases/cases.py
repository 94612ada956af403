"""Every case, by name."""

from __future__ import annotations

from family_cases import encoder_decoders, experts, layer_norm, llama_like, textbook
from family_cases.case import Case

CASES: dict[str, Case] = {
    case.name: case
    for module in (llama_like, experts, layer_norm, encoder_decoders, textbook)
    for case in module.CASES
}
EXPORTED = [name for name, case in CASES.items() if case.exported]
