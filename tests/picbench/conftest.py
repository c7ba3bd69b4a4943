"""Fixtures of the harness's tests; none starts a real engine."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# The fakes are beside the tests, and an arm's process imports them by the same name.
sys.path.insert(0, str(Path(__file__).parent))

# How fast the machine is must not decide a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
