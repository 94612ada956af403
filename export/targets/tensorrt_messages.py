"""What TensorRT says when it fails, as one line that names the node and the cause."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvgraph.runtime.tensorrt_api import OnnxParser
from kvgraph.runtime.tensorrt_module import MessageLog

# Where in TensorRT's own sources something was noticed: of no use to the reader.
_NOISE = re.compile(
    r"\[\w+\.(?:cpp|h|hpp):\d+: \w+\] |\s*\bIn \w+ at /[^\s)]+|\bI?\w+::\w+: |\bError Code \d+: (?:API Usage Error )?|"
    r"\[\w+\.cpp::\w+::\d+\] "
)
# On a machine without a driver, TensorRT adds this to every error, whatever the error was.
_NO_DRIVER = "CUDA driver version is insufficient"


def describe_parse_error(parser: OnnxParser, log: MessageLog) -> str:
    """Node, operator and cause of the parser's first error."""
    if parser.num_errors == 0:
        return describe_build_error(log, {})
    error = parser.get_error(0)
    cause = first_cause([*error.desc().splitlines()[1:], error.desc()])
    details = [message for message in log.errors() if "Failed to open" in message]
    if details:
        cause = f"{cause} ({_plain(details[0])})"
    if error.node() < 0:
        return cause
    return f"node {error.node()} {error.node_name()!r} ({error.node_operator()}): {cause}"


def describe_build_error(log: MessageLog, operators: Mapping[str, str]) -> str:
    """The first error that TensorRT logged, with the node that it names.

    Args:
        log: What was logged.
        operators: Node name -> operator, of the graph that was built.
    """
    cause = first_cause(log.errors())
    named = [name for name in operators if re.search(rf"(?<![\w/.]){re.escape(name)}(?![\w/.])", cause)]
    if not named:
        return cause
    node = max(named, key=len)
    return f"node {node!r} ({operators[node]}): {cause}"


def first_cause(messages: list[str]) -> str:
    """The first message that is a cause and not a consequence, without the noise."""
    for message in messages:
        if _NO_DRIVER not in message or len(messages) == 1:
            return _plain(message)
    return _plain(messages[0]) if messages else "it gives no reason"


def _plain(message: str) -> str:
    return " ".join(_NOISE.sub("", message).split())
