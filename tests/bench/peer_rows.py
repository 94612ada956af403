"""What is compared: the shapes, the environments of the peers, and one row a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

# Installed first in every environment that needs it, and held through every later install.
TORCH = "torch==2.13.0"

SHAPES: dict[str, dict[str, int]] = {
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
}
"""SmolLM2-135M and Llama-3.2-1B, both with tied embeddings."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment.

    Attributes:
        requirements: What pip installs, behind torch.
        remove: What is uninstalled again: an extra of a dependency that does not go with this torch.
        variables: Environment variables of the installation.
    """

    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


# GCC before 14 takes the configuration of AMX tiles for a dead store, and llama.cpp crashes.
_LLAMA_FLAGS = "-fno-tree-dse -fno-dse"
ENVIRONMENTS: dict[str, Environment] = {
    "genai": Environment(
        ("onnxruntime-genai==0.18.0", "onnxruntime", "onnx", "onnx-ir", "transformers", "safetensors")
    ),
    "llama": Environment(
        ("llama-cpp-python==0.3.36", "gguf", "safetensors"),
        variables={
            "CMAKE_ARGS": f"-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF "
            f"-DCMAKE_C_FLAGS='{_LLAMA_FLAGS}' -DCMAKE_CXX_FLAGS='{_LLAMA_FLAGS}'",
        },
    ),
    "openvino": Environment(
        ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "nncf", "optimum-intel"),
        remove=("torchvision",),
    ),
    "optimum": Environment(("optimum-onnx", "onnxruntime")),
    "transformers": Environment(("transformers", "safetensors")),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A configuration of an engine.

    Attributes:
        name: Its row in the table.
        engine: N of `peer_N.py`.
        precision: What that file's conversion is told.
        group: Rows of one group are compared: "4 bit", "8 bit" or "float".
        weight_bits: Bits of a weight in memory, its part of the scale included.
        cache_bits: Bits of a number in the cache.
    """

    name: str
    engine: str
    precision: str
    group: str
    weight_bits: float
    cache_bits: int

    @property
    def is_ours(self) -> bool:
        """Whether this is kvgraph and no peer."""
        return self.engine == "kvgraph"


def _ours(name: str, recipe: str, group: str, bits: float) -> Row:
    return Row(f"kvgraph {name}", "kvgraph", recipe, group, bits, 32)


ROWS: tuple[Row, ...] = (
    # The checkpoint is bfloat16: its numbers are kept in 16 bits and multiplied in float32.
    _ours("float", "float", "float", 16),
    _ours("int8", "int8-all", "8 bit", 8),
    _ours("int4", "int4-all", "4 bit", 4.5),
    _ours("int8, then int4", "prefill=int8-dynamic-all,decode=int4-all", "4 bit", 4.5),
    Row("genai int4", "genai", "int4", "4 bit", 5, 32),
    Row("genai int8", "genai", "int8", "8 bit", 9, 32),
    Row("genai float32", "genai", "float32", "float", 32, 32),
    Row("llama.cpp Q4_0", "llama", "Q4_0", "4 bit", 4.5, 16),
    Row("llama.cpp Q8_0", "llama", "Q8_0", "8 bit", 8.5, 16),
    Row("llama.cpp F16", "llama", "F16", "float", 16, 16),
    Row("OpenVINO int4", "openvino", "int4", "4 bit", 4.5, 8),
    Row("OpenVINO int8", "openvino", "int8", "8 bit", 8, 8),
    Row("optimum float32", "optimum", "float32", "float", 32, 32),
    Row("transformers float32", "transformers", "float32", "float", 32, 32),
)
