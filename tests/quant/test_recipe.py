"""Recipes: what comes with kvgraph, files of one's own, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvgraph.quant.plan import needs_calibration, parse_plan, round_to_nearest
from kvgraph.quant.recipe import load_recipe, parse_recipe
from kvgraph.quant.recipe_files import recipe_names
from kvgraph.quant.scheme import ActivationScheme, ModuleScheme, WeightScheme

INT8 = ModuleScheme(WeightScheme("int8"))
WEIGHT = {"weight": {"format": "int8"}}


def test_recipes_that_come_with_kvgraph() -> None:
    assert {
        name: load_recipe(name).linear.weight.format for name in recipe_names() if name.endswith("-wo")
    } == {
        "fp8-wo": "float8_e4m3fn",
        "int4-wo": "int4",
        "int8-wo": "int8",
        "mxfp4-wo": "float4_e2m1",
        "nvfp4-wo": "float4_e2m1",
        "uint4-wo": "uint4",
    }
    assert {name for name in recipe_names() if needs_calibration(load_recipe(name))} == {"fp8", "int8-sq"}


@pytest.mark.parametrize("name", ["int4", "int8", "int8-dynamic"])
def test_a_recipe_for_all_weights_has_head_and_embedding_besides(name: str) -> None:
    layers = load_recipe("int8-dynamic" if name == "int8-dynamic" else f"{name}-wo")
    expected = replace(layers, name=f"{name}-all", lm_head="linear", embedding="linear")
    assert load_recipe(f"{name}-all") == expected


def test_head_and_embedding_are_kept_unless_asked_for() -> None:
    kept = parse_recipe({"linear": WEIGHT}, "kept")
    asked = parse_recipe({"linear": WEIGHT, "lm_head": "linear", "embedding": "linear"}, "asked")
    for module in ("lm_head", "model.embed_tokens"):
        assert kept.module_scheme(module) is None
        assert asked.module_scheme(module) == INT8


def test_embedding_is_never_given_a_rounded_input() -> None:
    linear = {**WEIGHT, "activation": {"format": "int8", "granularity": "token"}}
    recipe = parse_recipe({"linear": linear, "embedding": "linear"}, "x")
    assert recipe.module_scheme("model.embed_tokens") == INT8
    assert recipe.module_scheme("model.layers.0.mlp.up_proj") == ModuleScheme(
        WeightScheme("int8"), ActivationScheme("int8", "token")
    )


def test_last_override_that_matches_wins() -> None:
    recipe = parse_recipe(
        {
            "linear": WEIGHT,
            "override": [
                {"pattern": "*.mlp.*", "keep": True},
                {"pattern": "*.down_proj", "weight": {"format": "int4", "block_size": 32}},
            ],
        },
        "x",
    )
    assert recipe.module_scheme("model.layers.1.mlp.up_proj") is None
    assert recipe.module_scheme("model.layers.1.mlp.down_proj") == ModuleScheme(WeightScheme("int4", 32))
    assert recipe.module_scheme("model.layers.1.self_attn.q_proj") == INT8


def test_toml_and_json_files_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('lm_head = "linear"\n[linear.weight]\nformat = "int8"\n')
    (tmp_path / "own.json").write_text(json.dumps({"lm_head": "linear", "linear": WEIGHT}))
    toml, other = load_recipe(str(tmp_path / "own.toml")), load_recipe(str(tmp_path / "own.json"))
    assert toml == other
    assert toml.name == "own"


def test_recipe_survives_bundle_json() -> None:
    for name in recipe_names():
        recipe = load_recipe(name)
        data = json.loads(json.dumps(recipe.to_json()))
        assert data["name"] == name
        assert ModuleScheme(WeightScheme(**data["linear"]["weight"])).weight == recipe.linear.weight


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"linear": {}}, "linear: weight is missing"),
        ({"linar": WEIGHT}, "unknown linar; known are"),
        ({"linear": {"weight": {"format": "int7"}}}, "weight format is 'int7', expected one of int8, int4"),
        ({"linear": {"weight": {"format": "int4", "block_size": 24}}}, "expected a power of two"),
        ({"linear": {"weight": {"format": "int8", "scale_form": "power_of_two"}}}, "float4_e2m1 in blocks"),
        ({"linear": {"weight": {"format": "int8", "scope": 1}}}, "unknown scope"),
        ({"linear": WEIGHT, "algorithm": "magic"}, "algorithm is 'magic', expected one of rtn, gptq, awq"),
        ({"linear": WEIGHT, "smooth_quant": 2.0}, "smooth_quant is 2.0"),
        ({"linear": WEIGHT, "lm_head": "int8"}, "lm_head is 'int8', expected"),
        ({"linear": WEIGHT, "override": [{"pattern": "*"}]}, "expected a pattern and either keep"),
        (
            {"linear": {**WEIGHT, "activation": {"format": "float8_e4m3fn", "granularity": "token"}}},
            "goes with a weight of the same format",
        ),
    ],
)
def test_mistakes_in_a_recipe_are_named(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_recipe(data, "wrong")


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'int8' is not known; known are fp8, fp8-dynamic"):
        load_recipe("int8")


def test_broken_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("linear = [")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_recipe(str(tmp_path / "a.toml"))


class TestPlan:
    def test_one_recipe_is_one_plan_for_both_graphs(self) -> None:
        plan = parse_plan("int8-wo")
        assert plan.prefill is plan.decode
        assert plan.prefill.weight_quantizer is round_to_nearest
        assert plan.name == "int8-wo"

    def test_each_graph_may_have_its_own(self) -> None:
        plan = parse_plan("decode=int4-wo, prefill=int8-dynamic")
        assert (plan.prefill.recipe.name, plan.decode.recipe.name) == ("int8-dynamic", "int4-wo")
        assert plan.name == "prefill=int8-dynamic,decode=int4-wo"

    def test_same_recipe_twice_is_one(self) -> None:
        plan = parse_plan("prefill=int8-wo,decode=int8-wo")
        assert plan.prefill is plan.decode

    @pytest.mark.parametrize(
        "text", ["prefill=int8-wo", "prefill=int8-wo,prefill=fp8-wo", "prefill=,decode=int8-wo", "a=b,c=d"]
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="expected a name or a file, or prefill=NAME,decode=NAME"):
            parse_plan(text)
