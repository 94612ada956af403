"""What `kvgraph export --sample-text` checks before a bundle is written."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from kvgraph.commands.perplexity import read_text

if TYPE_CHECKING:
    from kvgraph.models.checkpoint import Checkpoint

# The largest residuals are those of a text's first tokens, which all others attend to.
SAMPLE_TOKENS = 2048


def check_sample_text(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose residual stream overflows float16 on the sample text, if that is its type.

    Args:
        args: Of `kvgraph export`.
        checkpoint: What is exported.

    Raises:
        ValueError: It overflows, or it cannot be measured.
    """
    from kvgraph.export.residual_range import require_float16_range

    if args.no_weights:
        raise ValueError("--sample-text runs the model, which takes its weights; leave out --no-weights")
    text = read_text(args.sample_text)
    dtype = args.dtype or checkpoint.dtype()
    if (args.residual_dtype or dtype) != "float16":
        return
    token_ids = _encode(checkpoint, text)[: min(SAMPLE_TOKENS, checkpoint.config.max_positions)]
    if not token_ids:
        raise ValueError(f"{args.sample_text}: the text is empty; give one of at least a few tokens")
    require_float16_range(checkpoint, [token_ids], dtype)


def _encode(checkpoint: Checkpoint, text: str) -> list[int]:
    """The text's ids in the checkpoint's own tokenizer, which a GGUF file has in a form of its own."""
    from kvgraph.runtime.tokenizer import TOKENIZER, Tokenizer

    with TemporaryDirectory() as folder:
        checkpoint.write_tokenizer(Path(folder))
        if not (Path(folder) / TOKENIZER).is_file():
            raise ValueError(
                f"{checkpoint.source.name}: has no tokenizer for --sample-text; add its tokenizer.json, or leave out "
                "--sample-text and use kvgraph compare"
            )
        return list(Tokenizer.load(folder, checkpoint.config_json).encode(text))
