"""The time of planning and what it finds, from shapes alone."""
