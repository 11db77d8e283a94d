from __future__ import annotations

from lwkv.storage.disk.lru import COMPLETE_S, STEP_S, TOUCH_S, Spared, Uses

NOW = 1e9


def learnt(*names: str, at: float = NOW) -> Uses:
    uses = Uses()
    for name in names:
        uses.add(name, at)
    return uses


def taken(uses: Uses, now: float = NOW) -> list[str]:
    order = []
    while (oldest := uses.take_oldest(Spared(), now)) is not None:
        order.append(oldest[0])
    return order


def test_others_are_told_of_a_prompt_once_in_a_while_and_of_each_chunk_as_older_than_the_one_before() -> None:
    uses = learnt("a", "b", "c", at=0.0)
    assert list(uses.follow(["a", "b", "c"], NOW)) == ["a", "b", "c"]
    assert uses.follow(["a", "b", "c"], NOW + TOUCH_S / 2) == {}
    told = uses.follow(["a", "b", "c"], NOW + TOUCH_S + 1)
    assert told["a"] > told["b"] > told["c"] > NOW + TOUCH_S


def test_a_new_file_is_not_younger_than_those_before_it_as_they_were_told() -> None:
    uses = learnt("a", "b")
    uses.follow(["a", "b", "c", "d"], NOW)
    later = NOW + TOUCH_S / 2
    assert uses.time_for("d", later) < uses.time_for("c", later) < NOW
    uses.add("d", uses.time_for("d", later))
    assert uses.follow(["d"], later) == {}
    assert uses.time_for("c", later) > uses.time_for("d", later)


def test_a_file_whose_time_is_ahead_is_set_right_when_it_is_used() -> None:
    uses = learnt("a", "b", at=NOW + 1000)
    told = uses.follow(["a", "b"], NOW)
    assert told == {"a": NOW, "b": NOW - STEP_S}


def test_the_order_survives_a_look_at_the_folder() -> None:
    uses = learnt("a", "b", "c", "x")
    uses.follow(["a", "b", "c"], NOW)
    uses.follow(["x"], NOW)
    uses.renew({"c": 1.0, "b": 2.0, "a": 3.0, "x": 4.0, "new": NOW + 1})
    assert taken(uses) == ["c", "b", "a", "x", "new"]


def test_a_chunk_without_the_one_before_it_goes_first_but_not_while_that_may_be_under_way() -> None:
    uses = learnt("x")
    uses.follow(["a", "b"], NOW)
    uses.add("b", NOW)
    assert taken(uses) == ["x", "b"]
    uses = learnt("x")
    uses.follow(["a", "b"], NOW)
    uses.add("b", NOW)
    assert taken(uses, NOW + COMPLETE_S) == ["b", "x"]


def test_a_file_that_was_taken_and_is_still_there_has_its_place_in_the_prompt() -> None:
    uses = learnt("a", "b")
    uses.follow(["a", "b"], NOW)
    assert uses.take_oldest(Spared(), NOW) is not None
    uses.add("b", NOW + 1)
    assert uses.before("b") == {"a"}


def test_what_is_spared_is_not_taken() -> None:
    uses = learnt("a", "b")
    assert uses.take_oldest(Spared({"a", "b"}), NOW) is None
    assert uses.take_oldest(Spared({"a"}), NOW) == ("b", NOW)
    assert uses.unknown(["a", "b"]) == ["b"]


def test_what_lacks_the_one_before_it_may_be_spared_while_that_may_be_under_way() -> None:
    uses = learnt("x")
    uses.follow(["a", "b", "c"], NOW)
    uses.add("c", NOW)
    spared = Spared({"x"}, orphans=True)
    assert uses.take_oldest(spared, NOW) is None
    assert uses.take_oldest(spared, NOW + COMPLETE_S) == ("c", NOW)
