"""The demo's data and judgements. (The demo itself runs the whole loop.)"""
import json
import sqlite3

import answers
import check_export
import make_chat_data
import pytest
import show_results


def test_held_out_values_are_never_generated():
    everything = make_chat_data.examples(400, seed=1)
    asked = {messages[0]["content"] for messages in everything}
    for conversion, value, _ in make_chat_data.HELD_OUT:
        for phrase in range(len(make_chat_data.PHRASES)):
            assert make_chat_data.question(conversion, value, phrase) not in asked
    other = (0, 8, 0)
    assert make_chat_data.question(*other) in {m[0]["content"] for m in make_chat_data.examples(447, seed=1)}


def test_answers_are_right_and_of_the_taught_form():
    by_unit = {unit: factor for _, unit, factor in make_chat_data.CONVERSIONS if unit == "cm"}
    for messages in make_chat_data.examples(300, seed=2):
        answer = json.loads(messages[1]["content"])
        assert answers.judge(messages[1]["content"], answer["unit"]) == (True, True)
        if answer["unit"] == "cm":
            value = next(int(word) for word in messages[0]["content"].split() if word.isdigit())
            assert answer["value"] == value * by_unit["cm"]


def test_same_seed_same_data():
    assert make_chat_data.examples(50, seed=3) == make_chat_data.examples(50, seed=3)
    assert make_chat_data.examples(50, seed=3) != make_chat_data.examples(50, seed=4)
    with pytest.raises(ValueError, match="only 447"):
        make_chat_data.examples(448, seed=1)


@pytest.mark.parametrize("answer, expected", [
    ('{"value": 7000, "unit": "m"}', (True, True)),
    ('{"value": 1, "unit": "m"}', (True, True)),  # the number need not be right
    ('{"value": 7000, "unit": "km"}', (True, False)),
    ('{"value": 7000}', (False, False)),
    ('{"value": 7000, "unit": "m", "more": 1}', (False, False)),
    ('The answer is {"value": 7000, "unit": "m"}', (False, False)),
    ("7000", (False, False)),
    ("", (False, False)),
])
def test_judge(answer, expected):
    assert answers.judge(answer, "m") == expected


def test_document_mask_isolates_documents():
    import torch

    mask = check_export.document_mask(torch.tensor([[0, 1, 0, 1]]))
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


GOOD = [{"parses": True, "right_unit": True}] * 3
BAD = [{"parses": False, "right_unit": False}] * 3
EXPORT = {"tensors": 4, "same_tensors": True, "all_bf16": True, "changed": 4, "loss": 0.5}


def outcome(losses=(2.0, 0.5, 0.5, 0.5, 0.5, 0.5), before=BAD, after=GOOD, export=EXPORT, rerun=(0.5000049,)):
    return [passed for passed, _ in show_results.checks(list(losses), before, after, export, list(rerun))]


def test_checks_pass_when_all_is_well():
    assert outcome() == [True] * 6


@pytest.mark.parametrize("failing, change", [
    (0, {"losses": (0.1, 0.5, 0.5, 0.5, 0.5, 0.6)}),
    (0, {"losses": (0.1, 0.1, 0.1, 0.1)}),
    (0, {"losses": (0.1, 0.1, 0.1, 0.1, float("nan"))}),
    (1, {"before": BAD[:2] + GOOD[:1]}),
    (2, {"after": GOOD[:2] + [{"parses": True, "right_unit": False}]}),
    (2, {"after": []}),
    (3, {"export": EXPORT | {"same_tensors": False}}),
    (3, {"export": EXPORT | {"all_bf16": False}}),
    (4, {"export": EXPORT | {"changed": 3}}),
    (5, {"rerun": (0.50001,)}),
    (5, {"rerun": ()}),
])
def test_each_check_can_fail(failing, change):
    assert [i for i, passed in enumerate(outcome(**change)) if not passed] == [failing]


def test_losses_are_those_of_the_last_run(tmp_path):
    database = tmp_path / "run.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE runs (id INTEGER)")
        connection.execute("CREATE TABLE steps (run_id INTEGER, step INTEGER, loss REAL)")
        connection.executemany("INSERT INTO runs VALUES (?)", [(1,), (2,)])
        connection.executemany("INSERT INTO steps VALUES (?, ?, ?)", [(1, 0, 9.0), (2, 1, 0.25), (2, 0, 2.0), (2, 2, None)])
    losses = show_results.read_losses(database)
    assert losses[:2] == [2.0, 0.25] and losses[2] != losses[2]
    curve = show_results.loss_curve(losses)
    assert curve[0].count("#") == 50 and curve[1].count("#") == 6 and "not a number" in curve[2]
