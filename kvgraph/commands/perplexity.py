"""`kvgraph perplexity BUNDLE --text FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvgraph.thread_arguments import add_thread_arguments, threads_of

NAME = "perplexity"
HELP = "measure the perplexity of a text in consecutive windows, each after BOS where the model has one"

# Without --window: enough context to matter, at a cost that any machine bears.
_DEFAULT_WINDOW = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("bundle", metavar="BUNDLE", help="bundle to measure")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--window",
        type=int,
        metavar="N",
        help=f"tokens of a window (the model's positions, at most {_DEFAULT_WINDOW})",
    )
    parser.add_argument("--target", metavar="NAME", help="measure this target of the bundle")
    add_thread_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print one line."""
    from kvgraph.export.bundle import Bundle
    from kvgraph.runtime.open import open_session
    from kvgraph.runtime.perplexity import measure_perplexity
    from kvgraph.runtime.tokenizer import Tokenizer

    bundle = Bundle.open(args.bundle)
    tokenizer = Tokenizer.load(bundle.path, bundle.config)
    token_ids = tokenizer.encode(read_text(args.text), add_special_tokens=False)
    if not token_ids:
        raise ValueError(f"{args.text}: the text is empty; give one of at least a few tokens")
    session = open_session(bundle, args.target, threads=threads_of(args))
    limit = session.contract.capacity or session.contract.max_positions
    window = min(_DEFAULT_WINDOW, limit) if args.window is None else args.window
    result = measure_perplexity(session, token_ids, window, tokenizer.bos_token_id)
    prefix = "without BOS" if tokenizer.bos_token_id is None else "after BOS"
    print(
        f"perplexity {result.perplexity:.4g} over {result.tokens} tokens in {result.windows} windows of {window} "
        f"{prefix} ({session.info.subject}: {session.info.title})"
    )
    return 0


def read_text(path: str) -> str:
    """A UTF-8 file as it is, line ends included, without a byte order mark.

    Raises:
        ValueError: It is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
