"""`python -m picbench`: the same as the command `picbench`."""

from picbench.cli import main

main()
