"""Where rows come from: bundled, files, the Hugging Face hub."""
