import json
import re

import pytest
import transformers

from kvgraph.runtime.chat import ChatTemplate
from kvgraph.runtime.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "{{ '<|im_start|>assistant\\n' }}\n"
    "{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
TOOLS = (
    "{%- if tools %}{{- tools | tojson(indent=2) }}\n{{ tools | tojson }}{%- endif %}"
    "{%- for document in documents or [] %}{{ document.title }}: {{ document.text }}\n{% endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'skip' %}{% continue %}{% endif %}"
    "{%- if message.tool_calls is defined %}call {{ message.tool_calls | tojson }}{% endif %}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{%- else %}{{ message.content }}{% endif %}"
    "{% endfor %}{{ extra }}{{ strftime_now('%Y') }}{{ pad_token }}"
)
CONVERSATIONS = [
    [{"role": "user", "content": " Hi <b>&</b> 'é' "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "tool_calls": None},
        {"role": "user", "content": "Bye"},
    ],
]
FUNCTION = {
    "type": "function",
    "function": {"name": "add", "description": "1 < 2 & 'three' é", "parameters": {}},
}


def write(directory, letters, file=None, **config):
    letters.backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if file is not None:
        (directory / "chat_template.jinja").write_text(file)
    return directory


def ours(directory):
    return ChatTemplate.load(directory, Tokenizer.load(directory))


def theirs(directory):
    return transformers.PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("template", [CHATML, TURNS, TOOLS], ids=["chatml", "turns", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompted", [True, False])
def test_text_equals_that_of_transformers(tmp_path, letters, template, messages, prompted):
    write(
        tmp_path,
        letters,
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>", "special": True},
        chat_template=template,
    )
    options = {
        "tools": [FUNCTION],
        "documents": [{"title": "T", "text": "x"}],
        "add_generation_prompt": prompted,
        "extra": "more",
    }
    expected = theirs(tmp_path).apply_chat_template(messages, tokenize=False, **options)
    assert ours(tmp_path).render(messages, **options) == expected
    del options["tools"], options["documents"]
    expected = theirs(tmp_path).apply_chat_template(messages, tokenize=False, **options)
    assert ours(tmp_path).render(messages, **options) == expected


@pytest.mark.parametrize("tools", [None, [FUNCTION]])
def test_named_templates_are_chosen_as_transformers_does(tmp_path, letters, tools):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path, letters, chat_template=named)
    expected = theirs(tmp_path).apply_chat_template(CONVERSATIONS[0], tools=tools, tokenize=False)
    assert ours(tmp_path).render(CONVERSATIONS[0], tools=tools) == expected == ("tools" if tools else "plain")


def test_template_file_comes_before_the_config(tmp_path, letters):
    write(tmp_path, letters, file="from the file", chat_template="from the config")
    assert ours(tmp_path).render(CONVERSATIONS[0]) == "from the file"
    assert theirs(tmp_path).apply_chat_template(CONVERSATIONS[0], tokenize=False) == "from the file"


def test_model_without_a_template_has_none(tmp_path, letters):
    assert ours(write(tmp_path, letters)) is None


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", ["{{ bos_token }}a", "a"])
def test_rendered_chat_has_the_bos_of_the_template_and_no_other(tmp_path, letters, template, adds_bos):
    if not adds_bos:
        letters.backend.post_processor = None
    tokenizer = Tokenizer.load(write(tmp_path, letters, bos_token="<s>", chat_template=template))
    text = ChatTemplate.load(tmp_path, tokenizer).render(CONVERSATIONS[0])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(0) == template.count("bos_token")


def test_bos_that_only_the_generation_config_names_is_written_too(tmp_path, letters):
    write(tmp_path, letters, chat_template="{{ bos_token }}a")
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 0}')
    assert ours(tmp_path).render(CONVERSATIONS[0]) == "<s>a"


def test_conversation_that_the_template_refuses_is_an_error_with_its_reason(tmp_path, letters):
    template = ours(write(tmp_path, letters, chat_template=TURNS))
    with pytest.raises(ValueError, match="does not accept the conversation: roles must alternate"):
        template.render([{"role": "assistant", "content": "Hi"}])


def test_template_cannot_leave_the_sandbox(tmp_path, letters):
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    template = ours(write(tmp_path, letters, chat_template=escape))
    with pytest.raises(ValueError, match=r"does not accept the conversation: .*unsafe"):
        template.render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "wrong", [5, [], [{"name": "default"}], {"a": "b"}, [{"name": "default", "template": 3}]]
)
def test_template_of_another_type_is_refused(tmp_path, letters, wrong):
    with pytest.raises(ValueError, match=re.escape("neither a text nor a list of named templates")):
        ours(write(tmp_path, letters, chat_template=wrong))


def test_invalid_template_is_refused(tmp_path, letters):
    with pytest.raises(ValueError, match="not valid Jinja"):
        ours(write(tmp_path, letters, chat_template="{% for %}"))


def test_missing_default_template_names_those_there_are(tmp_path, letters):
    template = ours(write(tmp_path, letters, chat_template=[{"name": "rag", "template": "x"}]))
    with pytest.raises(ValueError, match="no chat template 'default', only rag"):
        template.render(CONVERSATIONS[0])
