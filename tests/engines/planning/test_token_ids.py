"""Token ids in an array, where vLLM has them in lists."""

import pickle

import numpy as np
import pytest

from picbench.engines.planning.pages import TokenIds


def test_they_are_extended_and_read_as_a_list_is() -> None:
    ids = TokenIds([1, 2, 3])
    ids.append(4)
    ids.extend([5, 6])
    ids += TokenIds([7])
    assert (list(ids), len(ids), ids[6]) == ([1, 2, 3, 4, 5, 6, 7], 7, 7)
    assert list(ids[2:4]) == [3, 4]
    ids.clear()
    assert not ids


def test_a_copy_is_one() -> None:
    ids = TokenIds([1, 2])
    same, copied = TokenIds(ids), ids.copy()
    ids.append(3)
    assert list(same) == copied == [1, 2]
    assert type(copied) is list


def test_they_are_sent_and_read_as_bytes() -> None:
    ids = TokenIds(range(1000, 33000))
    sent = pickle.dumps(ids, protocol=5)
    assert len(sent) < 4 * len(ids) + 200
    received = pickle.loads(sent)
    assert (type(received), list(received)) == (TokenIds, list(ids))
    assert np.asarray(received).dtype == np.int32


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        TokenIds([1 << 31])
