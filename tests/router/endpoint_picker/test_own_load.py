"""A picker's own requests in the reports of servers."""

from batonpb.common_pb2 import WorkerStatus

from router.endpoint_picker.own_load import OwnLoad

S = 1_000_000_000


def test_as_many_are_left_out_as_ran_together_lately():
    own = OwnLoad()
    own.began("w", 3)
    own.ended("w", 2, 10 * S)
    own.began("w", 1)
    own.ended("w", 2, 11 * S)
    assert [own.most("w", at * S) for at in (11, 13, 14, 15)] == [3, 3, 2, 0]
    assert own.most("other", 0) == 0


def test_the_rest_of_a_report_is_that_of_others():
    own = OwnLoad()
    own.began("w", 2)
    status = WorkerStatus(answering=6, running=6, waiting=2, answering_context=800)
    own.leave_out("w", status, S)
    assert (status.answering, status.waiting, status.answering_context) == (4, 2, 600)
    own.began("w", 9)
    own.leave_out("w", status, S)
    assert (status.answering, status.waiting, status.answering_context) == (0, 0, 0)
