"""Arms and the processes in which their engines live."""
