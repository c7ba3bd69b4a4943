"""Plans carried out on a GPU: device-resident positions, attention, runners, worker."""
