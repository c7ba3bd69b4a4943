"""What a paper claims, held against measurements: claims, evidence, verdicts."""
