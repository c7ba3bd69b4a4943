"""Workers on CPU (model runner V1)."""
