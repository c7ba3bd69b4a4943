"""TTFT of chunks that are cached, measured on engines as they are served."""
