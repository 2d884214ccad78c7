# Configurations of other gateways, read into a tollgate.yaml, with a line for everything that it could not hold.
