# `tollgate dev`: every part on one machine from one command.
