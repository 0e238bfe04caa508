"""Packing of whole documents into rows."""
import random

import numpy as np
import slidedp_data
from slidedp_data import IGNORED, Document


def document(start, length):
    return Document(np.arange(start, start + length, dtype=np.int32), np.arange(length) > 0)


def test_best_fit_in_input_order():
    # 6 opens row 0 (4 left), 7 row 1 (3 left); 3 fits best into row 1, 4 into row 0; 5 opens row 2, as does not 5 again.
    assert slidedp_data.assign_rows([6, 7, 3, 4, 5, 5], 10) == [[0, 3], [1, 2], [4, 5]]


def test_every_document_is_in_one_row_and_no_row_is_too_full():
    random.seed(3)
    lengths = [random.randint(2, 64) for _ in range(2000)]
    rows = slidedp_data.assign_rows(lengths, 64)
    assert sorted(d for row in rows for d in row) == list(range(2000))
    assert all(sum(lengths[d] for d in row) <= 64 for row in rows)
    assert all(row == sorted(row) for row in rows)
    # Two rows that would fit into one never stay apart in best fit: at most one row is not over half full.
    assert sum(sum(lengths[d] for d in row) <= 32 for row in rows) <= 1


def test_open_rows_are_bounded(monkeypatch):
    monkeypatch.setattr(slidedp_data, "OPEN_ROWS", 1)
    # 6 leaves 4 free, 5 leaves 5: one row too many, the fuller one closes, so 4 goes to the other.
    assert slidedp_data.assign_rows([6, 5, 4], 10) == [[0], [1, 2]]


def test_rows_hold_documents_then_padding():
    packed = slidedp_data.pack([document(100, 3), document(200, 2)], 8, pad_id=7)
    assert packed.input_ids.tolist() == [[100, 101, 102, 200, 201, 7, 7, 7]]
    assert packed.labels.tolist() == [[IGNORED, 101, 102, IGNORED, 201, IGNORED, IGNORED, IGNORED]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert {t.dtype for t in vars(packed).values()} == {np.dtype(np.int32)}


def test_full_row_has_no_padding():
    packed = slidedp_data.pack([document(0, 4)], 4, pad_id=7)
    assert packed.position_ids.tolist() == [[0, 1, 2, 3]]
    assert packed.input_ids.tolist() == [[0, 1, 2, 3]]


def test_rules_of_the_format_hold():
    random.seed(5)
    packed = slidedp_data.pack([document(random.randint(0, 900), random.randint(2, 40)) for _ in range(300)], 40, pad_id=0)
    starts = packed.position_ids == 0
    assert starts[:, 0].all()
    assert (packed.labels[starts] == IGNORED).all()
    steps = np.diff(packed.position_ids, axis=1)
    assert (starts[:, 1:] | (steps == 1)).all()
    kept = packed.labels != IGNORED
    assert (packed.labels[kept] == packed.input_ids[kept]).all() and kept.any()
