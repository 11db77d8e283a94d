from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lwkv.integrations.vllm.scheduler.agenda import Agenda


def test_a_request_is_looked_at_until_it_sleeps_and_again_from_its_step_on() -> None:
    agenda = Agenda()
    agenda.wake("a")
    assert agenda.begin_step(1) == {"a"}
    agenda.sleep("a", 4)
    assert [set(agenda.begin_step(step)) for step in (2, 3, 4, 5)] == [set(), set(), {"a"}, {"a"}]


def test_one_that_sleeps_for_good_is_looked_at_when_it_is_woken() -> None:
    agenda = Agenda()
    agenda.wake("a")
    agenda.sleep("a", None)
    assert agenda.begin_step(1) == set()
    agenda.wake("a")
    assert agenda.begin_step(2) == {"a"}


def test_one_that_has_left_is_forgotten() -> None:
    agenda = Agenda()
    agenda.sleep("a", 2)
    agenda.wake("b")
    for request_id in ("a", "b", "never there"):
        agenda.leave(request_id)
    assert agenda.begin_step(1) == agenda.begin_step(2) == set()


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["wake", "sleep", "leave"]), st.integers(1, 4)))
)
def test_who_is_awake_is_who_was_woken_last_or_whose_step_has_come(
    events: list[tuple[str, str, int]],
) -> None:
    agenda, wakes_at = Agenda(), {"a": 99.0, "b": 99.0}
    for step, (request_id, event, steps) in enumerate(events, 1):
        assert agenda.begin_step(step) == {name for name, at in wakes_at.items() if at <= step}
        if event == "sleep":
            agenda.sleep(request_id, step + steps)
            wakes_at[request_id] = step + steps
        else:
            getattr(agenda, event)(request_id)
            wakes_at[request_id] = 0 if event == "wake" else 99.0
