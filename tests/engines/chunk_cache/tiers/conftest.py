"""Hypothesis for tests that touch threads, files and sockets."""

from hypothesis import HealthCheck, settings

# How fast the machine is must not decide a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
