"""The mean that all fitted figures use."""

import pytest

from baton.telemetry.running_mean import RunningMean


def test_nothing_measured_is_zero_and_the_first_sample_is_taken_as_it_is():
    mean = RunningMean(0.3)
    assert mean.value == 0.0
    mean.add(10.0)
    assert mean.value == 10.0
    mean.add(20.0)
    assert mean.value == pytest.approx(13.0)


def test_a_prior_counts_until_samples_outweigh_it():
    mean = RunningMean(0.05, prior=100.0)
    assert mean.value == 100.0
    mean.add(200.0)
    assert mean.value == pytest.approx(105.0)
