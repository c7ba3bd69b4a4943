"""The formats of a run directory: their versions, schemas, and what older ones become."""
