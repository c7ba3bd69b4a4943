"""Whether the engine and Hugging Face's own model answer the testbed's rows alike."""
