"""The time that planning takes and the plans that it finds, from shapes alone."""
