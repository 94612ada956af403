"""Quantized graphs on ONNX Runtime against transformers with the same roundings written out in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvgraph.export.bundle import Bundle
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.quant.recipe import load_recipe
from kvgraph.quant.recipe_files import recipe_names
from kvgraph.quant.scheme import ActivationScheme, WeightScheme
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids, Session

# Sums in another order.
TOLERANCE = 2e-4
# The same, where a sum that lies between two codes may fall to either of them.
ROUNDED_INPUT_TOLERANCE = 0.05

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
INT4 = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1], dtype=torch.float32)
EVERYTHING = """
lm_head = "linear"
embedding = "linear"
[linear.weight]
"""
TABLES = {
    "int8": 'format = "int8"',
    "int4": 'format = "int4"\nblock_size = 16',
    "uint4": 'format = "uint4"\nblock_size = 32',
    "fp8": 'format = "float8_e4m3fn"',
    "nvfp4": 'format = "float4_e2m1"\nblock_size = 16\nscale_form = "float8_e4m3fn"',
}


def decoded(
    tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], scheme: WeightScheme, inputs: int
) -> Tensor:
    """A matrix from the tensors of the weights file, by the formats' definitions; `inputs` is the axis of the sums."""

    def unpacked(octets: Tensor, shape: tuple[int, ...], table: Tensor) -> Tensor:
        pairs = torch.stack([octets & 15, octets >> 4], dim=1).view(-1)
        return table[pairs[: torch.Size(shape).numel()].long()].view(shape)

    def spread(scale: Tensor) -> Tensor:
        if scheme.block_size is None:
            return scale.unsqueeze(inputs)
        whole = scale.repeat_interleave(scheme.block_size, dim=inputs)
        return whole.narrow(inputs, 0, shape[inputs])

    if scheme.format.endswith("int4") or scheme.format == "float4_e2m1":
        values = unpacked(tensors[name], shape, INT4 if "int4" in scheme.format else E2M1)
    else:
        values = tensors[name].float()
    scale = tensors[f"{name}_scale"].float()
    if f"{name}_zero_point" in tensors:
        values = values - spread(unpacked(tensors[f"{name}_zero_point"], scale.shape, INT4))
    return values * spread(scale * tensors.get(f"{name}_global_scale", torch.tensor(1.0)))


def rounding_hook(scheme: ActivationScheme, static: float) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    """A hook that rounds what a linear layer is given."""
    most = {"int8": 127.0, "float8_e4m3fn": 448.0}[scheme.format]

    def hook(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        (x,) = inputs
        scale = x.abs().amax(dim=-1, keepdim=True) / most if scheme.granularity == "token" else static
        scaled = x / scale
        if scheme.format == "int8":
            codes = scaled.round().clamp(-128, 127)
        else:
            codes = scaled.clamp(-most, most).to(torch.float8_e4m3fn).float()
        return codes * scale

    return hook


@pytest.fixture(scope="module")
def oracle(
    tiny_llama: Callable[..., Path], input_scales: dict[str, float]
) -> Callable[[Bundle, str], PreTrainedModel]:
    """The tiny model in transformers with the weights of a quantized bundle and the inputs' roundings."""

    def make(bundle: Bundle, recipe: str) -> PreTrainedModel:
        tied = bundle.config["tie_word_embeddings"]
        checkpoint = tiny_llama(tie_word_embeddings=True) if tied else tiny_llama()
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        tensors, found = load_file(bundle.path / WEIGHTS_FILE), load_recipe(recipe)
        for name, module in model.named_modules():
            scheme = found.module_scheme(name) if isinstance(module, nn.Linear | nn.Embedding) else None
            if scheme is None or (name == "lm_head" and tied):
                continue
            if isinstance(module, nn.Embedding):
                shape = tuple(module.weight.shape)
                module.weight.data = decoded(tensors, f"{name}.weight", shape, scheme.weight, inputs=1)
                continue
            shape = (module.in_features, module.out_features)
            module.weight.data = decoded(tensors, f"{name}.weight", shape, scheme.weight, inputs=0).T
            if scheme.activation is not None:
                static = input_scales[scheme.activation.format]
                module.register_forward_pre_hook(rounding_hook(scheme.activation, static))
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        return model

    return make


def teacher_forced(session: Session, ids: Ids, prompt: int) -> Floats:
    """Logits at every position of ids [B, n]: `prompt` tokens prefilled, the others decoded one by one."""
    batch, length = ids.shape
    cache = session.allocate_cache(batch)
    positions = np.tile(np.arange(prompt), (batch, 1))
    parts = [session.prefill(cache, ids[:, :prompt], np.zeros(batch, np.int64), positions)]
    for at in range(prompt, length):
        parts.append(session.decode(cache, ids[:, at : at + 1], np.full(batch, at)).copy())
    return np.concatenate(parts, axis=1)


def tokens(rows: int = 2, length: int = 12) -> Ids:
    return np.random.default_rng(0).integers(0, 97, (rows, length))


@pytest.mark.parametrize("recipe", recipe_names())
def test_logits_are_those_of_the_dequantized_model(
    recipe: str,
    tiny: Bundle,
    quantized: Callable[[Bundle, str], Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
    oracle: Callable[[Bundle, str], PreTrainedModel],
) -> None:
    bundle = quantized(tiny, recipe)
    with torch.no_grad():
        expected = oracle(bundle, recipe)(torch.from_numpy(tokens())).logits.numpy()
    found = teacher_forced(run_exactly(bundle), tokens(), prompt=7)
    rounds_inputs = load_recipe(recipe).linear.activation is not None
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=ROUNDED_INPUT_TOLERANCE if rounds_inputs else TOLERANCE
    )


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", TABLES)
def test_logits_with_head_and_embedding_quantized(
    name: str,
    is_tied: bool,
    tiny: Bundle,
    tied: Bundle,
    tmp_path: Path,
    quantized: Callable[[Bundle, str], Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
    oracle: Callable[[Bundle, str], PreTrainedModel],
) -> None:
    recipe = tmp_path / f"{name}.toml"
    recipe.write_text(EVERYTHING + TABLES[name])
    bundle = quantized(tied if is_tied else tiny, str(recipe))
    assert bundle.quantization is not None
    assert bundle.quantization["left"] == {"prefill": {}, "decode": {}}
    with torch.no_grad():
        expected = oracle(bundle, str(recipe))(torch.from_numpy(tokens())).logits.numpy()
    np.testing.assert_allclose(
        teacher_forced(run_exactly(bundle), tokens(), prompt=7), expected, rtol=0, atol=TOLERANCE
    )


@pytest.mark.parametrize("recipe", [*recipe_names(), "prefill=int8-dynamic,decode=int4-wo"])
def test_row_does_not_depend_on_its_neighbours(
    recipe: str,
    tiny: Bundle,
    quantized: Callable[[Bundle, str], Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    session, ids = run_exactly(quantized(tiny, recipe)), tokens(rows=3)
    alone = teacher_forced(session, ids[1:2], prompt=7)
    np.testing.assert_allclose(teacher_forced(session, ids, prompt=7)[1:2], alone, rtol=0, atol=TOLERANCE)
