"Ctrl-C waits until it can do no harm, and is never lost."

import os
import signal
import subprocess
import sys
import threading

import pytest

import tformer.base.interrupts
from helpers import interrupted_at, plain_only, send_ctrl_c
from tformer.base.interrupts import DeferredInterrupts


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    "The handler of the tests, which raises."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_until_it_is_delivered(handler):
    interrupts = DeferredInterrupts()
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts:
        interrupts.deliver()
        interrupt()
        interrupt()
        done.append("whole")
        interrupts.deliver()
        done.append("never")
    assert done == ["whole"]
    assert signal.getsignal(signal.SIGINT) is handler
    interrupts.deliver()  # it was raised once


def test_several_interrupts_are_raised_once():
    raised = 0
    try:
        with DeferredInterrupts() as interrupts:
            interrupt()
            interrupt()
            for _ in range(3):
                try:
                    interrupts.deliver()
                except KeyboardInterrupt:
                    raised += 1
    except KeyboardInterrupt:
        raised += 1
    assert raised == 1


def test_an_interrupt_is_raised_at_the_end_at_the_latest():
    interrupts = DeferredInterrupts()
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts:
            interrupt()
            done.append("whole")
        done.append("never")
    assert done == ["whole"]
    with interrupts:
        pass


@plain_only
def test_it_serves_again_wherever_an_interrupt_came(handler):
    "Also between its own lines, before it defers and when it no longer does."

    def is_inside(frame, event):
        return frame.f_code.co_filename == tformer.base.interrupts.__file__

    n = 0
    left = [0]
    while left[0] <= 0:
        n += 1
        interrupt = None
        interrupts = DeferredInterrupts(1)
        try:
            with interrupted_at(n, is_inside, send_ctrl_c) as left, interrupts:
                pass
        except KeyboardInterrupt as error:
            interrupt = error
        assert signal.getsignal(signal.SIGINT) is handler, n
        assert interrupt or left[0] > 0, f"the one at {n} is lost"
        with interrupts:
            assert signal.getsignal(signal.SIGINT) is not handler
        assert signal.getsignal(signal.SIGINT) is handler, n
    assert n > 4


def test_neither_an_interrupt_nor_an_error_is_lost(handler):
    "The interrupt is raised while the error is handled, and Python shows both."
    with pytest.raises(KeyboardInterrupt) as caught, DeferredInterrupts():
        interrupt()
        raise ZeroDivisionError
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(ZeroDivisionError), DeferredInterrupts():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("max_deferred", [1, 2, 5])
def test_so_many_interrupts_wait_and_the_next_one_does_not(max_deferred):
    done = []
    with (
        pytest.raises(KeyboardInterrupt) as caught,
        DeferredInterrupts(max_deferred),
    ):
        for n in range(max_deferred + 1):
            done.append(n)
            interrupt()
        done.append("never")
    assert done == [*range(max_deferred + 1)]
    # those that waited are not raised again
    assert not isinstance(caught.value.__context__, KeyboardInterrupt)
    with DeferredInterrupts(1) as interrupts:
        for _ in range(3):  # what was delivered no longer waits
            interrupt()
            with pytest.raises(KeyboardInterrupt):
                interrupts.deliver()


def test_an_interrupt_that_became_another_error_is_raised_after_it():
    "As Python makes a RuntimeError of any error while it makes a class."
    with pytest.raises(KeyboardInterrupt) as caught, DeferredInterrupts(1):
        interrupt()
        try:
            interrupt()
        except KeyboardInterrupt:
            raise RuntimeError from None
    assert isinstance(caught.value.__context__, RuntimeError)


def test_an_interrupt_may_be_allowed_for_a_while():
    interrupts = DeferredInterrupts()
    done = []
    with interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            interrupt()
            done.append("never")
        interrupt()
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            done.append("never")
        with interrupts.allowed():
            pass
        done.append("waits again")
        with pytest.raises(KeyboardInterrupt):
            interrupt()
            done.append("whole")
            interrupts.deliver()
    with interrupts.allowed():  # outside, nothing changes
        pass
    assert done == ["waits again", "whole"]


def test_the_inner_of_two_hands_its_interrupt_to_the_outer(handler):
    done = []
    with pytest.raises(KeyboardInterrupt), DeferredInterrupts():
        with DeferredInterrupts(1) as inner:
            interrupt()
            inner.deliver()  # the outer one lets it wait
            with inner.allowed():
                interrupt()
            interrupt()
            interrupt()  # one more than the inner one lets wait
            done.append("inner")
        with pytest.raises(ZeroDivisionError), DeferredInterrupts():
            interrupt()
            raise ZeroDivisionError
        done.append("outer")
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_one_object_is_not_used_inside_itself(handler):
    interrupts = DeferredInterrupts()
    with interrupts:
        with (
            pytest.raises(ValueError, match="is in use: make another"),
            interrupts,
        ):
            pass
        with pytest.raises(KeyboardInterrupt):  # and the outer block goes on
            interrupt()
            interrupts.deliver()
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt), interrupts:  # after it, it may
        interrupt()


def test_a_handler_of_the_program_is_called_later_and_stays():
    calls = []

    def own(*given):
        calls.append(given)

    before = signal.signal(signal.SIGINT, own)
    try:
        with DeferredInterrupts():
            interrupt()
            interrupt()
            assert not calls
        assert len(calls) == 1 and calls[0][0] == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("own", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_handles_no_interrupt_in_python_is_left_alone(own):
    before = signal.signal(signal.SIGINT, own)
    try:
        with DeferredInterrupts() as interrupts, interrupts.allowed():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_interrupts_are_left_alone(handler):
    found = []

    def work():
        with DeferredInterrupts() as interrupts, interrupts.allowed():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [handler]


@plain_only
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "1"])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(ValueError, match=f"max_deferred.*{wrong}"):
        DeferredInterrupts(wrong)


def test_the_module_imports_nothing_heavy():
    "The command line takes it before it knows whether a model is needed."
    program = "import sys, tformer.base.interrupts; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
