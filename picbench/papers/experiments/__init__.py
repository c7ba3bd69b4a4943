"""What a paper's figures are made from: loads, latencies and scores, and their compact data."""
