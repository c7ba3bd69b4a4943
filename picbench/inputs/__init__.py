"""What a run is given: samples, request files, chunk files."""
