"""Commands that read run directories."""
