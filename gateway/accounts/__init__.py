# Teams, their keys, and who is calling.
