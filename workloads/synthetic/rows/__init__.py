"""The makers of rows, one a data set."""
