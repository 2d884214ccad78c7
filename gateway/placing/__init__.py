# `tollgate fleet up`: starts, replaces and stops replicas of our own engine, as many as each pool should have.
