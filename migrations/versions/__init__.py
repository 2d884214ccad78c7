# One file per change of the schema; each goes forward and back.
