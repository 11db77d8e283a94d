from __future__ import annotations

import pytest

from lwkv.storage.remote.valkey.connections import Connections


class Line:
    """A connection that remembers whether it was closed."""

    def __init__(self) -> None:
        self.usable = True
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        raise ConnectionError("it was gone already")


@pytest.fixture
def made() -> list[Line]:
    return []


@pytest.fixture
def lines(made: list[Line]) -> Connections[Line]:
    def connect() -> Line:
        made.append(Line())
        return made[-1]

    return Connections(connect)


def test_a_connection_is_used_again_and_by_one_at_a_time(lines: Connections[Line], made: list[Line]) -> None:
    with lines.borrow() as first, lines.borrow() as second:
        assert first is not second
    with lines.borrow(), lines.borrow():
        pass
    assert len(made) == 2


def test_one_that_an_error_has_not_spoilt_is_kept(lines: Connections[Line], made: list[Line]) -> None:
    for _ in range(2):
        with pytest.raises(KeyError), lines.borrow():
            raise KeyError
    assert len(made) == 1


def test_one_that_cannot_be_used_any_more_is_closed_and_replaced(
    lines: Connections[Line], made: list[Line]
) -> None:
    with lines.borrow() as line:
        line.usable = False
    with lines.borrow():
        pass
    assert [line.closed for line in made] == [1, 0]


def test_close_closes_those_that_are_idle_now_and_the_others_when_they_come_back(
    lines: Connections[Line], made: list[Line]
) -> None:
    with lines.borrow() as used:
        with lines.borrow():
            pass
        lines.close()
        assert [line.closed for line in made] == [0, 1]
        assert used is made[0]
    assert [line.closed for line in made] == [1, 1]
    with pytest.raises(ConnectionError, match="closed"), lines.borrow():
        pass
