"""From a row to a prompt: templates, chat templates, segmentation, what is cut off or left out."""
