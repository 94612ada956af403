"""Writes a random Llama checkpoint of any shape, to measure speed and memory with: `python make_checkpoint.py OUTPUT`.

The defaults are the shape of Llama-3.2-1B. Weights are seeded normal numbers in bfloat16, in several files with an
index as large checkpoints have; no more than one tensor beside the file being written is in memory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

_SCALE = 0.02
_SHAPE = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
_REST = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def weight_shapes(config: dict[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight, in the order of the model."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "self_attn.q_proj.weight", (queries, hidden)
        yield prefix + "self_attn.k_proj.weight", (keys, hidden)
        yield prefix + "self_attn.v_proj.weight", (keys, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield prefix + "mlp.gate_proj.weight", (ffn, hidden)
        yield prefix + "mlp.up_proj.weight", (ffn, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, ffn)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def make_checkpoint(
    output: Path, config: dict[str, int], seed: int = 0, shard_bytes: int = 500_000_000
) -> None:
    """Write config.json, the weights and their index to a new directory."""
    output.mkdir(parents=True)
    (output / "config.json").write_text(json.dumps({**_REST, **config}, indent=1))
    generator = torch.Generator().manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    index: dict[str, str] = {}
    size = total = 0
    for name, shape in weight_shapes(config):
        # Norms multiply, so theirs are near one.
        center, scale = (1.0, 0.1) if len(shape) == 1 else (0.0, _SCALE)
        weight = torch.empty(shape, dtype=torch.bfloat16).normal_(center, scale, generator=generator)
        if shards[-1] and size + weight.nbytes > shard_bytes:
            _write(output, shards)
            size = 0
        shards[-1][name] = weight
        index[name] = _shard_name(len(shards))
        size, total = size + weight.nbytes, total + weight.nbytes
    _write(output, shards)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (output / "model.safetensors.index.json").write_text(json.dumps(content, indent=1))


def _write(output: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """Write the last shard, let go of it and open the next."""
    save_file(shards[-1], output / _shard_name(len(shards)), metadata={"format": "pt"})
    shards[-1] = {}
    shards.append({})


def _shard_name(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def main() -> None:
    """Parse the arguments and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("output", type=Path)
    for name, default in _SHAPE.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    parser.add_argument("--untied", action="store_true", help="give the head a matrix of its own")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = {name: getattr(args, name) for name in _SHAPE}
    make_checkpoint(args.output, {**config, "tie_word_embeddings": not args.untied}, args.seed)


if __name__ == "__main__":
    main()
