"""What is remembered of files has a limit, and ends when the file is another one."""

from __future__ import annotations

from storage.disk_rig import FORM

from lwkv.storage.disk.header_cache import MOST_HEADERS, BadFiles, Headers


def test_the_oldest_header_makes_room_for_the_newest() -> None:
    headers, header = Headers(), FORM.header("a", [0] * FORM.num_layers)
    for number in range(MOST_HEADERS):
        headers.keep(str(number), header)
    headers.keep("0", header)  # used again: 1 is the oldest now
    headers.keep("one more", header)
    assert headers.get("1") is None
    assert headers.get("0") is headers.get("one more") is header


def test_a_bad_file_is_known_until_another_file_has_its_name() -> None:
    bad = BadFiles()
    assert not bad.is_still("a", (1, 10))
    bad.note("a", (1, 10))
    assert bad.is_still("a", (1, 10))
    assert "a" in bad
    assert not bad.is_still("a", (1, 11))
    assert "a" not in bad
    assert not bad.is_still("a", (1, 10)), "forgotten, not only hidden"


def test_a_bad_file_that_could_not_be_looked_at_is_known_until_it_can() -> None:
    bad = BadFiles()
    bad.note("a", None)
    assert bad.is_still("a", None)
    assert not bad.is_still("a", (1, 10))


def test_only_so_many_bad_files_are_remembered() -> None:
    bad = BadFiles()
    for number in range(MOST_HEADERS + 1):
        bad.note(str(number), (number, 0))
    assert "0" not in bad
    assert "1" in bad
    assert str(MOST_HEADERS) in bad
