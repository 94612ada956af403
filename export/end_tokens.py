"""The end tokens that a checkpoint names, of which one outside the vocabulary would never end a text."""

from __future__ import annotations

from kvgraph.models.checkpoint import Checkpoint


def check_end_tokens(checkpoint: Checkpoint) -> None:
    """Refuse end tokens that the model cannot write.

    Raises:
        ValueError: Names the file, the key and the value.
    """
    vocab_size = checkpoint.config.vocab_size
    for file, values in (
        ("config.json", checkpoint.config_json),
        ("generation_config.json", checkpoint.generation_config),
    ):
        ids = values.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int) and not 0 <= token < vocab_size:
                raise ValueError(
                    f"{checkpoint.source.name}: {file}: eos_token_id is {ids!r}, expected 0 <= id < {vocab_size}, "
                    "vocab_size; correct the file"
                )
