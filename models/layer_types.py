"""Which layers see everything before a token, and which only a window of it."""

from __future__ import annotations

from kvgraph.models.config_reader import ConfigReader

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...] | None:
    """`layer_types`, one for each layer; None where the file has none.

    Raises:
        ValueError: Too few or too many, or a type that is not known.
    """
    return reader.sequence("layer_types", num_layers, (FULL, SLIDING))


def check_window(reader: ConfigReader, layer_types: tuple[str, ...], sliding_window: int | None) -> None:
    """Refuse layers that slide without a window to slide.

    Raises:
        ValueError: There are such layers and no window.
    """
    if SLIDING in layer_types and sliding_window is None:
        raise reader.error(
            f"layer {layer_types.index(SLIDING)} is of type {SLIDING!r}, but no sliding_window is in use; "
            "set it (and use_sliding_window, where the family has it), or make the layer full_attention"
        )


def read_switched_windows(reader: ConfigReader, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layer types and window as Qwen spells them: off unless `use_sliding_window`, and then from a layer upwards.

    `layer_types`, where it is there, says which layers slide; otherwise those from `max_window_layers` on do.

    Raises:
        ValueError: A key is malformed or missing, or layers slide without a window.
    """
    window = reader.optional_integer("sliding_window")
    if not reader.flag("use_sliding_window", default=False):
        window = None
    types = read_layer_types(reader, num_layers)
    reader.ignore("max_window_layers")
    if types is None:
        full = (
            num_layers if window is None else min(num_layers, reader.integer("max_window_layers", minimum=0))
        )
        types = (FULL,) * full + (SLIDING,) * (num_layers - full)
    check_window(reader, types, window)
    return types, window
