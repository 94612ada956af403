"""What this machine can do at most: bytes read and products of matrices a second, as the shares' 100%.

peer_rates.py --threads 2 --json FILE
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from kvgraph.runtime.bandwidth import read_bandwidth

# A prompt of 512 tokens through the gate projection of the larger shape.
_M, _K, _N = 512, 2048, 8192
_REPETITIONS = 7
_INT8 = {np.int8: TensorProto.INT8, np.uint8: TensorProto.UINT8}


def gemm_rate(threads: int, activation: type | None = None, weight: type | None = None) -> float:
    """Operations a second of ONNX Runtime's MatMul in float32, or of MatMulInteger; the best of several runs."""
    values = np.random.default_rng(0).integers(0, 100, (_M, _K))
    if activation is None or weight is None:
        op, given, made, result = (
            "MatMul",
            TensorProto.FLOAT,
            np.ones((_K, _N), np.float32),
            TensorProto.FLOAT,
        )
        values = values.astype(np.float32)
    else:
        op, given, result = "MatMulInteger", _INT8[activation], TensorProto.INT32
        made, values = np.ones((_K, _N), weight), values.astype(activation)
    graph = helper.make_graph(
        [helper.make_node(op, ["a", "b"], ["y"])],
        op,
        [helper.make_tensor_value_info("a", given, [_M, _K])],
        [helper.make_tensor_value_info("y", result, [_M, _N])],
        [onnx.numpy_helper.from_array(made, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    best_s = float("inf")
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        session.run(None, {"a": values})
        best_s = min(best_s, time.perf_counter() - start)
    return 2 * _M * _K * _N / best_s


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    pairs = ((np.uint8, np.int8), (np.uint8, np.uint8), (np.int8, np.int8))
    rates = {
        "read_bytes_per_s": read_bandwidth(args.threads),
        "float32_ops_per_s": gemm_rate(args.threads),
        "int8_ops_per_s": max(gemm_rate(args.threads, *pair) for pair in pairs),
    }
    text = json.dumps(rates)
    print(text)
    if args.json is not None:
        args.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
