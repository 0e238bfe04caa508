"""Which tokens of a document are targets."""
import numpy as np
import pytest
import slidedp_data
from samples import chat


def encode(tokenizer, entry, train_on="assistant"):
    return slidedp_data.Encoder(tokenizer, train_on).encode(entry)


def target_text(tokenizer, document):
    return tokenizer.decode(document.ids[document.targets])


def test_targets_are_the_answers_and_their_end_token(make_tokenizer):
    _, tokenizer = make_tokenizer("plain")
    document = encode(tokenizer, chat("hi", "hello", "more", "yes"))
    assert tokenizer.decode(document.ids) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n"
                                              "<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")
    assert target_text(tokenizer, document) == "hello<|im_end|>yes<|im_end|>"


def test_ids_are_those_of_the_chat_template(make_tokenizer):
    _, tokenizer = make_tokenizer("plain")
    entry = chat("hi", "hé漢")
    expected = tokenizer.apply_chat_template(entry["messages"], tokenize=True, return_dict=True)["input_ids"]
    document = encode(tokenizer, entry)
    assert document.ids.tolist() == expected
    assert target_text(tokenizer, document) == "hé漢<|im_end|>"


def test_marked_template_gives_the_same_targets_as_rendering_turn_by_turn(make_tokenizer):
    entry = chat("question", "answer one", "again", "answer two")
    _, plain = make_tokenizer("plain")
    _, marked = make_tokenizer("marked")
    by_turn, by_mark = encode(plain, entry), encode(marked, entry)
    assert slidedp_data.Encoder(marked, "assistant").template_marks_assistant
    assert not slidedp_data.Encoder(plain, "assistant").template_marks_assistant
    np.testing.assert_array_equal(by_turn.ids, by_mark.ids)
    np.testing.assert_array_equal(by_turn.targets, by_mark.targets)


def test_template_that_treats_the_last_turn_differently(make_tokenizer):
    _, tokenizer = make_tokenizer("thinking")
    document = encode(tokenizer, chat("a", "one", "b", "two"))
    assert target_text(tokenizer, document) == "one<|im_end|><think>\n\n</think>\n\ntwo<|im_end|>"


def test_template_that_rewrites_earlier_turns_is_refused(make_tokenizer):
    _, tokenizer = make_tokenizer("rewriting")
    assert target_text(tokenizer, encode(tokenizer, chat("a", "one"))) == "one<|im_end|>"
    with pytest.raises(slidedp_data.DataError, match=r"message 2.*--train-on all"):
        encode(tokenizer, chat("a", "one", "b", "two"))


def test_train_on_all_leaves_out_only_the_first_token(make_tokenizer):
    _, tokenizer = make_tokenizer("plain")
    document = encode(tokenizer, chat("hi", "hello"), "all")
    assert not document.targets[0] and document.targets[1:].all()


def test_text_ends_with_the_end_token_and_trains_on_all_but_the_first(make_tokenizer):
    _, tokenizer = make_tokenizer("plain")
    document = encode(tokenizer, {"text": "abc"})
    assert tokenizer.decode(document.ids) == "abc<|im_end|>"
    assert document.targets.tolist() == [False, True, True, True]
    already = encode(tokenizer, {"text": "abc<|im_end|>"})
    assert already.ids.tolist() == document.ids.tolist()


def test_first_token_is_never_a_target_even_if_the_template_starts_with_the_answer(make_tokenizer):
    _, tokenizer = make_tokenizer("plain")
    tokenizer.chat_template = ("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    document = encode(tokenizer, {"messages": [{"role": "assistant", "content": "xyz"}]})
    assert target_text(tokenizer, document) == "yz<|im_end|>"


@pytest.mark.parametrize("entry, message", [
    ([1], 'with either "messages" or "text"'),
    ({}, 'with either "messages" or "text"'),
    ({"messages": [], "text": "a"}, 'with either "messages" or "text"'),
    ({"messages": []}, "not a non-empty list"),
    ({"messages": "hi"}, "not a non-empty list"),
    ({"messages": [{"content": "x"}]}, 'a message (1) without a "role"'),
    ({"messages": [{"role": "user"}]}, 'a message (1) without a "content"'),
    ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "unknown role alien"),
    ({"text": ""}, "not a non-empty string"),
    ({"text": 7}, "not a non-empty string"),
])
def test_bad_entries_say_what_is_wrong(make_tokenizer, entry, message):
    _, tokenizer = make_tokenizer("plain")
    with pytest.raises(slidedp_data.DataError) as error:
        encode(tokenizer, entry)
    assert message in str(error.value)


def test_messages_without_a_chat_template(make_tokenizer):
    _, tokenizer = make_tokenizer("none")
    with pytest.raises(slidedp_data.DataError, match="no chat template"):
        encode(tokenizer, chat("a", "b"))
    assert encode(tokenizer, {"text": "ab"}).targets.sum() == 2
