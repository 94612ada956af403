import io
import subprocess
import sys

import pytest

import kvgraph
from kvgraph.cli import main

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def bundle(repository, exported):
    """The bundled model, which has a tokenizer and a chat template."""
    return str(exported(repository / "tests" / "tiny_model" / "model").path)


@pytest.fixture(scope="module")
def model(bundle):
    return kvgraph.load(bundle)


def run(*arguments):
    return main(["run", *map(str, arguments)])


def test_text_is_on_stdout_and_all_else_on_stderr(bundle, model, capsys):
    assert run(bundle, "--prompt", PROMPT, "--max-new-tokens", 20) == 0
    captured = capsys.readouterr()
    assert captured.out == model.generate(PROMPT, max_new_tokens=20).text + "\n"
    device, report = captured.err.splitlines()
    assert device == f"{bundle}: {model.session.info.title}"
    assert f"{len(model.encode(PROMPT)[0])} prompt tokens, 20 new tokens, ended by length" in report


def test_prompt_may_be_a_file_or_token_ids(bundle, model, tmp_path, capsys):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    ids = ",".join(map(str, model.encode(PROMPT)[0]))
    for source in (["--prompt", PROMPT], ["--prompt-file", file], ["--token-ids", ids]):
        assert run(bundle, *source, "--max-new-tokens", 10) == 0
        assert capsys.readouterr().out == model.generate(PROMPT, max_new_tokens=10).text + "\n"


def test_flags_are_the_names_of_the_library(bundle, model, capsys):
    options = {
        "max_new_tokens": 15,
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 3,
        "prefill_chunk": 2,
    }
    flags = [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), value)]
    assert run(bundle, "--prompt", PROMPT, "--stop", "zzz", "--stop", "the", *flags) == 0
    assert capsys.readouterr().out == model.generate(PROMPT, stop=["zzz", "the"], **options).text + "\n"


def test_beams_are_written_at_the_end(bundle, model, capsys):
    options = {"num_beams": 3, "length_penalty": 2.0, "max_new_tokens": 30}
    flags = [text for name, value in options.items() for text in ("--" + name.replace("_", "-"), value)]
    for word, early_stopping in (("true", True), ("false", False), ("never", "never")):
        assert run(bundle, "--prompt", PROMPT, *flags, "--early-stopping", word) == 0
        captured = capsys.readouterr()
        expected = model.generate(PROMPT, early_stopping=early_stopping, **options)
        assert captured.out == expected.text + "\n"
        assert (
            f"new tokens in 3 beams, ended by {expected.finish_reason}, score {expected.score:.3f}"
            in captured.err
        )


def test_beams_of_a_bundle_without_a_tokenizer_are_token_ids(tiny_llama, exported, capsys):
    path = exported(tiny_llama()).path
    assert run(path, "--token-ids", "5,6,7", "--max-new-tokens", 4, "--num-beams", 2) == 0
    expected = kvgraph.load(path).generate([5, 6, 7], max_new_tokens=4, num_beams=2).token_ids
    assert capsys.readouterr().out == ",".join(map(str, expected)) + "\n"


def test_end_tokens_can_be_given(bundle, model, capsys):
    third = model.generate(PROMPT, max_new_tokens=3).token_ids[2]
    assert run(bundle, "--prompt", PROMPT, "--eos-token-ids", f"{third},0") == 0
    captured = capsys.readouterr()
    assert captured.out == model.generate(PROMPT, eos_token_ids=[third]).text + "\n"
    assert "ended by eos" in captured.err


def test_text_is_flushed_as_it_is_made(bundle, monkeypatch):
    class Recorder(io.StringIO):
        def flush(self):
            seen.append(self.getvalue())

    seen = []
    monkeypatch.setattr(sys, "stdout", Recorder())
    assert run(bundle, "--prompt", PROMPT, "--max-new-tokens", 20) == 0
    assert len(set(seen)) > 10


def test_bundle_without_a_tokenizer_gives_token_ids(tiny_llama, exported, capsys):
    path = exported(tiny_llama()).path
    assert run(path, "--token-ids", "5,6,7", "--max-new-tokens", 4, "--eos-token-ids", 0) == 0
    expected = kvgraph.load(path).generate([5, 6, 7], max_new_tokens=4, eos_token_ids=[0]).token_ids
    assert capsys.readouterr().out == ",".join(map(str, expected)) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --prompt --prompt-file --token-ids --chat is required"),
        (["--prompt", "a", "--chat"], "not allowed with argument"),
        (["--token-ids", "1,x"], "'1,x', expected integers such as 1,2,3"),
        (["--token-ids", ""], "'', expected integers such as 1,2,3"),
        (["--token-ids", "1,99999"], "token 1 is 99999, expected 0 <= id <"),
        (["--prompt-file", "absent.txt"], "absent.txt: No such file"),
        (["--prompt", "a", "--temperature", "nan"], "temperature is nan, expected a finite number"),
        (["--prompt", "a", "--max-new-tokens", "9999"], "the cache allows 512"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["--prompt", "a", "--stop", ""], "a stop string is empty"),
        (
            ["--prompt", "a", "--num-beams", "2", "--temperature", "1"],
            "temperature does not go with num_beams",
        ),
        (["--prompt", "a", "--num-beams", "2", "--stop", "x"], "stop does not go with num_beams = 2"),
        (["--prompt", "a", "--early-stopping", "maybe"], "'maybe' is none of true, false, never"),
        (["--chat", "--num-beams", "2"], "--chat shows an answer as it is made"),
        (["--prompt", "a", "--device", "npu"], "device is 'npu'"),
        (
            ["--prompt", "a", "--target", "ort-cuda"],
            "expected one of ort-cpu, tensorrt, tensorrt-rtx; without",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bundle, capsys, arguments, message):
    assert run(bundle, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error = captured.err.splitlines()[-1]
    assert error.startswith("kvgraph: error: ")
    assert message in error
    assert "Traceback" not in captured.err


def test_prompt_file_that_is_not_utf8_is_named(bundle, tmp_path, capsys):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert run(bundle, "--prompt-file", tmp_path / "latin.txt") == 2
    assert "latin.txt: not UTF-8" in capsys.readouterr().err


def test_no_new_tokens_is_an_empty_line(bundle, capsys):
    assert run(bundle, "--prompt", PROMPT, "--max-new-tokens", 0) == 0
    captured = capsys.readouterr()
    assert captured.out == "\n"
    assert "0 new tokens, ended by length" in captured.err


def test_chat_keeps_the_cache_between_turns(bundle, model, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n\nThen\n"))
    assert run(bundle, "--chat", "--max-new-tokens", 10) == 0
    captured = capsys.readouterr()
    messages, expected = [], []
    for text in ("Once upon a time", "Then"):
        messages.append({"role": "user", "content": text})
        answer = model.generate(model.encode_chat(messages), max_new_tokens=10).text
        messages.append({"role": "assistant", "content": answer})
        expected.append(answer + "\n")
    assert captured.out == "".join(expected)
    reports = captured.err.splitlines()[1:]
    assert len(reports) == 2
    assert "cached" not in reports[0]
    assert "cached" in reports[1]


def test_broken_pipe_is_quiet(bundle):
    command = f"{sys.executable} -m kvgraph run {bundle} --prompt a | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
