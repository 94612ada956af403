import pytest

from kvgraph.runtime.chat import ChatTemplate
from kvgraph.runtime.conversation import Conversation
from kvgraph.runtime.model import Model

TEMPLATE = "{% for message in messages %}{{ message.role[0] + message.content + '|' }}{% endfor %}a"


@pytest.fixture
def model(toy, letters):
    return Model(toy, letters, ChatTemplate({"default": TEMPLATE}, {}))


def text_of(events):
    return "".join(event.text for event in events)


def fresh_answer(model, messages, count):
    """The answer without a cache from before."""
    return model.generate(model.encode_chat(messages), max_new_tokens=count).text


def test_answers_equal_those_without_a_cache(model):
    conversation = Conversation(model, [{"role": "system", "content": "hm"}])
    for text in ("one", "two", "3"):
        expected = fresh_answer(model, [*conversation.messages, {"role": "user", "content": text}], 4)
        assert text_of(conversation.send(text, max_new_tokens=4)) == expected
    assert [message["role"] for message in conversation.messages] == ["system"] + ["user", "assistant"] * 3


def test_a_turn_feeds_only_what_is_new(model, toy, letters):
    conversation = Conversation(model)
    answer = text_of(conversation.send("one", max_new_tokens=4))
    toy.calls.clear()
    text_of(conversation.send("two", max_new_tokens=1))
    whole = f"uone|a{answer}|utwo|a"
    assert conversation.prompt_tokens == len(whole)
    # The last token of the answer was never fed.
    assert conversation.cached_tokens == len("uone|a") + 3
    assert toy.calls[0][0].tolist() == [letters.encode(whole, add_special_tokens=False)[-len("?|utwo|a") :]]


def test_answer_that_is_broken_off_is_kept_as_far_as_it_was_read(model):
    conversation = Conversation(model)
    events = conversation.send("one", max_new_tokens=9)
    read = next(events).text + next(events).text
    events.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": read}
    expected = fresh_answer(model, [*conversation.messages, {"role": "user", "content": "two"}], 4)
    assert text_of(conversation.send("two", max_new_tokens=4)) == expected


def test_history_that_is_changed_is_fed_again_from_there(model):
    conversation = Conversation(model)
    text_of(conversation.send("one", max_new_tokens=4))
    conversation.messages[0] = {"role": "user", "content": "ore"}
    expected = fresh_answer(model, [*conversation.messages, {"role": "user", "content": "two"}], 4)
    assert text_of(conversation.send("two", max_new_tokens=4)) == expected
    assert conversation.cached_tokens == len("uo")


def test_turn_that_does_not_fit_changes_nothing(model):
    conversation = Conversation(model)
    text_of(conversation.send("one", max_new_tokens=4))
    before = list(conversation.messages)
    with pytest.raises(ValueError, match="the cache allows 64"):
        conversation.send("x" * 60)
    assert conversation.messages == before
    assert text_of(conversation.send("two", max_new_tokens=2))


def test_model_without_a_chat_template_is_refused(toy, letters):
    with pytest.raises(ValueError, match="no chat template"):
        Conversation(Model(toy, letters))
