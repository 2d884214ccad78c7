# The commands of `tollgate` for admins.
