# `tollgate dev`: the whole house on one machine from one command. house.py starts, watches and ends everything;
# folder.py is where it keeps it, config.py what it configures.
