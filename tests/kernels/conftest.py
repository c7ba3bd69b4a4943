"""Fixtures of the kernels' tests."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# The batches that the tests share are modules of this folder.
sys.path.insert(0, str(Path(__file__).parent))

# How fast the machine is must not decide a test.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
