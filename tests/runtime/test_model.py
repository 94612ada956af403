import ast
import inspect
import re
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import kvgraph
from kvgraph import cli
from kvgraph.runtime.chat import ChatTemplate
from kvgraph.runtime.generate import stream
from kvgraph.runtime.generation import GenerationParams, collect
from kvgraph.runtime.model import Model, load
from kvgraph.runtime.threads import Threads

PROMPTS = [[5], [7, 8, 9], [4, 90, 3, 21, 60]]
# As ../shared/data/README.md gives it.
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball"
)


@pytest.fixture
def model(toy, letters):
    return Model(toy, letters, eos_token_ids=letters.eos_token_ids)


@pytest.fixture(scope="module")
def stories(shared_data, exported):
    return load(exported(shared_data / "stories260k").path)


def test_every_form_of_a_prompt_gives_the_same(model, letters):
    ids = letters.encode("fox")
    expected = model.generate("fox", max_new_tokens=5)
    for prompt in (ids, tuple(ids), np.array(ids), np.array(ids, np.int32)):
        assert model.generate(prompt, max_new_tokens=5) == expected
    for prompts in (["fox"], [ids], [tuple(ids)], np.array([ids]), ["fox", ids][:1]):
        assert model.generate(prompts, max_new_tokens=5) == [expected]
    assert model.generate(["fox", "a long one"], max_new_tokens=5)[0] == expected


def test_stream_gives_the_text_of_generate(model):
    events = list(model.stream(["fox", "dogs"], max_new_tokens=8))
    for row, generation in enumerate(model.generate(["fox", "dogs"], max_new_tokens=8)):
        assert "".join(event.text for event in events if event.row == row) == generation.text
        assert [event.token_id for event in events if event.row == row] == list(generation.token_ids)


def test_errors_of_a_stream_come_at_once(model, toy):
    for wrong in ({"max_new_tokens": 1000}, {"temperature": -1.0}, {"stop": ""}, {"top_k": -1}):
        with pytest.raises(ValueError, match=r"expected|allows"):
            model.stream("fox", **wrong)
    with pytest.raises(TypeError, match="temprature"):
        model.stream("fox", temprature=1.0)
    with pytest.raises(ValueError, match="no prompts"):
        model.stream([])
    assert toy.calls == []


def test_model_without_a_tokenizer_takes_token_ids_only(toy):
    model = Model(toy, eos_token_ids=(toy_token(toy, [5], 2),))
    generation = model.generate([5])
    assert (generation.finish_reason, len(generation.token_ids), generation.text) == ("eos", 2, "")
    with pytest.raises(ValueError, match=r"no tokenizer\.json; give the prompt as token ids"):
        model.generate("fox")


def toy_token(toy, prompt, count):
    return Model(toy).generate(prompt, max_new_tokens=count).token_ids[-1]


def test_chat_is_encoded_without_further_special_tokens(toy, letters):
    template = ChatTemplate({"default": "{{ bos_token }}{{ messages[0].content }}"}, {"bos_token": "<s>"})
    model = Model(toy, letters, template)
    assert model.encode_chat([{"role": "user", "content": "fox"}]) == letters.encode("fox")
    with pytest.raises(ValueError, match="no chat template"):
        Model(toy, letters).encode_chat([])


def test_public_names_are_those_of_the_runtime():
    assert kvgraph.load is load
    assert kvgraph.Model is Model
    assert kvgraph.Threads is Threads
    assert [name for name in kvgraph.__all__ if name not in dir(kvgraph) or not hasattr(kvgraph, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'unload'"):
        kvgraph.unload  # noqa: B018


def test_every_option_is_documented():
    for name in kvgraph.Options.__annotations__:
        assert f"\n    {name}: " in inspect.getdoc(kvgraph.Options)
        assert re.search(rf"\b{name}\b", inspect.getdoc(Model.generate))
    for name in inspect.signature(load).parameters:
        assert f"\n    {name}: " in inspect.getdoc(load)


def test_defaults_are_those_that_the_documentation_names():
    text = " ".join(inspect.getdoc(kvgraph.Options).split())
    params = GenerationParams()
    for name in kvgraph.Options.__annotations__:
        (written,) = re.findall(rf" {name}: [^()]*\((\w+)\)\.", text)
        default = getattr(params.sampling if hasattr(params.sampling, name) else params, name)
        assert (() if written == "none" else ast.literal_eval(written)) == default


def test_an_argument_that_load_does_not_know_is_refused_with_those_it_does(tmp_path):
    with pytest.raises(
        TypeError, match="load does not know dtype; known are target, device, threads, verify"
    ):
        load(tmp_path, dtype="float16")
    known = ", ".join(list(inspect.signature(load).parameters)[1:-1])
    with pytest.raises(TypeError, match=f"known are {known}, and"):
        load(tmp_path, top_k=5)


def test_tokens_equal_those_of_transformers(tiny_llama, exported):
    checkpoint = tiny_llama()
    model = load(exported(checkpoint).path)
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generations = model.generate(PROMPTS, max_new_tokens=40, eos_token_ids=())
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(generation.token_ids) == expected[0, len(prompt) :].tolist()


def test_end_tokens_of_a_bundle_without_tokenizer_are_those_of_its_config(tiny_llama, exported):
    bundle = exported(tiny_llama())
    model = load(bundle.path)
    assert model.tokenizer is None
    assert model.eos_token_ids == tuple(bundle.config["eos_token_ids"])


def test_story_begins_as_the_data_says(stories):
    text = stories.generate("", max_new_tokens=60).text
    assert text.startswith(STORY)
    assert "".join(event.text for event in stories.stream("", max_new_tokens=60)) == text


def test_text_goes_on_where_the_prompt_ends(stories):
    whole = stories.generate("", max_new_tokens=60).text
    assert whole.startswith("Once upon a time" + stories.generate("Once upon a time", max_new_tokens=20).text)


def test_rows_and_chunks_change_nothing_in_the_real_model(stories):
    prompts = ["Once", "Tom and Lily went to the big park and", "The dog saw a cat. " * 8]
    alone = [stories.generate(prompt, max_new_tokens=30) for prompt in prompts]
    assert stories.generate(prompts, max_new_tokens=30) == alone
    assert stories.generate(prompts, max_new_tokens=30, prefill_chunk=7) == alone


def test_cache_of_the_real_model_fills_to_the_last_slot(stories):
    ids = stories.encode("Once upon a time")[0]
    generation = stories.generate(ids, eos_token_ids=())
    assert (len(ids) + len(generation.token_ids), generation.finish_reason) == (512, "length")


def test_interleaved_streams_of_the_real_model_do_not_disturb_each_other(stories):
    prompts = ["Once upon", "The dog"]
    streams = [stories.stream(prompt, max_new_tokens=20) for prompt in prompts]
    texts = [
        "".join(event.text for event in events) for events in zip(*zip(*streams, strict=True), strict=True)
    ]
    assert texts == [stories.generate(prompt, max_new_tokens=20).text for prompt in prompts]


def test_story_ends_with_bos_where_that_is_an_end_token(stories):
    generation = stories.generate("Once", eos_token_ids=[1, 2])
    assert (generation.token_ids[-1], generation.finish_reason) == (1, "eos")
    assert (
        generation.text == stories.tokenizer.decode([*stories.encode("Once")[0], *generation.token_ids])[4:]
    )
    assert "<s>" not in generation.text


@pytest.mark.parametrize("reset", [True, False])
def test_cache_of_the_real_model_is_used_again(stories, reset):
    cache = stories.new_cache(limit=64)
    params = GenerationParams(max_new_tokens=20)
    for prompt in ("Once upon a time there was a dog and a cat.", "Tom", "Lily saw"):
        ids = stories.encode(prompt)
        (generation,) = collect(stream(stories.session, ids, params, stories.tokenizer, cache), 1)
        assert generation == stories.generate(prompt, max_new_tokens=20)
        if reset:
            cache.reset()
            assert not cache.read(stories.session.contract.state[0].name).any()


def test_ort_cpu_target_runs_a_bfloat16_bundle(tiny_llama, exported):
    from kvgraph.export.targets.ort_cpu import build_ort_cpu

    bundle = exported(tiny_llama(), dtype="bfloat16")
    with pytest.raises(ValueError, match="--target ort-cpu"):
        load(bundle.path)
    build_ort_cpu(bundle)
    model = load(bundle.path, "ort-cpu")
    assert (model.session.info.device, model.session.info.dtype) == ("cpu", "float32")
    assert len(model.generate(PROMPTS[1], max_new_tokens=5, eos_token_ids=()).token_ids) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "ort"}, "target 'ort' is unknown, expected one of ort-cpu"),
        ({"target": "ort-cpu", "device": "cuda"}, "runs on cpu, not on 'cuda'"),
        ({"target": "tensorrt", "device": "cpu"}, "runs on cuda, not on 'cpu'"),
        ({"device": "tpu"}, "device is 'tpu', expected cpu, cuda or cuda:N"),
        ({"device": "cpu:1"}, "device is 'cpu:1'"),
    ],
)
def test_wrong_targets_and_devices_are_refused(tiny_llama, exported, arguments, message):
    with pytest.raises(ValueError, match=message):
        load(exported(tiny_llama()).path, **arguments)


def test_a_target_is_known_to_run_if_it_can_be_built(tiny_llama, exported, capsys):
    assert cli.main(["build", "bundle", "--target", "none"]) == 2
    (choices,) = re.findall(r"\(choose from (.*)\)", capsys.readouterr().err)
    # Python 3.11 quotes them.
    known = choices.replace("'", "")
    with pytest.raises(ValueError, match=f"expected one of {known};"):
        load(exported(tiny_llama()).path, "none")


def test_target_that_was_not_built_names_the_command(tiny_llama, exported):
    with pytest.raises(FileNotFoundError, match=r"kvgraph build .* --target tensorrt-rtx"):
        load(exported(tiny_llama()).path, "tensorrt-rtx")


def test_missing_onnxruntime_names_the_extra(tiny_llama, exported, monkeypatch):
    path = exported(tiny_llama()).path
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"kvgraph\[cpu\].*kvgraph\[gpu\]"):
        load(path)


def test_missing_bundle_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such bundle"):
        load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens is 2.5, expected an integer"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens is True, expected an integer"),
        ({"logprobs": 1.5}, TypeError, "logprobs is 1.5, expected an integer"),
        ({"eos_token_ids": 2}, TypeError, "eos_token_ids is 2, expected a sequence of integers"),
        ({"eos_token_ids": ["2"]}, TypeError, "expected a sequence of integers"),
        ({"eos_token_ids": [-1]}, ValueError, "eos_token_ids holds -1, expected 0 <= id < "),
        ({"eos_token_ids": [5000]}, ValueError, "eos_token_ids holds 5000, expected 0 <= id < "),
        ({"stop": 5}, TypeError, "stop is 5, expected a text or a sequence of texts"),
        ({"max_length": 4}, TypeError, "unknown options: max_length; known are temperature"),
    ],
)
def test_options_of_another_kind_are_refused_before_compute(model, options, error, message):
    with pytest.raises(error, match=message):
        model.generate([1, 2], **options)


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        (None, TypeError, "prompt is a NoneType, expected a text, token ids, or a list of texts"),
        ({"prompt": "a"}, TypeError, "prompt is a dict, expected a text"),
        ((text for text in ["a"]), TypeError, "prompt is a generator, expected a text"),
        (b"fox", TypeError, "prompt is a bytes, expected a text"),
        (5, TypeError, "prompt is a int, expected a text"),
        ([1, "a"], TypeError, "expected integers"),
        ([1, None], TypeError, "prompt 0 holds None, expected token ids"),
        (["a", None], TypeError, "prompt 1 is a NoneType, expected a text or token ids"),
        (["a", {}], TypeError, "prompt 1 is a dict"),
        ([[1, [2]]], TypeError, "prompt 0 holds lists of different lengths"),
        ([1, [2]], TypeError, "prompt 0 holds lists of different lengths"),
        ([2**70], ValueError, f"prompt 0: token 0 is {2**70}, expected 0 <= id < 97"),
        ([[1], [2, -(2**70)]], ValueError, f"prompt 1: token 1 is -{2**70}, expected 0 <= id < 97"),
    ],
)
def test_prompts_of_another_kind_are_refused_in_one_line(model, toy, prompt, error, message):
    with pytest.raises(error, match=message) as caught:
        model.generate(prompt, max_new_tokens=1)
    assert "\n" not in str(caught.value)
    assert toy.calls == []
