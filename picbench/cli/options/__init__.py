"""What the options of commands are made of."""
