"""Counters of what is captured: which launches share them."""

from types import SimpleNamespace

import pytest
import torch

from strobe.call import counters, launcher

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def capture(monkeypatch):
    """A GPU that captures: `capture.stream` and `capture.number` say where and what, `capture.reserved` how much was taken."""
    state = SimpleNamespace(stream=7, number=1, taken=[])

    def reserved(device, number):
        state.taken.append(number)
        return torch.zeros(number, dtype=torch.int32) if sum(state.taken) <= 1000 else None

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=state.stream, device_index=0))
    monkeypatch.setattr(launcher, "capture_of", lambda stream: state.number)
    monkeypatch.setattr(counters, "reserved", reserved)
    monkeypatch.setattr(counters, "_of_captures", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return state


def test_launches_of_a_capture_share_their_counters(capture):
    first = counters.of_capture(DEVICE, 100, "notes")
    assert counters.of_capture(DEVICE, 60, "notes") is first and capture.taken == [100]
    larger = counters.of_capture(DEVICE, 200, "notes")
    assert larger.numel() == 200 and counters.of_capture(DEVICE, 100, "notes") is larger


def test_arrivals_are_shared_and_are_not_the_notes(capture):
    """A launch leaves both as it found them, but a workspace has a running total, too."""
    notes, arrivals = counters.of_capture(DEVICE, 100, "notes"), counters.zeros(DEVICE, 100)
    assert counters.zeros(DEVICE, 50) is arrivals and arrivals.data_ptr() != notes.data_ptr()
    assert capture.taken == [100, 100]


def test_other_captures_and_other_streams_share_nothing(capture):
    found = [counters.of_capture(DEVICE, 8, "notes")]
    capture.number = 2
    found.append(counters.of_capture(DEVICE, 8, "notes"))
    capture.stream = 8
    found.append(counters.of_capture(DEVICE, 8, "notes"))
    assert len({x.data_ptr() for x in found}) == 3


def test_without_the_number_of_a_capture_each_launch_has_its_own(capture):
    capture.number = None
    assert counters.of_capture(DEVICE, 8, "notes") is not counters.of_capture(DEVICE, 8, "notes")


def test_what_the_graph_zeroes_itself_is_not_shared(capture, monkeypatch):
    """Its memory is given to others when the call is over."""
    monkeypatch.setattr(counters, "reserved", lambda device, number: None)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **keywords: zeros(*shape, **keywords))
    assert counters.of_capture(DEVICE, 8, "notes") is not counters.of_capture(DEVICE, 8, "notes")


def test_who_has_no_driver_asks_nobody(monkeypatch):
    """A driver without the question, or one that fails."""
    assert launcher.Driver.capture_of(SimpleNamespace(_library=SimpleNamespace()), 7) is None
    failing = SimpleNamespace(cuStreamGetCaptureInfo_v2=lambda *arguments: 1)
    assert launcher.Driver.capture_of(SimpleNamespace(_library=failing), 7) is None
