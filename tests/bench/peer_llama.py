"""llama.cpp: a GGUF file written from the checkpoint, and llama_decode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import peer_child

_FILE = "model.gguf"
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(checkpoint: Path, model: Path, precision: str) -> None:
    """Write one GGUF file with every matrix, the tied embedding included, in one of gguf's own types."""
    import gguf
    import numpy as np

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kind = gguf.GGMLQuantizationType[precision]
    model.mkdir(parents=True)
    writer = gguf.GGUFWriter(model / _FILE, "llama", use_temp_file=True)
    _write_config(writer, config)
    for name, weight in _weights(checkpoint):
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, count in heads.items():
            if part in name:
                weight = interleave(weight, config[count])
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        elif kind == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(gguf_name(name), weight.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """The name in GGUF of a weight of a Llama checkpoint."""
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _write_config(writer, config) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    # Token ids are all that is needed.
    writer.add_tokenizer_model("no_vocab")


def _weights(checkpoint: Path) -> Iterator:
    """Name and float32 array of every weight; NumPy has no bfloat16, torch reads it."""
    from safetensors import safe_open

    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield name, tensors.get_tensor(name).float().numpy()


def interleave(weight, heads: int):
    """Rows of each head, whose rotary halves lie behind each other, as pairs, which llama.cpp rotates."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns).copy()


class LlamaEngine:
    """A context of llama.cpp with its defaults: cache in float16, prompts in chunks of 512."""

    def __init__(self, model: Path, threads: int, slots: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(model / _FILE).encode(), options)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = slots
        params.n_batch = slots
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {model / _FILE}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def generate(self, input_ids: list[int], new_tokens: int, on_token: Callable[[int], None]) -> None:
        """Clear the cache; then one llama_decode for the prompt, and one a token."""
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)
        given = input_ids
        for _ in range(new_tokens):
            token = self._run(given)
            on_token(token)
            given = [token]

    def _run(self, tokens: list[int]) -> int:
        import numpy as np

        ids = (self._library.llama_token * len(tokens))(*tokens)
        code = self._library.llama_decode(self._context, self._library.llama_batch_get_one(ids, len(tokens)))
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code}")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))


if __name__ == "__main__":
    peer_child.main(convert, LlamaEngine)
