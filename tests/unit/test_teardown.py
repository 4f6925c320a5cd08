from __future__ import annotations

import pytest

from megatrain.teardown import Teardown


def fail(error: BaseException) -> None:
    raise error


def test_the_first_error_is_told_and_a_later_one_is_logged(caplog):
    done: list[int] = []
    stack = Teardown()
    stack.callback(done.append, 1)
    stack.callback(fail, BufferError("later"))
    stack.callback(done.append, 2)
    with pytest.raises(ValueError, match="first"), stack:
        raise ValueError("first")
    assert done == [2, 1]
    assert caplog.messages == ["while ending after an error: BufferError: later"]


def test_what_fails_at_the_end_of_a_good_run_is_told():
    with pytest.raises(BufferError, match="later"), Teardown() as stack:
        stack.callback(fail, BufferError("later"))


def test_an_interrupt_goes_through():
    stack = Teardown()
    stack.callback(fail, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), stack:
        raise ValueError("first")
