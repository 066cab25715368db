"""A window in flight: what lands, what goes back, and what is refused meanwhile."""

from __future__ import annotations

from tests.overlap import cases


def test_held_gradients_of_the_open_window_are_given_back(ranks):
    ranks(2).run(cases.sent_while_a_window_is_open)


def test_parameters_go_back_at_once_and_the_update_is_made_later(ranks):
    ranks(2).run(cases.going_back)


def test_a_write_to_provisional_parameters_is_an_error(ranks):
    for texts in ranks(2).run(cases.writes):
        assert all("settle()" in text and "on_update" in text for text in texts)
        assert "inner.0.weight" in texts[0] and "extra was written" in texts[1] and "extra was written" in texts[2]
        assert all("the state of SGD was written to" in texts[one] for one in (3, 5, 6))
        assert "extra was written" in texts[4] and "inner.2.bias was written" in texts[7]


def test_saving_lands_first(ranks):
    ranks(2).run(cases.saving)


def test_where_gradients_do_not_arrive_parameters_stay_the_last_true_ones(ranks):
    text = ranks(2).run(cases.lost_rank)[0]
    assert "did not" in text and "the last update that was made" in text


def test_a_step_that_communicates_is_found_and_undone(ranks):
    for text in sum(ranks(2).run(cases.a_step_that_communicates), []):
        assert "a step of Talking communicates" in text and "overlap=0" in text
