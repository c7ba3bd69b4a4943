"""Break-even: where chunks pay, measured over a grid of traffic."""
