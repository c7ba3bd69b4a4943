"""Where in a prompt the answer lies, and what that does to each algorithm's score."""
