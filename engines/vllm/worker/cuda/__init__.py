"""Planned requests on a GPU: device-resident positions, attention, model runners, worker."""
