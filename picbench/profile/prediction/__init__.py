"""From counts to times and memory, by way of measured cells."""
