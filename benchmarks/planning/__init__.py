"""How long planning takes and what it finds, from shapes alone."""
