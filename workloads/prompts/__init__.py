"""From a row to a prompt: templates, chat templates, segmentation, truncation."""
